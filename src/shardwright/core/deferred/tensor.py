"""Deferred tensors, which record their initialization, and the context that creates them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.core.deferred.init_record import (
    Record,
    StorageView,
    draws_random_numbers,
    mutated_tensors,
    on_meta,
)
from shardwright.core.deferred.replay import OnFinished, advance_generators, replay
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import (
    TorchDispatchMode,
    dispatch_modes,
    plain_torch_function,
    without_torch_dispatch,
    without_torch_function,
)
from shardwright.core.torch_internals.operators import schema_of
from shardwright.core.torch_internals.tensors import as_subclass, data_setter
from shardwright.errors import DeferredError

aten = torch.ops.aten

RECORDS_OPERATORS = "records_in_its_place"
"""Attribute of tensor classes that record operators in place of `Deferred`.

An example is `UninitializedShard`.
"""


class Deferred(Tensor):
    """A meta tensor whose operators are recorded, and whose values are computed on demand.

    Operators on the tensor are recorded even after the `no_init_parameters` context has ended, so
    copies, casts and moves of a module stay deferred. Inside the context the tensor's `device` is
    the CPU, as without the context, so that code that skips meta tensors initializes it.
    """

    _record: Record
    __torch_function__ = plain_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # PyTorch then asks the other class, which records the operator itself.
        if any(hasattr(tensor_type, RECORDS_OPERATORS) for tensor_type in types):
            return NotImplemented
        leaves = pytree.tree_leaves((args, kwargs))
        record = next(leaf._record for leaf in leaves if isinstance(leaf, Deferred))
        return _record_or_run(record, function, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu" if self._record.recording else "meta")

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return not self._record.recording

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Deferred({tuple(self.shape)}, dtype={self.dtype}{grad})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DeferredError(
            f"cannot save a parameter of shape {tuple(self.shape)}, which was created inside"
            " `no_init_parameters` and is uninitialized\ncall `sw.parallelize` or"
            " `sw.materialize` on the model first"
        )


@contextmanager
def no_init_parameters() -> Iterator[None]:
    """Context in which models are built without allocating their parameters.

    Parameters are on the meta device, and the operators that initialize them are recorded.
    `parallelize` then creates only this rank's shards, and `materialize` all parameters, with
    bitwise the values that the parameters would have without this context from the same seed.

    Random numbers of the initialization are drawn by `parallelize` or `materialize`. Random numbers
    that other code draws before that, or in a second context, therefore differ from a run without
    this context: build all modules in one context.

    Tensors created from data (`torch.tensor`, `torch.from_numpy`) and tensors on devices other than
    the CPU are allocated at once. Where code reads a value (`.item()`, `if`), the tensor is
    computed.

    Raises:
        DeferredError: if a random operator writes into a tensor that was created from data, or if
            an operator has no meta kernel.
    """
    if any(isinstance(mode, _RecordingMode) for mode in dispatch_modes()):
        yield  # The outer context records.
        return
    record = Record()
    try:
        with recording(record):
            yield
    finally:
        # From here on the `device` of deferred tensors is the meta device, so that reads of their
        # values fail.
        record.recording = False


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Context that records in `record` the operators that create or initialize tensors."""
    with _RecordingMode(record), _DeviceQueryMode(record):
        yield


def deferred_like(tensor: Tensor, record: Record) -> Deferred:
    """Return an uninitialized deferred tensor of `record` with the shape and dtype of `tensor`."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _convert_to_deferred(empty, record)


def is_initialized(tensor: Deferred) -> bool:
    """Whether a recorded operation initializes all elements of `tensor`."""
    record = tensor._record
    storage = record.storage_view(tensor).storage
    # Operations that update a storage may leave elements without values.
    return any(storage in operation.fills for operation in record.operations)


class _RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records operators that create or modify deferred tensors."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(tensor_type, RECORDS_OPERATORS) for tensor_type in types):
            return NotImplemented
        return _record_or_run(self.record, function, args, kwargs or {})


class _DeviceQueryMode(TorchFunctionMode):
    """Function mode for functions that read a tensor's device before they call an operator.

    Without this mode, `new_tensor` of a deferred tensor would create its result on the meta device,
    and assigning a CPU tensor to its `data` would fail, as the devices differ.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.new_tensor and isinstance(args[0], Deferred):
            kwargs.setdefault("device", torch.device("cpu"))
        elif function == data_setter:
            target, value = args
            if isinstance(target, Deferred) and not isinstance(value, Deferred):
                args = target, _record_call_on_meta(self.record, aten.clone.default, (value,), {})
        return function(*args, **kwargs)


def _record_or_run(
    record: Record, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record an operator call if it creates or modifies a deferred tensor, else run it."""
    with without_torch_function():
        # Deferred tensors of other records are replaced by their values.
        args, kwargs = pytree.tree_map_only(
            Deferred, lambda t: t if t._record is record else value_of(t), (args, kwargs)
        )
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # Operators on ordinary tensors run, unless they draw random numbers or allocate on the CPU.
        if not any(isinstance(t, Deferred) for t in tensors) and not (
            _would_run_on_cpu(tensors, kwargs)
            and (
                draws_random_numbers(function) or _creates_tensor_without_inputs(function, tensors)
            )
        ):
            return function(*args, **kwargs)
        targets = mutated_tensors(function, args, kwargs)
        if any(not on_meta(target) for target in targets):
            # A write to an ordinary tensor cannot be postponed: compute the deferred arguments now.
            _refuse_random_write_to_initialized(function)
        elif targets or _returns_tensors(function):
            _refuse_computation_with_deferred(record, function, tensors, targets)
            try:
                return _record_call_on_meta(record, function, args, kwargs)
            except NotImplementedError as error:
                # The shape of the result depends on values, or the operator has no meta kernel.
                _refuse_missing_meta_kernel(function, targets, error)
        # Reads of values (`.item()`, shapes that depend on them) and writes to ordinary tensors run
        # now.
        args, kwargs = pytree.tree_map_only(Deferred, value_of, (args, kwargs))
        return function(*args, **kwargs)


def _record_call_on_meta(
    record: Record, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call an operator on the meta device and record it."""
    original_of: dict[int, Tensor] = {}

    def meta_argument(tensor: Tensor) -> Tensor:
        if on_meta(tensor):
            # The view shares the storage, by which the record recognizes results that are views.
            on_meta_device = tensor.detach()
        else:
            on_meta_device = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        original_of[id(on_meta_device)] = tensor
        return on_meta_device

    def result_or_original(result: Tensor) -> Tensor:
        return (
            # In-place and `out=` operators return an argument: return the caller's object for it.
            original_of[id(result)]
            if id(result) in original_of
            else _convert_to_deferred(result, record)
        )

    with without_torch_dispatch():
        # An in-place view must change the `Deferred` object itself, not a detached meta tensor.
        if torch.Tag.inplace_view in function.tags:
            return function(*args, **kwargs)
        meta_args, meta_kwargs = pytree.tree_map_only(Tensor, meta_argument, (args, kwargs))
        results = function(*meta_args, **meta_kwargs | _make_meta_device_keywords(function, kwargs))
        record.add(function, args, kwargs, results)
        return pytree.tree_map_only(Tensor, result_or_original, results)


def _convert_to_deferred(tensor: Tensor, record: Record) -> Deferred:
    """Return a meta tensor as a deferred tensor of `record`."""
    deferred = as_subclass(Deferred, tensor)
    deferred._record = record
    return deferred


def value_of(tensor: Tensor) -> Tensor:
    """Return the values of a deferred tensor as a new tensor; return other tensors unchanged.

    Random generators are not advanced.
    """
    if not isinstance(tensor, Deferred):
        return tensor
    # The key is the name of the tensor in errors of the replay.
    requested = {"a tensor": tensor._record.storage_view(tensor)}
    return replay(tensor._record, requested, lambda name, value: value)["a tensor"]


def values_of(tensors: Mapping[str, Tensor], on_finished: OnFinished) -> dict[str, Tensor]:
    """Compute the values of the deferred tensors among `tensors`.

    Tied tensors are computed once. Generators end in the state that they would have without
    `no_init_parameters`, unless they have been used or seeded since.

    Args:
        tensors: deferred tensors by name; ordinary tensors among them are ignored.
        on_finished: called with the name and value of each deferred tensor, on the CPU, as soon as
            the value is computed, in the order in which the model was built; the value is then
            freed.

    Returns:
        The results of `on_finished` by name.

    Raises:
        DeferredError: if a tensor depends on a meta tensor that was never initialized, or on data
            that has been modified.
    """
    requested: dict[Record, dict[str, StorageView]] = {}
    # Record by record, as operations of several contexts are independent.
    for name, tensor in tensors.items():
        if isinstance(tensor, Deferred):
            record = tensor._record
            requested.setdefault(record, {})[name] = record.storage_view(tensor)
    values: dict[str, Tensor] = {}
    for record, views in requested.items():
        values |= replay(record, views, on_finished)
        # After the replay, which leaves the states of the draws in the record.
        advance_generators(record)
    return values


def _make_meta_device_keywords(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that make `function` create its results on the meta device."""
    names = {argument.name for argument in schema_of(function).arguments}
    keywords: dict[str, Any] = {}
    if "device" in names:
        keywords["device"] = torch.device("meta")
    # The meta device has no memory to pin.
    if kwargs.get("pin_memory"):
        keywords["pin_memory"] = None
    return keywords


def _would_run_on_cpu(tensors: Iterable[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operator call would run on the CPU outside of `no_init_parameters`.

    Meta tensors count as CPU tensors.
    """
    # `device=None` in an operator's call means the CPU.
    device = kwargs.get("device") or torch.device("cpu")
    return all(t.device.type in ("cpu", "meta") for t in tensors) and device.type in ("cpu", "meta")


def _creates_tensor_without_inputs(function: Any, tensors: Iterable[Tensor]) -> bool:
    """Whether an operator call creates a tensor and reads no tensor."""
    names = {argument.name for argument in schema_of(function).arguments}
    return not tensors and "device" in names and _returns_tensors(function)


def _returns_tensors(function: Any) -> bool:
    return any("Tensor" in str(result.type) for result in schema_of(function).returns)


def _refuse_random_write_to_initialized(function: Any) -> None:
    if draws_random_numbers(function):
        raise DeferredError(
            f"`{function}` writes random numbers into an initialized tensor inside "
            "`no_init_parameters`\ncreate the tensor inside `no_init_parameters` (not from data), "
            "or initialize it outside"
        )


def _refuse_missing_meta_kernel(
    function: Any, targets: list[Tensor], error: NotImplementedError
) -> None:
    if targets or draws_random_numbers(function):
        raise DeferredError(
            f"cannot record `{function}` inside `no_init_parameters`, because it has no meta kernel"
            "\nregister a meta kernel (`torch.library.register_fake`), or call the operator outside"
        ) from error


def _refuse_computation_with_deferred(
    record: Record, function: Any, tensors: list[Tensor], targets: list[Tensor]
) -> None:
    """Reject operator calls that compute with uninitialized tensors after `no_init_parameters`.

    Copies and casts of deferred tensors, and writes to them, are allowed.

    Args:
        record: the record of the deferred tensors.
        function: the operator.
        tensors: all tensor arguments of the call.
        targets: the arguments that the call mutates.

    Raises:
        DeferredError: if the call combines deferred and ordinary tensors, as a forward pass does.
    """
    # A call with ordinary tensors is the forward pass of a model without values.
    if record.recording or targets or all(on_meta(tensor) for tensor in tensors):
        return
    raise DeferredError(
        f"`{function}` reads a parameter created inside `no_init_parameters`, which is "
        "uninitialized\ncall `sw.parallelize` or `sw.materialize` on the model before running it"
    )
