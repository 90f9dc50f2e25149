"""State that the first call of `forward` fills: attributes that were missing or None, and entries
of caches.

Each trace starts from the state before the first call, so a later trace may compute a value that
differs from the one that the eager module has stored. `Graph.filled` records the values.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.core.capture.known_values import KnownValues
from shardwright.core.capture.state_contents import ATOMS, contents_of
from shardwright.core.torch_internals.dispatch import without_dispatch_modes, without_torch_function
from shardwright.errors import CaptureError

_CONTAINERS = (list, tuple, dict, set, deque)
_DEEPEST = 4
_PLAIN = (int, float, complex, str, bytes, type(None))


def value_text(value: Any, known_values: KnownValues, depth: int = 0) -> str:
    """Return a fingerprint of a value, equal for equal values of different traces.

    Args:
        value: a value that `forward` stores, such as a tensor, number or list.
        known_values: computes the values of traced tensors.
        depth: nesting depth of `value` in the stored object.
    """
    if isinstance(value, Tensor):
        data = _get_tensor_bytes(known_values.value_of(value))
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(value, ATOMS):
        return f"{type(value).__name__} {value!r}"
    inner = contents_of(value).items() if depth < _DEEPEST else ()
    items = (f"{key!r}: {value_text(item, known_values, depth + 1)}" for key, item in inner)
    return f"{type(value).__qualname__}({', '.join(items)})"


def _get_tensor_bytes(tensor: Tensor | None) -> bytes:
    """Return the data of a tensor; empty if its values are unknown."""
    if tensor is None or tensor.is_meta:
        return b""
    # Read outside of the modes of the trace, which would record these calls.
    with without_dispatch_modes(), without_torch_function():
        data: bytes = (
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return data


def check_filled(filled: Mapping[str, str], earlier: dict[str, str]) -> None:
    """Check that a call fills caches with the same values as earlier calls, and record the values.

    Args:
        filled: fingerprint of each value that the call stored, by its location.
        earlier: fingerprints of the values of earlier calls, by location; the fingerprints of new
            locations are added.

    Raises:
        CaptureError: if an earlier call stored another value at the same location, which the eager
            module would use.
    """
    for location, value_text_now in filled.items():
        if earlier.setdefault(location, value_text_now) != value_text_now:
            raise CaptureError(
                f"the first call of `forward` fills the {location}, but this call would fill it "
                "with another value\nset it in `__init__`, or call the model once before `plan`"
            )


def replaced_none(before: Any, after: Any) -> list[str] | None:
    """Return the names of attributes that changed from None to plain values.

    Example: the first call sets `problem_type` in configurations of `transformers`.

    Args:
        before, after: fingerprints of an object.

    Returns:
        None if anything else in the object changed.
    """
    plain_types = {plain_type.__name__ for plain_type in _PLAIN}
    # Fingerprints of `attributes.content`: ("object", id, (name, fingerprint), …).
    if (
        before is None
        or before[:2] != after[:2]
        or before[0] != "object"
        or [name for name, _ in before[2:]] != [name for name, _ in after[2:]]
    ):
        return None
    pairs = [(old, now) for old, now in zip(before[2:], after[2:], strict=True) if old != now]
    none = (type(None).__name__, None)
    if all(old[1] == none and now[1][0] in plain_types for old, now in pairs):
        return [name for (name, _), _ in pairs]
    return None


def only_adds_entries(before: Any, after: Any) -> bool:
    """Whether the only change to a dictionary is new entries, as in a cache."""
    type_names = {each[0] for each in (before, after) if each is not None}
    # The first element of both is the type name "dict".
    return type_names == {"dict"} and set(before[1:]) <= set(after[1:])


def are_equal_tensors(first: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal; False if either is None, which represents unknown values."""
    if first is None or other is None or first.dtype != other.dtype:
        return False
    with without_dispatch_modes(), without_torch_function():
        return torch.equal(first, other)


def has_unknown_values(value: Any, known_values: KnownValues) -> bool:
    """Whether an object contains a tensor whose values depend on inputs or parameters."""
    return any(known_values.value_of(tensor) is None for tensor in tensors_inside(value))


def tensors_inside(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in an object and its containers, at most `_DEEPEST` levels deep."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, _CONTAINERS):
        for item in contents_of(value).values():
            yield from tensors_inside(item, depth + 1)
