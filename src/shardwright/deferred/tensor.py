"""Tensors without values that know what initializes them, and the context that makes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.deferred.init_record import (
    Record,
    StorageView,
    draws_random_numbers,
    mutated_tensors,
    on_meta,
)
from shardwright.deferred.replay import Keep, replay, settle_generators
from shardwright.errors import DeferredError
from shardwright.torch_internals import pytree
from shardwright.torch_internals.dispatch import (
    TorchDispatchMode,
    dispatch_modes,
    plain_torch_function,
    without_torch_dispatch,
    without_torch_function,
)
from shardwright.torch_internals.operators import schema_of
from shardwright.torch_internals.tensors import as_subclass, data_setter

aten = torch.ops.aten


class Deferred(Tensor):
    """A tensor on the meta device whose values are made when they are needed.

    Every operator on it is recorded, also after the context has ended: copies, casts and moves of
    a module stay deferred. While the context is open it says that it is on the CPU, where it would
    be without the context, so that code which leaves out meta tensors initializes it.
    """

    _record: Record
    __torch_function__ = plain_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        record = next(leaf._record for leaf in leaves if isinstance(leaf, Deferred))
        return _call(record, function, args, kwargs or {})

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
            f"a parameter of shape {tuple(self.shape)} made inside no_init_parameters has no values"
            " to save yet: call shardwright.parallelize or shardwright.materialize before"
        )


@contextmanager
def no_init_parameters() -> Iterator[None]:
    """Builds models without memory for their parameters: they are on the meta device, and what
    initializes them is recorded.

    `parallelize` then makes only this rank's shards of them, `materialize` all of them, with the
    values that they would have had without this context: the same bits from the same seed.
    Nothing is drawn before, so random numbers drawn between this context and `parallelize` are
    others than without it, and so are those of a second context: build all inside one.

    A tensor made from data (`torch.tensor`, `torch.from_numpy`) is real at once, and so is one on
    another device than the CPU. Where the code needs a value (`.item()`, `if`), it is made.

    Raises:
        DeferredError: where a random operator writes into a tensor that has values, or where one
            cannot be recorded.
    """
    if any(isinstance(mode, _Recording) for mode in dispatch_modes()):
        yield  # what is built inside belongs to what is built around it
        return
    record = Record()
    try:
        with _Recording(record), _Settings(record):
            yield
    finally:
        record.recording = False


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what makes or changes tensors without values."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(self.record, function, args, kwargs or {})


class _Settings(TorchFunctionMode):
    """What PyTorch does with the device of a tensor before any operator is called."""

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
                args = target, _record(self.record, aten.clone.default, (value,), {})
        return function(*args, **kwargs)


def _call(record: Record, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator: recorded if it makes or changes a tensor without values, else at once."""
    with without_torch_function():
        args, kwargs = pytree.tree_map_only(
            Deferred, lambda t: t if t._record is record else value_of(t), (args, kwargs)
        )
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(isinstance(t, Deferred) for t in tensors) and not (
            _on_cpu(tensors, kwargs)
            and (draws_random_numbers(function) or _makes(function, tensors))
        ):
            return function(*args, **kwargs)
        targets = mutated_tensors(function, args, kwargs)
        if any(not on_meta(target) for target in targets):
            _refuse_draw(function)
        elif targets or _returns_tensors(function):
            _refuse_use(record, function, tensors, targets)
            try:
                return _record(record, function, args, kwargs)
            except NotImplementedError as error:
                # Either the shape of the result depends on values, or nobody has said what it is.
                _refuse_unknown(function, targets, error)
        args, kwargs = pytree.tree_map_only(Deferred, value_of, (args, kwargs))
        return function(*args, **kwargs)


def _record(record: Record, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator on the meta device, and records it."""
    given: dict[int, Tensor] = {}

    def plain(tensor: Tensor) -> Tensor:
        if on_meta(tensor):
            made = tensor.detach()
        else:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        given[id(made)] = tensor
        return made

    def returned(result: Tensor) -> Tensor:
        return given[id(result)] if id(result) in given else _deferred(result, record)

    with without_torch_dispatch():
        if torch.Tag.inplace_view in function.tags:
            return function(*args, **kwargs)
        plain_args, plain_kwargs = pytree.tree_map_only(Tensor, plain, (args, kwargs))
        results = function(*plain_args, **plain_kwargs | _placed(function, kwargs))
        record.add(function, args, kwargs, results)
        return pytree.tree_map_only(Tensor, returned, results)


def _deferred(tensor: Tensor, record: Record) -> Deferred:
    """`tensor`, on the meta device, as one that `record` makes."""
    made = as_subclass(Deferred, tensor)
    made._record = record
    return made


def value_of(tensor: Tensor) -> Tensor:
    """The values of `tensor`, deferred or not; generators stay as they are."""
    if not isinstance(tensor, Deferred):
        return tensor
    wanted = {"a tensor": tensor._record.piece(tensor)}
    return replay(tensor._record, wanted, lambda name, made: made)["a tensor"]


def values_of(tensors: Mapping[str, Tensor], keep: Keep) -> dict[str, Tensor]:
    """What `keep` keeps of each of the deferred ones of `tensors`, by name.

    `keep(name, whole)` is called for one finished tensor after another, on the CPU, in the order in
    which the model was built; what it does not keep is freed. Tensors that are one (tied) are made
    once. Afterwards the generators stand where they would without `no_init_parameters`, unless
    they have been used or seeded since.

    Raises:
        DeferredError: if a tensor is made from one that never had values, or from data that has
            changed.
    """
    wanted: dict[Record, dict[str, StorageView]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Deferred):
            record = tensor._record
            wanted.setdefault(record, {})[name] = record.piece(tensor)
    kept: dict[str, Tensor] = {}
    for record, pieces in wanted.items():
        kept |= replay(record, pieces, keep)
        settle_generators(record)
    return kept


def _placed(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords that put what `function` makes on the meta device."""
    names = {argument.name for argument in schema_of(function).arguments}
    placed: dict[str, Any] = {}
    if "device" in names:
        placed["device"] = torch.device("meta")
    if kwargs.get("pin_memory"):
        placed["pin_memory"] = None
    return placed


def _on_cpu(tensors: Iterable[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operator would run on the CPU without the context."""
    asked = kwargs.get("device") or torch.device("cpu")
    return all(t.device.type in ("cpu", "meta") for t in tensors) and asked.type in ("cpu", "meta")


def _makes(function: Any, tensors: Iterable[Tensor]) -> bool:
    """Whether an operator makes a tensor of nothing."""
    names = {argument.name for argument in schema_of(function).arguments}
    return not tensors and "device" in names and _returns_tensors(function)


def _returns_tensors(function: Any) -> bool:
    return any("Tensor" in str(result.type) for result in schema_of(function).returns)


def _refuse_draw(function: Any) -> None:
    if draws_random_numbers(function):
        raise DeferredError(
            f"{function} writes random numbers into a tensor that has values, inside "
            "no_init_parameters: make this tensor inside too (not from data), or initialize it "
            "outside"
        )


def _refuse_unknown(function: Any, targets: list[Tensor], error: NotImplementedError) -> None:
    if targets or draws_random_numbers(function):
        raise DeferredError(
            f"{function} cannot be recorded inside no_init_parameters, as it has no kernel for the "
            "meta device: register one (`torch.library.register_fake`), or call it outside"
        ) from error


def _refuse_use(
    record: Record, function: Any, tensors: list[Tensor], targets: list[Tensor]
) -> None:
    """Outside of the context, parameters may be copied, cast and written, but not computed with."""
    if record.recording or targets or all(on_meta(tensor) for tensor in tensors):
        return
    raise DeferredError(
        f"{function} computes with a parameter made inside no_init_parameters, which has no values "
        "yet: call shardwright.parallelize or shardwright.materialize on the model before it is run"
    )
