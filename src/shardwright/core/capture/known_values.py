"""Values of traced tensors that depend on no argument or parameter, as `~torch.eye(n).bool()`.

Shapes and Python branches may depend on these tensors. A buffer has its value at capture. Capture
records which buffers it read: a call with other values of them needs another captured program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.core.capture.filled_caches import CachedFunctions, fill
from shardwright.core.capture.inputs_of_tensors import InputsOfTensors
from shardwright.core.capture.known_sizes import with_known_sizes
from shardwright.core.capture.scalar_indices import at_one_row
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import without_dispatch_modes, without_torch_function
from shardwright.core.torch_internals.modules import own_buffers
from shardwright.core.torch_internals.tensors import FakeTensor, version
from shardwright.errors import CaptureError

_PYTHON_VALUES = {
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item),
    *(Tensor.tolist, Tensor.equal, Tensor.allclose, torch.equal, torch.allclose),
}
"""Functions that convert tensors to Python values."""

_READING = {
    *_PYTHON_VALUES,
    *(Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere, torch.combinations),
    *(Tensor.unique, torch.unique, Tensor.unique_consecutive, torch.unique_consecutive),
}
"""Functions whose result, or the shape of the result, depends on the values of tensors."""

_LIKE = {
    *(torch.ones_like, torch.zeros_like, torch.full_like),
    *(Tensor.new_ones, Tensor.new_zeros, Tensor.new_full, Tensor.new_tensor),
}
"""Functions that read only the shape and dtype of their first argument."""

_METADATA = {
    *(Tensor.size, Tensor.stride, Tensor.storage_offset, Tensor.untyped_storage, Tensor.numel),
    *(Tensor.dim, Tensor.is_inference, Tensor.is_conj, Tensor.is_neg),
    *(getattr(Tensor, name).__get__ for name in ("layout", "dtype", "shape", "device", "ndim")),
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_nested", "is_quantized")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "is_mkldnn")),
}
"""Frequently traced functions that return no tensor; their calls are not recorded."""

_SELECTED = {torch.masked_select, Tensor.masked_select}


_REPEATING = {torch.repeat_interleave, Tensor.repeat_interleave}


def _reads_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the result of a call, or its shape, depends on the values of a tensor argument."""
    if func in _REPEATING:
        # A number of repeats gives the shape without any value.
        return isinstance(kwargs.get("repeats", args[-1] if len(args) < 2 else args[1]), Tensor)
    return func in _READING or (func is torch.where and len(args) == 1)


class UnknownValueError(Exception):
    """Raised for a tensor whose values are random, or depend on arguments or parameters."""


@dataclass(eq=False)
class RecordedCall:
    """A function call of a trace, which can be repeated to compute the values of its result.

    Args:
        function: the function.
        arguments: (args, kwargs) of `function`; each tensor is replaced by its recorded call.
        result_index: index of the tensor among the results; None if `function` changed its first
            argument in place.
    """

    function: Callable[..., Any]
    arguments: Any
    result_index: int | None = 0

    def __post_init__(self) -> None:
        leaves = pytree.tree_leaves(self.arguments)
        self.is_drawn: bool = any(isinstance(x, RecordedCall) and x.is_drawn for x in leaves)
        """Whether the value depends on experts that a `DrawnExperts` context draws at random."""

    @cached_property
    def value(self) -> Tensor:
        value = self.select(self.result())
        # A subclass, or a tensor of another device, may stand for values that are not here.
        if type(value) is not Tensor or not value.is_cpu:
            raise UnknownValueError
        return value

    def select(self, result: Any) -> Any:
        """Return element `result_index` of the results of the function."""
        return (
            result if self.result_index is None else pytree.tree_leaves(result)[self.result_index]
        )

    def result(self) -> Any:
        """Call the function; return its result, or the first argument if it is changed in place.

        Raises:
            UnknownValueError: if the function draws random numbers or fails.
        """
        return self.run(*pytree.tree_map_only(RecordedCall, lambda r: r.value, self.arguments))

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the function with given arguments instead of the recorded ones.

        Returns its result, or the first argument if the function changes it in place.

        Raises:
            UnknownValueError: if the function draws random numbers or fails.
        """
        # A changed state tells of random draws, also inside of functions without a tag.
        drawn = torch.default_generator.get_state()
        try:
            with without_dispatch_modes(), without_torch_function(), torch.no_grad():
                if self.result_index is None:
                    # The value of the argument is cached, and other recorded calls may read it.
                    args = (args[0].clone(), *args[1:])
                result = self.function(*args, **kwargs)
        # The call may fail for the shapes or options of real tensors; then values are unknown.
        except Exception as error:
            raise UnknownValueError from error
        if not torch.equal(drawn, torch.default_generator.get_state()):
            torch.default_generator.set_state(drawn)
            raise UnknownValueError
        return args[0] if self.result_index is None else result


def _require_unchanged(tensor: Tensor, recorded_version: int) -> Tensor:
    """Return a tensor created before `forward`, whose values must not have changed since.

    Raises:
        UnknownValueError: if `tensor` was changed in place since `recorded_version`.
    """
    if version(tensor) != recorded_version:
        raise UnknownValueError
    return tensor


@dataclass(frozen=True, eq=False)
class _BufferAtStart:
    """A buffer of the model at the start of `forward`.

    Args:
        key: path of the module and name of the buffer.
        fake: the fake tensor for the buffer in the trace.
        start_version: version counter of `fake` at the start of `forward`; a higher version means
            an in-place change.
        model_buffer: the real buffer of the model, which `fake` replaces in the trace.
    """

    key: tuple[str, str]
    fake: ref[Tensor]
    start_version: int
    model_buffer: Tensor


def _make_empty_call(like: Tensor) -> RecordedCall:
    """Return a call that creates an uninitialized tensor with the shape and dtype of `like`."""
    return RecordedCall(torch.empty, ((tuple(like.shape),), {"dtype": like.dtype}))


def _is_nonscalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


_known_values_of_traces: list[KnownValues] = []
"""`KnownValues` of each trace of the current capture."""


@contextmanager
def filling_caches() -> Iterator[None]:
    """Return a context for tracing that leaves no fake tensor in the user's `lru_cache`s.

    On exit, fake tensors whose values can be computed are replaced by tensors with these values;
    other cache entries with fake tensors are removed.

    Raises:
        CaptureError: if a cache contains a fake tensor whose values depend on an argument or
            parameter.
    """
    caches = CachedFunctions()
    try:
        yield
    finally:
        # Computed before the caches are emptied, which frees the tensors in them.
        known_pairs = [pair for each in _known_values_of_traces for pair in each.known_pairs()]
        _known_values_of_traces.clear()
        known_ids = {id(tensor) for tensor, _ in known_pairs}
        made = [
            cache
            for cache, tensors in caches.forget(FakeTensor)
            if not known_ids.issuperset(map(id, tensors))
        ]
        fill(known_pairs)
    # Not in `finally`, so that an error of the trace itself is not replaced.
    if made:
        raise CaptureError(
            f"`{made[0].__qualname__}` caches, with `functools.lru_cache`, a tensor that its first "
            "call draws or computes from inputs or parameters; a captured model would compute it "
            "again in each call\nstore it in a buffer, or call the model once before `plan`"
        )


class KnownValues(TorchFunctionMode):
    """Context of a trace that computes the values of tensors which depend only on buffers and
    constants.

    Args:
        module: the model, whose buffers have data.
        twin: the copy of `module` to trace.

    Attributes:
        read: (path of the module, name) of each buffer whose values the trace read.
    """

    def __init__(self, module: nn.Module, twin: nn.Module) -> None:
        super().__init__()
        self._recorded_calls: Any = WeakTensorKeyDictionary()
        self._buffers_at_start: dict[int, _BufferAtStart] = {}
        self.read: dict[tuple[str, str], None] = {}
        # Found when `forward` begins, because `torch.export` replaces buffers of `twin` before.
        twin.register_forward_pre_hook(lambda *_: self._record_buffers(module, twin))
        self.inputs = InputsOfTensors(twin)
        devices = {t.device for t in (*module.parameters(), *module.buffers()) if not t.is_meta}
        self._device = next(iter(devices), torch.device("cpu"))
        _known_values_of_traces.append(self)

    def known_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (fake tensor, tensor with its values) for fake tensors that outlive their trace.

        Skips fake tensors of unknown values. The values are on the device of the model.
        """
        for tensor, (seen, recorded_call) in list(self._recorded_calls.items()):
            if isinstance(tensor, FakeTensor) and seen == version(tensor):
                if recorded_call.is_drawn:
                    continue
                with suppress(UnknownValueError):
                    yield tensor, recorded_call.value.to(self._device)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a traced tensor; None if the value depends on arguments, parameters
        or drawn experts."""
        seen, recorded_call = self._recorded_calls.get(tensor, (None, None))
        with suppress(UnknownValueError):
            if recorded_call is not None and seen == version(tensor):
                if recorded_call.is_drawn:
                    return None
                value: Tensor = recorded_call.value
                return value
        # A real tensor is its own value.
        return None if isinstance(tensor, FakeTensor) else tensor

    def _record_buffers(self, module: nn.Module, twin: nn.Module) -> None:
        """Record the fake tensor of each buffer; `torch.export` may replace buffers of `twin`."""
        modules = dict(module.named_modules())
        for path, submodule in twin.named_modules():
            for name, fake in own_buffers(submodule).items():
                buffer = own_buffers(modules[path])[name] if path in modules else None
                if fake is not None and type(buffer) is Tensor and not buffer.is_meta:
                    key = (path, name)
                    self._buffers_at_start[id(fake)] = _BufferAtStart(
                        key, ref(fake), version(fake), buffer
                    )

    def _read_buffer(self, buffer: _BufferAtStart) -> Tensor:
        self.read[buffer.key] = None
        return buffer.model_buffer.detach().cpu()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        args, kwargs = with_known_sizes(func, args, kwargs, self._find_size)
        try:
            if _reads_values(func, args, kwargs):
                call = RecordedCall(func, self._replace_tensors_by_calls((args, kwargs)))
                # Drawn experts decide branches of Python only: the number of rows that they select
                # stays a symbol of the graph.
                if func in _PYTHON_VALUES or not call.is_drawn:
                    return call.result()
        except UnknownValueError:
            self.inputs.note_read((args, kwargs), self._is_known)
        # Indices of known masks have static shapes. `x[mask] = number` needs none: it becomes
        # `torch.where`.
        if func is Tensor.__getitem__ or (func is Tensor.__setitem__ and _is_nonscalar(args[2])):
            args = (args[0], self._replace_masks_by_indices(args[1]), *args[2:])
        elif func in _SELECTED and len(args) == 2:
            shape: Any = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            mask = self._call_and_record(Tensor.expand, (args[1], shape), {})
            indices = self._find_mask_indices(mask)
            # The values of the mask are known.
            if indices[0] is not mask:
                return args[0].expand(shape)[indices]
            if args[0].shape == args[1].shape and args[1].ndim:
                # Equal numbers of rows of one mask are known to be equal of reads at indices only.
                func, kwargs = Tensor.__getitem__, {}
        if func is Tensor.__setitem__:
            args = (args[0], *at_one_row(*args))
        return self._call_and_record(func, args, kwargs)

    def _call_and_record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; record the call if the values of all arguments can be computed."""
        try:
            # The values of the first argument may be unknown, as only its shape and dtype are read.
            read = (_make_empty_call(args[0]), *args[1:]) if func in _LIKE and args else args
            recorded_args = self._replace_tensors_by_calls((read, kwargs))
        except UnknownValueError:
            recorded_args = None
        # Outside of `except`, so that errors of `func` do not refer to this one.
        if recorded_args is None:
            result = func(*args, **kwargs)
            self.inputs.note_result(result, (args, kwargs), self._is_known)
            return result
        first = args[0] if args and isinstance(args[0], Tensor) else None
        # Views share the version counter of their base: a write to one makes the recorded calls of
        # the others outdated, and their values unknown.
        before = 0 if first is None else version(first)
        result = func(*args, **kwargs)
        if first is not None and version(first) != before:
            self._recorded_calls[first] = version(first), RecordedCall(func, recorded_args, None)
            return result
        for position, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self._recorded_calls[leaf] = (
                    version(leaf),
                    RecordedCall(func, recorded_args, position),
                )
        return result

    def _find_size(self, tensor: Tensor) -> Tensor | None:
        try:
            call = self._find_recorded_call(tensor)
            return None if call.is_drawn else call.value
        except UnknownValueError:
            self.inputs.note_read(tensor, self._is_known)
            return None

    def _is_known(self, tensor: Tensor) -> bool:
        try:
            self._find_recorded_call(tensor)
        except UnknownValueError:
            return False
        return True

    def _replace_tensors_by_calls(self, arguments: Any) -> Any:
        """Replace each tensor among arguments by the recorded call that computes its values.

        Raises:
            UnknownValueError: if the value of an argument is unknown.
        """
        return pytree.tree_map(self._find_recorded_call, arguments)

    def _find_recorded_call(self, leaf: Any) -> Any:
        # Sizes that depend on values; generators, whose states are not compared.
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)):
            raise UnknownValueError
        if not isinstance(leaf, Tensor):
            return leaf
        seen, recorded_call = self._recorded_calls.get(leaf, (None, None))
        if recorded_call is not None and seen == version(leaf):
            return recorded_call
        buffer = self._buffers_at_start.get(id(leaf))
        # Compared with the weak reference, as the `id()` of a freed tensor may be that of another.
        if buffer is not None and buffer.fake() is leaf and buffer.start_version == version(leaf):
            return RecordedCall(self._read_buffer, ((buffer,), {}))
        # A constant of the model's code, such as a tensor in a plain attribute.
        if type(leaf) is Tensor and not (leaf.requires_grad or leaf.is_inference()):
            return RecordedCall(_require_unchanged, ((leaf, version(leaf)), {}))
        raise UnknownValueError

    def _replace_masks_by_indices(self, index: Any) -> Any:
        """Replace each mask of known values in an index by the indices of its True elements."""
        entries = index if isinstance(index, tuple) else (index,)
        masks = [p for p in entries if isinstance(p, Tensor) and p.dtype is torch.bool and p.ndim]
        if not masks:
            return index
        return tuple(resolved for entry in entries for resolved in self._find_mask_indices(entry))

    def _find_mask_indices(self, mask: Any) -> tuple[Any, ...]:
        """Return the indices of the True elements of a mask, one tensor per dimension.

        Returns `(mask,)` if the values are unknown, or if `mask` is not boolean.
        """
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or not mask.ndim:
            return (mask,)
        try:
            call = RecordedCall(
                torch.nonzero, self._replace_tensors_by_calls(((mask,), {"as_tuple": True}))
            )
            return (mask,) if call.is_drawn else tuple(call.result())
        except UnknownValueError:
            return (mask,)
