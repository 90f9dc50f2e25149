"""Count the bytes of live tensors while a program runs, on a device or on the meta device.

Each storage counts once, from the operator that returns a tensor with it until its last reference
is dropped. Workspace that an operator allocates and frees internally is not counted.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardwright.core.runtime.collective_errors import PROGRAM
from shardwright.core.torch_internals.dispatch import PlainDispatchMode, TorchDispatchMode
from shardwright.core.torch_internals.distributed import functional_collectives, is_collective
from shardwright.core.torch_internals.operators import schema_of
from shardwright.core.torch_internals.tensors import storage_id

PARAMETERS, WEIGHTS = "parameters", "weights"
"""Categories of storages: stored parameters; and gathered, cast or concatenated parameters, which
are computed only from parameters."""


class TrackedStorage:
    """The storage of a live tensor, with its size, category and origin.

    Args:
        size: bytes of the storage.
        category: category of the tensor, such as `PARAMETERS`; empty before it is labeled.
        line: line of the program that allocated the storage; 0 if it was allocated elsewhere.
    """

    __slots__ = ("category", "line", "size")

    def __init__(self, size: int, category: str, line: int = 0) -> None:
        self.size = size
        self.category = category
        self.line = line


Event = tuple[TrackedStorage, bool]
"""Allocation `(storage, True)` or release `(storage, False)` of a storage."""


def events_at_peak(events: Iterable[Event]) -> int:
    """Return the number of allocations and frees until live bytes first reach their peak."""
    live, peak_bytes, num_events = 0, 0, 0
    for number, (storage, allocated) in enumerate(events, start=1):
        live += storage.size if allocated else -storage.size
        if live > peak_bytes:
            peak_bytes, num_events = live, number
    return num_events


def bytes_by_category(events: Iterable[Event]) -> dict[str, int]:
    """Return the net change of live bytes by allocations and frees, by category of tensor."""
    totals: dict[str, int] = {}
    for storage, allocated in events:
        change = storage.size if allocated else -storage.size
        totals[storage.category] = totals.get(storage.category, 0) + change
    return totals


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks the storages of watched tensors and of all tensors created while
    it is active.

    Attributes:
        history: allocations and frees in order.
        current_bytes: current number of live bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.history: list[Event] = []
        self.current_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], TrackedStorage]] = {}

    def watch(self, tensors: Iterable[Tensor], category: str) -> None:
        """Track the storages of existing tensors, and label them with `category`."""
        for tensor in tensors:
            self._track_storage(tensor, category)
            # A view of a tracked tensor has the storage of that tensor, which gets the new
            # category.
            self.storage_of(tensor).category = category

    def storage_of(self, tensor: Tensor) -> TrackedStorage:
        """Return the `TrackedStorage` of a tensor that is tracked."""
        return self._storages[storage_id(tensor)][1]

    def label(self, category: str) -> None:
        """Label all live storages that have no label with `category`."""
        for _, storage in self._storages.values():
            storage.category = storage.category or category

    def events_until_peak(self, start: int = 0, end: int | None = None) -> int:
        """Return the number of allocations and frees until live bytes reach their peak, from index
        `start` to `end - 1` of `history`."""
        return start + events_at_peak(self.history[start:end])

    def bytes_between(self, end: int, start: int = 0) -> dict[str, int]:
        """Return the net change of live bytes by the allocations and frees `start` to `end - 1`, by
        category of tensor."""
        return bytes_by_category(self.history[start:end])

    def bytes_by_line(self, end: int) -> dict[tuple[str, int], int]:
        """Return the live bytes after the first `end` allocations and frees, by (category of
        tensor, allocating program line)."""
        totals: dict[tuple[str, int], int] = {}
        for storage, allocated in self.history[:end]:
            key = storage.category, storage.line
            totals[key] = totals.get(key, 0) + (storage.size if allocated else -storage.size)
        return totals

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and return its result; subclasses may return a cached result of equal
        shape."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = self.run(func, args, kwargs or {})
        self.track_results(out, args)
        return out

    def track_results(self, out: Any, args: tuple[Any, ...]) -> None:
        """Track the tensors that an operator returned for the arguments `args`."""
        if isinstance(out, Tensor):
            self._track_operator_result(out, args)
        elif isinstance(out, list | tuple):
            for each in out:
                if isinstance(each, Tensor):
                    self._track_operator_result(each, args)

    def _track_operator_result(self, out: Tensor, args: tuple[Any, ...]) -> None:
        # A view shares a storage that is tracked already.
        if storage_id(out) not in self._storages:
            self._track_storage(out, WEIGHTS if self._are_computed_from_parameters(args) else "")

    def _are_computed_from_parameters(self, args: tuple[Any, ...]) -> bool:
        """Whether all tensors in `args` are parameters or computed only from parameters."""
        has_weights = False
        for argument in args:
            for each in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(each, Tensor):
                    tracked = self._storages.get(storage_id(each))
                    if tracked is None or tracked[1].category not in (PARAMETERS, WEIGHTS):
                        # An untracked tensor was created before the mode was entered.
                        return False
                    has_weights = True
        return has_weights

    def _track_storage(self, tensor: Tensor, category: str) -> None:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key in self._storages:
            return
        tracked = TrackedStorage(storage.nbytes(), category, _current_program_line())
        self.history.append((tracked, True))
        self.current_bytes += tracked.size

        # Removed at once: the id of a freed storage may be that of the next one.
        def record_release(_: Any) -> None:
            del self._storages[key]
            self.history.append((tracked, False))
            self.current_bytes -= tracked.size

        # A reference to the storage, not the tensor: views keep a storage alive.
        self._storages[key] = (weakref.ref(storage, record_release), tracked)


def _current_program_line() -> int:
    """Return the line of the generated program that is running; 0 outside of the program."""
    # `traceback` would build a list of all frames, and this function runs for every new tensor.
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_filename == PROGRAM:
            return frame.f_lineno
        frame = frame.f_back
    return 0


_MAX_FRAMES = 16
"""Maximum number of frames between an operator and the program that calls it."""

META = torch.device("meta")

_PLAIN_TYPES = frozenset(
    {
        *(int, float, bool, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_MAX_LIST_LENGTH = 64
"""Maximum length of a list argument with which the result of an operator is cached."""


class DryRunMode(PlainDispatchMode, LiveBytes):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks live bytes on the meta device and caches results of operators.

    An operator runs once for each combination of argument shapes. Later calls create empty tensors
    of the same shapes, which makes dry runs of repeated blocks fast.

    Inputs of collectives stay alive until `wait_tensor`, as process groups hold references to them.

    Args:
        cached_results: cached results, by operator and arguments.
    """

    def __init__(self, cached_results: dict[Any, Any]) -> None:
        super().__init__()
        self._cached_results = cached_results
        self._in_flight: dict[int, list[Tensor]] = {}

    # Repeats `LiveBytes.__torch_dispatch__`, which PyTorch has wrapped in `torch._disable_dynamo`:
    # the wrapper takes as long as an operator on the meta device (`PlainDispatchMode`).
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = self.run(func, args, kwargs or {})
        self.track_results(out, args)
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _returns_new_tensors(func):
            if is_collective(func):
                return self._run_collective(func, args, kwargs)
            return func(*args, **kwargs)
        try:
            key = (
                func,
                *map(_cache_key_of_argument, args),
                *map(_cache_key_of_argument, kwargs.items()),
            )
        except _UncacheableArgumentError:
            return func(*args, **kwargs)
        if key in self._cached_results:
            return _make_empty_tensors_like_results(self._cached_results[key])
        out = func(*args, **kwargs)
        results = out if isinstance(out, list | tuple) else (out,)
        # Only results on the meta device can be rebuilt as empty tensors.
        if all(result is None or result.is_meta for result in results):
            self._cached_results[key] = _cache_key_of_argument(out)
        return out

    def _run_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is functional_collectives.wait_tensor.default:
            # The meta kernel returns a new tensor, but the kernel of a device returns its argument.
            self._in_flight.pop(storage_id(args[0]), None)
            return args[0]
        out: Tensor = func(*args, **kwargs)
        tensors_in_flight = [args[0]]
        if func is functional_collectives.reduce_scatter_tensor.default:
            # Gloo reduces in a copy of the input, other backends do not: an upper bound.
            tensors_in_flight.append(torch.empty_like(args[0]))
            self._track_storage(tensors_in_flight[-1], "")
        self._in_flight[storage_id(out)] = tensors_in_flight
        return out


class _UncacheableArgumentError(Exception):
    """Raised for an operator argument that is neither a tensor nor a plain value, nor a list of
    these."""


@cache
def _returns_new_tensors(func: Any) -> bool:
    """Whether `func` is an ATen operator that returns only tensors, none of which aliases an
    argument."""
    schema = schema_of(func)
    tensors = all(str(each.type) == "Tensor" for each in schema.returns)
    # A result from the cache has a new storage, so a view would count twice.
    aliases = any(each.alias_info for each in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and tensors and bool(schema.returns) and not aliases


def _cache_key_of_argument(argument: Any) -> Any:
    """Return a hashable key of an argument, for a tensor its shape, strides and dtype.

    Raises:
        _UncacheableArgumentError: if `argument` is neither a tensor nor a plain value, nor a list
            of these.
    """
    if (value_type := type(argument)) in _PLAIN_TYPES:
        # With the type, as 1, 1.0 and True are equal keys but promote dtypes differently.
        return value_type, argument
    if isinstance(argument, Tensor):
        # `is_meta` distinguishes scalars: autograd wraps a Python number in a CPU tensor, which
        # promotes dtypes differently.
        return _TensorKey((argument.shape, argument.stride(), argument.dtype, argument.is_meta))
    if isinstance(argument, list | tuple) and len(argument) <= _MAX_LIST_LENGTH:
        return tuple(map(_cache_key_of_argument, argument))
    raise _UncacheableArgumentError


class _TensorKey(tuple[Any, ...]):
    """Cache key of a tensor: shape, strides, dtype, and whether it is on the meta device."""

    __slots__ = ()


def _make_empty_tensors_like_results(description: Any) -> Any:
    """Return empty meta tensors for the cached results of an operator.

    Args:
        description: shapes, strides and dtypes of the results, as from `_cache_key_of_argument`.
    """
    if isinstance(description, _TensorKey):
        shape, stride, dtype, _ = description
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)
    # A result that is no tensor, such as None, as (type, value).
    if description and isinstance(description[0], type):
        return description[1]
    return tuple(map(_make_empty_tensors_like_results, description))
