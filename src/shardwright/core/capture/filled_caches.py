"""User caches that a trace fills with tensors, such as a `functools.lru_cache` of a position table.

A trace fills caches with fake tensors. Fake tensors that depend on no input or parameter are
replaced by tensors with data, so that the eager model and later captures can use the cache.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import CellType
from typing import Any
from weakref import ref

from torch import Tensor

_Cache = type(lru_cache(lambda: None))


def fill(values_of_fakes: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Replace fake tensors by tensors with data in all Python objects that refer to them.

    Args:
        values_of_fakes: (fake tensor that outlives its trace, tensor with data) pairs.
    """
    if not values_of_fakes:
        return
    values = {id(tensor): value for tensor, value in values_of_fakes}
    # The pairs themselves and their list refer to the fake tensors too.
    excluded = {id(values_of_fakes), *map(id, values_of_fakes)}
    for holder in gc.get_referrers(*(tensor for tensor, _ in values_of_fakes)):
        if id(holder) in excluded:
            continue
        # Tuples cannot be changed, but `CachedFunctions.forget` has emptied caches that hold them.
        if isinstance(holder, dict):
            _replace_in_dict(holder, values)
        elif isinstance(holder, list):
            holder[:] = [values.get(id(x), x) for x in holder]
        elif isinstance(holder, CellType) and id(holder.cell_contents) in values:
            holder.cell_contents = values[id(holder.cell_contents)]


class CachedFunctions:
    """Record of the user's `functools.lru_cache` functions, with the cache misses of each."""

    def __init__(self) -> None:
        caches = _all_caches.live()
        self._misses = [(x, x.cache_info().misses) for x in caches if not _is_library_function(x)]

    def forget(self, tensor_type: type[Tensor] = Tensor) -> Iterator[tuple[Any, list[Tensor]]]:
        """Clear caches that gained tensors since construction; yield (cache, tensors) of each.

        Args:
            tensor_type: only caches that contain tensors of this class are cleared.
        """
        for cache, before in self._misses:
            # Only a miss adds an entry, so other caches need no search.
            if cache.cache_info().misses != before:
                held = [x for x in _find_cached_tensors(cache) if issubclass(type(x), tensor_type)]
                if held:
                    cache.cache_clear()
                    yield cache, held


class _LiveFunctionCaches:
    """Registry of the live `functools.lru_cache` objects of this process."""

    def __init__(self) -> None:
        self._scanned: tuple[list[ref[Any]], int] = [], 0

    def live(self) -> list[Any]:
        """Return all live `functools.lru_cache` objects; scan memory only if new ones may exist.

        A scan takes about a third of the time to plan a small model.
        """
        references, others = self._scanned
        caches = [cache for reference in references if (cache := reference()) is not None]
        # Each cache holds a reference to its class, so the difference grows with each new cache.
        if sys.getrefcount(_Cache) - len(caches) != others:
            # `isinstance` would read `__class__` of proxies, which may run user code.
            caches = [x for x in gc.get_referrers(_Cache) if type(x) is _Cache]
            self._scanned = list(map(ref, caches)), sys.getrefcount(_Cache) - len(caches)
        return caches


_all_caches = _LiveFunctionCaches()


def _is_library_function(cache: Any) -> bool:
    return str(getattr(cache, "__module__", "")).partition(".")[0] in ("torch", "sympy")


def _find_cached_tensors(cache: Any) -> list[Tensor]:
    # An unbounded cache keeps its results in a dictionary, which is one more level.
    return tensors_in(gc.get_referents(cache), depth=3)


def tensors_in(held: list[Any], depth: int = 2) -> list[Tensor]:
    """Return the tensors in a list and in its nested containers, down to level `depth`."""
    tensors: list[Tensor] = []
    # Per level: the tensors in `held`, then what the containers in it refer to.
    for _ in range(depth):
        tensors += [x for x in held if issubclass(type(x), Tensor)]
        held = gc.get_referents(*(x for x in held if type(x) in (tuple, list, dict)))
    return tensors


@contextmanager
def without_new_cached_tensors() -> Iterator[None]:
    """Return a context that on exit clears each `lru_cache` to which it added tensors.

    The cached tensors may have another dtype than the eager model computes.
    """
    caches = CachedFunctions()
    try:
        yield
    finally:
        for _ in caches.forget():
            pass


def _replace_in_dict(holder: dict[Any, Any], values: Mapping[int, Tensor]) -> None:
    replaced = {key: values[id(x)] for key, x in holder.items() if id(x) in values}
    classes = (cls for cls in gc.get_referrers(holder) if replaced and isinstance(cls, type))
    of_class = [k for k in classes if all(vars(k).get(name) is holder[name] for name in replaced)]
    for key, value in replaced.items():
        if of_class:
            # `setattr` also invalidates Python's cache of class attributes.
            setattr(of_class[0], key, value)
        else:
            holder[key] = value
