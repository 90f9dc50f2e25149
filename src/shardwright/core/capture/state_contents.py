"""Contents of Python objects, one level deep, for comparison before and after a trace."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import pickle
import random
import threading
from array import array
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType, MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.core.capture.filled_caches import tensors_in
from shardwright.core.torch_internals.dispatch import without_dispatch_modes, without_torch_function
from shardwright.core.torch_internals.tensors import storage_id, version

MISSING = "<missing>"
"""Placeholder for an attribute, entry or variable that does not exist."""

STATE = "<state>"
"""Key of the internal state of an object, such as the position of an iterator."""

ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice)
"""Types of immutable values that are compared by `==`."""

OF_TORCH = frozenset(
    {
        # `training` is compared like the user's attributes, since `forward` may set it.
        *(vars(nn.Module()) | vars(nn.Module)).keys() - {"training"},
        *("_flat_weights", "_flat_weight_refs", "_output_capturing_hooks_installed"),
    }
)
"""Internal attributes of `nn.Module`, recurrent modules and models of `transformers`.

Models of `transformers` install hooks in the first call that requests outputs of submodules, such
as router logits.
"""


@dataclass(frozen=True)
class After:
    """Key under which `Parts` records which entry of an `OrderedDict` precedes the entry `key`."""

    key: Hashable

    def __repr__(self) -> str:
        return f"order of {self.key!r}"


@dataclass(frozen=True)
class Attribute:
    """Key under which `Parts` records the attribute `name` of an object that also has elements."""

    name: str


Cache = type(functools.lru_cache(lambda: None))

Parts: TypeAlias = dict[Hashable, Any]
"""Contents of an object, by index, key or attribute name."""

_LARGEST_ARRAY = 1 << 24
"""Maximum size in bytes of a compared array; larger arrays are usually data sets, and slow to
copy."""

_RANDOM = (random.Random, np.random.RandomState, np.random.Generator)
_COUNTED = (itertools.count, itertools.cycle, itertools.chain, itertools.islice, enumerate, map)
_EMPTY: tuple[Iterable[Any], ...] = ([], (), {}, set(), "", range(0))
_ITERATORS = (*_COUNTED, filter, zip, *(type(iter(empty)) for empty in _EMPTY))
ADVANCING: tuple[Any, ...] = (*_ITERATORS, GeneratorType)
"""Types whose contents are a position."""
_MAX_DEPTH = 4


def contents_of(value: Any) -> Parts:
    """Return the contents of an object that is not a module, function or class."""
    value_type = type(value)
    if issubclass(value_type, Tensor):
        return _read_tensor(value)
    for of_kind, read_contents in _CONTENTS:
        if issubclass(value_type, of_kind):
            held: Parts = read_contents(value)
            if value_type in of_kind:
                return held
            attributes = attributes_of(value).items()
            return {**held, **{Attribute(str(name)): each for name, each in attributes}}
    return attributes_of(value)


def attributes_of(value: Any) -> Parts:
    """Return the attributes of an object, including attributes in slots."""
    held: Parts = {}
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if type(slot) is MemberDescriptorType and not name.startswith("__"):
                held[name] = _read_slot_attribute(slot, value)
    try:
        held.update(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):  # An object with slots only.
        return held
    return held


def cached_results(cache: Any) -> Parts:
    """Return the cached results of a `functools.lru_cache`, by id.

    Results that contain tensors are omitted, since a trace replaces them (`filled_caches.py`).
    """
    held = gc.get_referents(cache)
    # CPython lists the arguments and results if `maxsize` is set, then an internal dictionary,
    # then the function.
    end = next(n for n, each in enumerate(held) if each is cache.__wrapped__) - 1
    unbounded = cache.cache_parameters()["maxsize"] is None
    results = held[end].values() if unbounded else held[:end]
    plain = (*ATOMS, tuple, type)  # Arguments are plain, or a tuple.
    return {id(x): x for x in results if not (isinstance(x, plain) or tensors_in([x]))}


def _read_slot_attribute(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # Not set yet.
        return MISSING


def _read_tensor(value: Tensor) -> Parts:
    # Inference tensors have no version; that of others rises with each change in place.
    return {} if value.is_inference() else {STATE: (version(value), storage_id(value))}


def _read_ordered_dict(value: collections.OrderedDict[Any, Any]) -> Parts:
    keys = list(value)
    # `move_to_end` changes who follows whom; a key that is added at the end changes nothing.
    before = {After(key): previous for previous, key in itertools.pairwise([MISSING, *keys])}
    return {**before, **dict(collections.OrderedDict.items(value))}


def _read_array(value: np.ndarray[Any, Any]) -> Parts:
    small = value.nbytes <= _LARGEST_ARRAY and value.dtype != object
    return {STATE: value.tobytes()} if small else {}


def _read_cell(value: CellType) -> Parts:
    try:
        return {STATE: value.cell_contents}
    except ValueError:  # A variable that is not assigned yet.
        return {STATE: MISSING}


def _read_generator(value: GeneratorType[Any, Any, Any]) -> Parts:
    frame = value.gi_frame
    held: Parts = {STATE: None if frame is None else frame.f_lasti}
    if frame is not None:
        held.update(frame.f_locals)
    return held


def _read_iterator(value: Any) -> Parts:
    if isinstance(value, itertools.count):
        return {STATE: repr(value)}
    try:
        return {STATE: value.__reduce__()}
    except (AttributeError, TypeError):  # Later versions of Python cannot copy iterators.
        return {STATE: getattr(value, "__length_hint__", lambda: None)()}


def _read_random_generator(value: Any) -> Parts:
    # `SystemRandom` has no state, and cannot be pickled.
    return {} if isinstance(value, random.SystemRandom) else {STATE: pickle.dumps(value)}


def _read_torch_generator(value: torch.Generator) -> Parts:
    # A trace would replace the tensor of the state.
    with without_torch_function(), without_dispatch_modes():
        return {STATE: value.get_state().numpy().tobytes()}


_CONTENTS: tuple[tuple[tuple[Any, ...], Callable[[Any], Parts]], ...] = (
    ((np.ndarray,), _read_array),
    ((list, tuple, collections.deque), lambda value: dict(enumerate(value))),
    ((collections.OrderedDict,), _read_ordered_dict),
    (
        (dict, collections.Counter, collections.defaultdict),
        lambda value: dict(dict.items(value)),
    ),
    ((set, frozenset), lambda value: dict.fromkeys(value, True)),
    ((bytearray, array), lambda value: {STATE: bytes(value)}),
    (_RANDOM, _read_random_generator),
    ((torch.Generator,), _read_torch_generator),
    ((CellType,), _read_cell),
    ((GeneratorType,), _read_generator),
    (_ITERATORS, _read_iterator),
    ((threading.local,), lambda value: dict(vars(value))),
    ((ContextVar,), lambda value: {STATE: value.get(MISSING)}),
    ((MethodType,), lambda value: {"__self__": value.__self__}),
    (
        (functools.partial,),
        lambda value: {"args": value.args, "keywords": value.keywords, "func": value.func},
    ),
)
"""Functions that read the contents of objects, by type; for subclasses, attributes are read too."""

CONTENT_TYPES = (Tensor, *(cls for types, _ in _CONTENTS for cls in types))
"""Types of libraries whose objects user code fills, such as containers."""


def is_same(before: Any, now: Any, equal: Callable[[Tensor, Tensor], bool], depth: int = 0) -> bool:
    """Whether a value is unchanged, including nested contents.

    Args:
        before, now: earlier and current value.
        equal: predicate that is true if two tensors are known to have equal values.
        depth: nesting depth of the value in the containers that are compared.
    """
    if before is now:
        return True
    value_type = type(before)
    if value_type is not type(now) or depth > _MAX_DEPTH:
        return False
    if issubclass(value_type, Tensor):
        return equal(before, now)
    if issubclass(value_type, ATOMS):
        # NaN is not equal to itself.
        return bool(before == now or (before != before and now != now))
    if value_type is FunctionType:  # Each call of a function creates its inner functions anew.
        return bool(before.__code__ is now.__code__)
    if value_type in (list, tuple, torch.Size, dict, set, frozenset, collections.deque, MethodType):
        old, new = contents_of(before), contents_of(now)
        return old.keys() == new.keys() and all(
            is_same(old[key], new[key], equal, depth + 1) for key in old
        )
    return False
