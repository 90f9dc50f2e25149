"""DTensors without the autograd and the checks of their public functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial, partialmethod, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.core.torch_internals.operators import (
    OpOverload,
    operator_name,
    operators_of_several_tensors,
)
from shardwright.core.torch_internals.tensors import as_subclass

StridedShard = _StridedShard
"""The placement of a dimension that axes further right cut first: its blocks are `split_factor`
apart. Without it a `DeviceMesh` could cut a dimension from left to right only."""


MIXED = "got mixed torch.Tensor and DTensor"
"""How PyTorch's error begins where a DTensor meets an ordinary tensor."""


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part, which `to_local()` gives through an autograd function."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements, shape, strides and dtype."""
    return tensor._spec


def with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor without gradient whose part on this rank is `local`; `DTensor.from_local` would
    take longer than small operators."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def held_chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Offsets and sizes, in the whole tensor, of what this rank holds."""
    return tensor.__create_chunk_list__()  # type: ignore[no-any-return,no-untyped-call]


def own_part(whole: Tensor, tensor: Tensor) -> Tensor:
    """Of a whole tensor what this rank holds of `tensor`; communicates nothing."""
    if not isinstance(tensor, DTensor):
        return whole
    (chunk,) = held_chunks(tensor)
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return whole[tuple(slice(at, at + size) for at, size in ends)]


def counting_with_shard(parameter: DTensor) -> nn.Parameter:
    """The parameter, as one tensor with its part on this rank to autograd: a change of one in place
    counts as one of the other, so that a backward pass refuses parts that were saved before."""
    local = parameter._local_tensor
    if type(local) is not Tensor:  # of simulated ranks
        return cast(nn.Parameter, parameter)
    result = as_subclass(DTensor, local)
    result.data = parameter
    result._local_tensor, result._spec = local, parameter._spec
    result.requires_grad_(parameter.requires_grad)._is_param = True
    return cast(nn.Parameter, result)


def change_results(operator: OpOverload, change: Callable[[Any, Sequence[Any]], Any]) -> None:
    """Lets every DTensor of the process return `change(results, args)` from an operator; the first
    change of an operator stays."""

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change(operator(*args, **kwargs), args)

    handle(operator, handler)


def handle(operator: OpOverload, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Lets `call` compute an operator of every DTensor of the process; inside, the operator does
    what it always does. The first handler of an operator stays."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def handler(called: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handlers.pop(called, None)
        try:
            return call(args, kwargs)
        finally:
            handlers[called] = handler

    handlers.setdefault(operator, handler)


def refuse_pickling(check: Callable[[DTensor], None]) -> None:
    """Lets DTensors of this process call `check`, which raises, before they are pickled or saved
    as safetensors; `copy.copy` and `copy.deepcopy` work as before. The first check stays."""
    reduce: Any = DTensor.__reduce_ex__
    if hasattr(reduce, "checks_pickling"):
        return

    def pickled(tensor: DTensor, protocol: Any) -> Any:
        check(tensor)
        return reduce(tensor, protocol)

    def copied(tensor: DTensor) -> Any:
        rebuild, arguments = reduce(tensor, 4)
        return rebuild(*arguments)

    def storage(tensor: DTensor) -> Any:
        check(tensor)
        return Tensor.storage(tensor)  # type: ignore[no-untyped-call]

    vars(pickled)["checks_pickling"] = True
    # safetensors asks for `storage` where `untyped_storage()` has no memory.
    methods = {"__reduce_ex__": pickled, "__copy__": copied, "storage": storage}
    for name, method in methods.items():
        setattr(DTensor, name, method)


def _take_whole_gradients(number: Tensor) -> None:
    """Lets an ordinary tensor that meets a DTensor get an ordinary gradient."""
    if number.requires_grad and not hasattr(number, "takes_whole_gradients"):
        number.takes_whole_gradients = True  # type: ignore[attr-defined]
        number.register_hook(  # type: ignore[no-untyped-call]
            lambda g: g.full_tensor() if isinstance(g, DTensor) else None
        )


def explain_mixing(
    error: Callable[[OpOverload | str], Exception], *, except_in: Collection[str]
) -> None:
    """Lets DTensors of this process raise `error(operator)` where they meet an ordinary tensor of
    more than one element, and `error(name)` where they are to become an array or a list. One of one
    element, such as a loss, is taken as it is, and gets a gradient of its own kind.

    Args:
        except_in: names of operators that keep their speed, and are explained as methods only;
            these methods compute on the parts of tensors that are cut alike.
    """

    def explained(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            for argument in args:
                for leaf in argument if isinstance(argument, list | tuple) else (argument,):
                    if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                        _take_whole_gradients(leaf)
        try:
            return operator(*args, **kwargs)
        except RuntimeError as mixed:
            if MIXED not in str(mixed):
                raise
            raise error(operator) from mixed

    for operator in operators_of_several_tensors():
        if operator_name(operator) not in except_in:
            handle(operator, partial(explained, operator))

    def refused(name: str, *_: object, **__: object) -> Any:
        raise error(name)

    for name in ("numpy", "tolist"):
        setattr(DTensor, name, partialmethod(partial(refused, name)))
    for name in (*except_in, "__iadd__", "__imul__", "__truediv__", "sqrt"):
        setattr(DTensor, name, _method(name, error))
    _explain_changed_numbers(error)


def _explain_changed_numbers(error: Callable[[OpOverload], Exception]) -> None:
    """Lets DTensors raise `error(operator)` where one would change an ordinary number in place."""
    tail = DTensor._op_dispatcher._dispatch_fast_path_python_tail

    @wraps(tail)
    def explained(operator: OpOverload, args: tuple[Any, ...], *rest: Any) -> Any:
        in_place = rest[-2]
        if in_place and not isinstance(args[0], DTensor | list | tuple):
            raise error(operator)
        return tail(operator, args, *rest)

    vars(DTensor._op_dispatcher).setdefault(tail.__name__, explained)


def _method(name: str, error: Callable[[str], Exception]) -> Callable[..., Any]:
    """What gives what a method of this name gives, or `error(name)` where DTensors and others are
    mixed."""
    method = getattr(Tensor, name)

    # A function: `torch.compile` cannot follow other callables.
    @wraps(method)
    def of_tensor(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(tensor, *args, **kwargs)
        parts = _parts_alike(tensor, args, kwargs)
        if parts is not None:
            return _of_parts(tensor, method(*parts, **kwargs))
        try:
            return method(tensor, *args, **kwargs)
        except RuntimeError as mixed:
            if MIXED not in str(mixed):
                raise
            raise error(name) from mixed

    return of_tensor


def _parts_alike(
    tensor: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any] | None:
    """The parts on this rank, if an operator of single elements does with them what it does with
    the tensors, and sooner: all are cut alike, none is a term of a sum, and autograd
    does not see them. None if it does not, or if it is not certain."""
    spec, local = tensor._spec, tensor._local_tensor
    if torch.is_grad_enabled() or tensor.is_inference():
        return None
    if type(tensor) is not DTensor or type(local) is not Tensor:
        return None
    if any(placement.is_partial() for placement in spec.placements):
        return None
    if not local.is_floating_point() or any(isinstance(v, Tensor) for v in kwargs.values()):
        return None
    parts: list[Any] = [local]
    for argument in args:
        if isinstance(argument, DTensor) and _cut_alike(argument._spec, spec):
            argument = argument._local_tensor
            if argument.dtype != local.dtype:
                return None
        elif isinstance(argument, Tensor):
            return None
        parts.append(argument)
    return parts


def _cut_alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    return one is other or (
        one.mesh is other.mesh and one.placements == other.placements and one.shape == other.shape
    )


def _of_parts(tensor: DTensor, result: Tensor) -> Any:
    """A DTensor like `tensor` of this part, or `tensor` itself where its part was changed."""
    if result is tensor._local_tensor:
        increment_version(tensor)
        return tensor
    return with_spec(result, tensor._spec)
