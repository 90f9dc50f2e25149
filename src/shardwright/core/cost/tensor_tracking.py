"""Counts the bytes of tensors while a program runs, be it on a device or on the meta device.

Every storage counts once, from the operator that makes it until nothing refers to it any more. What
an operator allocates inside and frees again is not seen.
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
from shardwright.core.torch_internals.operators import schema_of, unregister
from shardwright.core.torch_internals.tensors import storage_id

PARAMETERS, WEIGHTS = "parameters", "weights"
"""Kinds of what is watched: parameters as they are stored, and what is computed from nothing else:
gathered, cast or joined parameters."""


class TrackedStorage:
    """A storage that was seen.

    Args:
        line: of the program that made it; 0 where none did.
    """

    __slots__ = ("kind", "line", "size")

    def __init__(self, size: int, kind: str, line: int = 0) -> None:
        self.size = size
        self.kind = kind
        self.line = line


Event = tuple[TrackedStorage, bool]
"""A storage that is allocated (`True`) or freed (`False`)."""


def events_at_peak(events: Iterable[Event]) -> int:
    """How many events have happened when most bytes are live."""
    live, most, place = 0, 0, 0
    for number, (held, allocated) in enumerate(events, start=1):
        live += held.size if allocated else -held.size
        if live > most:
            most, place = live, number
    return place


def bytes_by_kind(events: Iterable[Event]) -> dict[str, int]:
    """What events leave, beyond what was there before."""
    totals: dict[str, int] = {}
    for held, allocated in events:
        change = held.size if allocated else -held.size
        totals[held.kind] = totals.get(held.kind, 0) + change
    return totals


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of all tensors that are made inside, and of those that are watched.

    Args:
        history: what was allocated (`True`) and freed (`False`), in order.
        now: bytes that are live.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.history: list[Event] = []
        self.now = 0
        self._held: dict[int, tuple[weakref.ref[Any], TrackedStorage]] = {}

    def watch(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Counts tensors that exist already; from here on their storages are of this `kind`."""
        for tensor in tensors:
            self._see(tensor, kind)
            self.held(tensor).kind = kind

    def held(self, tensor: Tensor) -> TrackedStorage:
        """The storage of a tensor that was seen."""
        return self._held[storage_id(tensor)][1]

    def label(self, kind: str) -> None:
        """Everything live that has no kind yet is of this one."""
        for _, held in self._held.values():
            held.kind = held.kind or kind

    def peak(self, start: int = 0, end: int | None = None) -> int:
        """How much of the history had happened when most bytes were live, from `start` to `end`."""
        return start + events_at_peak(self.history[start:end])

    def kinds(self, place: int, start: int = 0) -> dict[str, int]:
        """Bytes by kind that were live when so much of the history had happened, beyond those of an
        earlier moment."""
        return bytes_by_kind(self.history[start:place])

    def lines(self, place: int) -> dict[tuple[str, int], int]:
        """Likewise by kind and the line of the program that made them."""
        totals: dict[tuple[str, int], int] = {}
        for held, allocated in self.history[:place]:
            key = held.kind, held.line
            totals[key] = totals.get(key, 0) + (held.size if allocated else -held.size)
        return totals

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = self.run(func, args, kwargs or {})
        self.returned(out, args)
        return out

    def returned(self, out: Any, args: tuple[Any, ...]) -> None:
        """Counts what an operator returns that was called with `args`."""
        if isinstance(out, Tensor):
            self._made(out, args)
        elif isinstance(out, list | tuple):
            for each in out:
                if isinstance(each, Tensor):
                    self._made(each, args)

    def _made(self, out: Tensor, args: tuple[Any, ...]) -> None:
        if storage_id(out) not in self._held:
            self._see(out, WEIGHTS if self._from_weights(args) else "")

    def _from_weights(self, args: tuple[Any, ...]) -> bool:
        """Whether parameters alone go in."""
        found = False
        for argument in args:
            for each in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(each, Tensor):
                    known = self._held.get(storage_id(each))
                    if known is None or known[1].kind not in (PARAMETERS, WEIGHTS):
                        return False
                    found = True
        return found

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key in self._held:
            return
        held = TrackedStorage(storage.nbytes(), kind, _line_of_program())
        self.history.append((held, True))
        self.now += held.size

        def freed(_: Any) -> None:
            del self._held[key]
            self.history.append((held, False))
            self.now -= held.size

        self._held[key] = (weakref.ref(storage, freed), held)


def _line_of_program() -> int:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            break
        if frame.f_code.co_filename == PROGRAM:
            return frame.f_lineno
        frame = frame.f_back
    return 0


_DEEPEST = 16
"""Frames between a program and an operator that it calls, at most."""

META = torch.device("meta")

_PLAIN = frozenset(
    {
        *(int, float, bool, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_LONGEST = 64
"""Of lists among the arguments of operators that are looked up."""


class DryRunMode(PlainDispatchMode, LiveBytes):  # type: ignore[no-untyped-call]
    """Counts bytes on the meta device. An operator is run once for each shape of its tensors; then
    only results like those are made: so a model whose blocks repeat runs fast.

    What is sent is held until its collective is waited for, as process groups do.

    Args:
        known: results of operators that were met before.
    """

    def __init__(self, known: dict[Any, Any]) -> None:
        super().__init__()
        self._known = known
        self._sent: dict[int, list[Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = self.run(func, args, kwargs or {})
        self.returned(out, args)
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _returns_new_tensors(func):
            if is_collective(func):
                return self._communicate(func, args, kwargs)
            return func(*args, **kwargs)
        try:
            key = (func, *map(_described, args), *map(_described, kwargs.items()))
        except _NotPlainError:
            return func(*args, **kwargs)
        if key in self._known:
            return _like(self._known[key])
        out = func(*args, **kwargs)
        results = out if isinstance(out, list | tuple) else (out,)
        if all(result is None or result.is_meta for result in results):
            self._known[key] = _described(out)
        return out

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is functional_collectives.wait_tensor.default:
            # On the meta device it would return another tensor.
            self._sent.pop(storage_id(args[0]), None)
            return args[0]
        out: Tensor = func(*args, **kwargs)
        sent = [args[0]]
        if func is functional_collectives.reduce_scatter_tensor.default:
            # Gloo adds up in a copy. Other backends need less, by what is under way at a time.
            sent.append(torch.empty_like(args[0]))
            self._see(sent[-1], "")
        self._sent[storage_id(out)] = sent
        return out


class _NotPlainError(Exception):
    """An argument that is not made of tensors and plain values."""


@cache
def _returns_new_tensors(func: Any) -> bool:
    schema = schema_of(func)
    tensors = all(str(each.type) == "Tensor" for each in schema.returns)
    aliases = any(each.alias_info for each in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and tensors and bool(schema.returns) and not aliases


def _described(argument: Any) -> Any:
    """What a result depends on; of a tensor shape, strides, dtype and device.

    Raises:
        _NotPlainError: if that cannot be said.
    """
    if (kind := type(argument)) in _PLAIN:
        return kind, argument
    if isinstance(argument, Tensor):
        # A number among tensors is a tensor of the CPU, and promotes dtypes in its own way.
        return _Like((argument.shape, argument.stride(), argument.dtype, argument.is_meta))
    if isinstance(argument, list | tuple) and len(argument) <= _LONGEST:
        return tuple(map(_described, argument))
    raise _NotPlainError


class _Like(tuple[Any, ...]):
    """A tensor without numbers: its shape, strides and dtype, and whether it is on META."""

    __slots__ = ()


def _like(described: Any) -> Any:
    if isinstance(described, _Like):
        shape, stride, dtype, _ = described
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)
    if described and isinstance(described[0], type):
        return described[1]
    return tuple(map(_like, described))


class FusedAttention:
    """A context in which attention takes its fused kernel, as on CPU and CUDA; the meta device has
    none and would hold the scores of all pairs.

    It is registered for the meta device and not a mode: modes are off while a backward pass runs,
    which computes segments again.
    """

    def __enter__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library.impl(  # type: ignore[no-untyped-call]
            "scaled_dot_product_attention", _attention, "AutogradMeta"
        )

    def __exit__(self, *_: object) -> None:
        unregister(self._library)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    result = _fused(*args, **kwargs)
    if result is None:
        result, _ = torch.ops.aten._scaled_dot_product_attention_math.default(*args, **kwargs)
    assert result is not None
    return result


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The fused kernel's output; None where PyTorch does not take it."""
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    masked = attn_mask is not None and attn_mask.requires_grad
    if query.ndim != 4 or len(sizes) > 1 or dropout_p > 0 or masked:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask.logical_not(), float("-inf"), zero)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out: Tensor
    out, _ = kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return out
