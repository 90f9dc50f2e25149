"""Caches of the user's that a trace has filled, as `functools.lru_cache` of a table of positions.

What a trace puts there has no values. Where it depends on no input or parameter it gets them, so
that the model itself, and later captures, can go on with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import CellType
from typing import Any

from torch import Tensor

_Cache = type(lru_cache(lambda: None))


def fill(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Puts tensors with values in the place of those without, wherever Python objects hold them.

    Args:
        kept: tensors that are alive though their trace is over, each with the one with its values.
    """
    if not kept:
        return
    values = {id(tensor): value for tensor, value in kept}
    own = {id(kept), *map(id, kept)}
    for holder in gc.get_referrers(*(tensor for tensor, _ in kept)):
        if id(holder) in own:
            continue
        if isinstance(holder, dict):
            _fill_dict(holder, values)
        elif isinstance(holder, list):
            holder[:] = [values.get(id(x), x) for x in holder]
        elif isinstance(holder, CellType) and id(holder.cell_contents) in values:
            holder.cell_contents = values[id(holder.cell_contents)]


class CachedFunctions:
    """Functions of the user's under `functools.lru_cache`, and how often each was computed."""

    def __init__(self) -> None:
        # Not `isinstance`, as that asks objects that only pretend to have a class.
        caches = [x for x in gc.get_referrers(_Cache) if type(x) is _Cache]
        self._misses = [(x, x.cache_info().misses) for x in caches if not _is_of_torch(x)]

    def forget(self, kind: type[Tensor] = Tensor) -> Iterator[tuple[Any, list[Tensor]]]:
        """Empties those that have made tensors of a kind since, and yields each with these."""
        for cache, before in self._misses:
            if cache.cache_info().misses != before:
                held = [x for x in _held_tensors(cache) if issubclass(type(x), kind)]
                if held:
                    cache.cache_clear()
                    yield cache, held


def _is_of_torch(cache: Any) -> bool:
    return str(getattr(cache, "__module__", "")).partition(".")[0] in ("torch", "sympy")


def _held_tensors(cache: Any) -> list[Tensor]:
    # An unbounded cache has a dict in between.
    return tensors_in(gc.get_referents(cache), depth=3)


def tensors_in(held: list[Any], depth: int = 2) -> list[Tensor]:
    """Return the tensors in `held`, and those in tuples, lists and dicts, `depth` levels deep."""
    found: list[Tensor] = []
    for _ in range(depth):
        found += [x for x in held if issubclass(type(x), Tensor)]
        held = gc.get_referents(*(x for x in held if type(x) in (tuple, list, dict)))
    return found


@contextmanager
def without_new_cached_tensors() -> Iterator[None]:
    """A context after which functions have forgotten the tensors that they made meanwhile, which
    may be of another dtype."""
    caches = CachedFunctions()
    try:
        yield
    finally:
        for _ in caches.forget():
            pass


def _fill_dict(holder: dict[Any, Any], values: Mapping[int, Tensor]) -> None:
    found = {key: values[id(x)] for key, x in holder.items() if id(x) in values}
    kinds = (kind for kind in gc.get_referrers(holder) if found and isinstance(kind, type))
    of_class = [k for k in kinds if all(vars(k).get(name) is holder[name] for name in found)]
    for key, value in found.items():
        if of_class:
            # Attributes of a class are looked up in a cache of Python's own, too.
            setattr(of_class[0], key, value)
        else:
            holder[key] = value
