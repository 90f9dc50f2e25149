"""`local_map`: a module or function that capture does not trace, as one operator of the graph."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import update_wrapper
from types import CodeType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from shardwright.core.capture.annotations import ModuleLocation, ModuleTag, attach
from shardwright.core.capture.local_trace import LocalPart, Options
from shardwright.core.capture.naming import current_line
from shardwright.core.deferred import copies_of_attributes
from shardwright.core.graph.local_body import FunctionBody, ModuleBody, function_text
from shardwright.core.graph.local_declaration import Declaration, Partial
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dynamo_module_calls import ModuleCall, as_one_call
from shardwright.core.torch_internals.modules import memo_of_process_groups, own_buffers
from shardwright.errors import StrategyError

Target = TypeVar("Target", bound=Callable[..., Any])

EXAMPLE = '"b s _h, _h -> b s _h"'


def local_map(
    target: Target,
    notation: str,
    *,
    partial: Partial | Sequence[Partial] = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
    random: bool | None = None,
    buffers: Sequence[str] = (),
    flops: float | None = None,
    saved_bytes: float | None = None,
) -> Target:
    """Run a module or a function eagerly on local shards, without capturing its operators.

    The target keeps its own Python, kernels and data-dependent shapes, and autograd computes its
    backward pass. The function corresponds to JAX's `shard_map` and DTensor's `local_map`, except
    that the plan decides which mesh axes shard which dimension.

    If the target is the full model, the model is trained data parallel, with parameters replicated
    or sharded by the plan, as by DDP or FSDP2.

    Args:
        target: a module, which is marked in place; or a function of tensors, of which a marked
            wrapper is returned, to be called in `forward`. Parameters and buffers of a module are
            gathered before each call, and their gradients are summed over shards.
        notation: the dimensions of each tensor argument, in order, and of each result:
            `"b s _h, _h -> b s _h"`. A name such as `b` is a dimension that may be sharded:
            results on shards must equal shards of the result. `_` is a dimension that may
            not be sharded. `_h` may not be sharded either; a result dimension of the same name has
            the same size. `()` is a tensor without dimensions. A number is the size of a dimension
            of a result.
        partial: reduction of a result that lacks a dimension of the arguments, over the shards of
            that dimension: `"sum"`, or `"mean"` as for a mean loss; one value for all results or
            one for each. Without `partial`, the dimension is not sharded.
        dtypes: dtypes of the results; needed if the target cannot run on fake tensors and a dtype
            differs from that of the first floating-point input.
        random: whether the target draws random numbers from `torch`; must be passed if a target
            that cannot run on fake tensors draws random numbers.
        buffers: names of the buffers that a module changes; must be passed if the module cannot run
            on fake tensors. New values are averaged over shards; for integer buffers, the first
            shard's are used.
        flops, saved_bytes: floating-point operations of the forward pass on the global batch, and
            bytes saved for its backward pass. By default they are counted on fake tensors, or else
            estimated from inputs and results.

    Returns:
        The module itself, or the marked function.

    Raises:
        StrategyError: if the notation is malformed, or a function reads a trained module or tensor
            that is not an argument.

    >>> import torch
    >>> import shardwright as sw
    >>> def clipped(x):
    ...     return torch.stack([row / row.norm() if row.norm() > 1 else row for row in x])
    >>> clip_rows = sw.local_map(clipped, "b _h -> b _h")
    >>> clip_rows(torch.ones(2, 4)).norm(dim=1)
    tensor([1., 1.])
    """
    # A class is callable, too, but has no parameters to gather.
    if isinstance(target, type) or not callable(target):
        raise StrategyError(
            f"local_map takes a module or a function, not {target!r}\n"
            f"write `sw.local_map(net.attention, {EXAMPLE})`"
        )
    options = _parse_options(notation, partial, dtypes, random, flops, saved_bytes)
    if isinstance(target, nn.Module):
        attach(target, LocalMapTag(options, _check_buffer_names(target, buffers)))
        return target
    _check_reads_no_trained_tensor(target)
    function: Any = LocalFunction(target, options)
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class LocalMapTag(ModuleTag):
    """Tag of a module that capture records as one `local_map` operator."""

    options: Options
    buffers: frozenset[str] = frozenset()

    def trace(self, module: nn.Module, location: ModuleLocation) -> None:
        local_part, names = (
            self._make_local_part(module, location),
            list(_collect_tensor_names(module).values()),
        )

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Read in each call, since a trace replaces the parameters and buffers.
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            return local_part.traced(args, kwargs, [tensors[name] for name, *_ in names])

        module.forward = forward

    def _make_local_part(self, module: nn.Module, location: ModuleLocation) -> LocalPart:
        names = tuple(_collect_tensor_names(module).values())
        sample = _copy_to_meta_device(module)
        description = f"{type(module).__module__}.{type(module).__qualname__} {module!r}"
        count = len({id(parameter) for parameter in module.parameters()})
        # A weak reference, so that graphs and plans do not keep the model alive.
        body = ModuleBody(weakref.ref(location.root), location.path, names, count, description)
        # Dry calls run on a copy on the meta device, and leave the module as it is.
        sampled = ModuleBody(lambda: sample, "", names, count, description)
        statistics = tuple(
            number
            for number, (name, *_) in enumerate(names)
            if name in self.buffers or _is_running_statistic(module, name)
        )
        return LocalPart(str(location), self.options, body, sampled, statistics)

    def module_call(self, module: nn.Module, location: ModuleLocation) -> ModuleCall:
        """Return the call that TorchDynamo puts into its graph for a copy of the module."""
        local_part = self._make_local_part(module, location)
        names = tuple(name for name, *_ in _collect_tensor_names(module).values())
        return ModuleCall(as_one_call(lambda *call: local_part.traced(*call)), names)


def _check_buffer_names(module: nn.Module, names: Sequence[str]) -> frozenset[str]:
    """Check the names of changed buffers, and return the set of names.

    Raises:
        StrategyError: if the module has no buffer of that name.
    """
    buffers = dict(module.named_buffers())
    for name in names:
        if name not in buffers:
            raise StrategyError(
                f"local_map: the {type(module).__name__} has no buffer {name!r}\n"
                f"pass names of its buffers: {', '.join(buffers) or 'none'}"
            )
    return frozenset(names)


def calls_of_modules(twin: nn.Module, root: nn.Module) -> dict[int, ModuleCall]:
    """Return the calls of the `local_map` modules of `twin`, a copy of `root`, by module id."""
    calls: dict[int, ModuleCall] = {}
    for path, module in twin.named_modules():
        tag = vars(module).get("shardwright", {}).get(LocalMapTag.__name__)
        if tag is not None:
            location = ModuleLocation(root, path, type(module).__name__)
            calls[id(module)] = tag.module_call(module, location)
    return calls


def is_local_map(module: nn.Module) -> bool:
    """Return whether a module is marked as a `local_map`."""
    return any(isinstance(tag, LocalMapTag) for tag in vars(module).get("shardwright", {}).values())


class LocalFunction:
    """Wrapper of a function that is marked as a `local_map`; calls the function."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self.function, self.options = function, options
        update_wrapper(self, function)
        self._set_dynamo_call()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_locally(self, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A nested function, which cannot be pickled; `__setstate__` makes it again.
        return {name: value for name, value in vars(self).items() if name != "call_in_graph"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_dynamo_call()

    def _set_dynamo_call(self) -> None:
        # A weak reference, as the object itself holds the function.
        reference = weakref.ref(self)

        @as_one_call
        def call_in_graph(args: Any, kwargs: Any) -> Any:
            function = reference()
            assert function is not None
            return function.traced(args, kwargs)

        self.call_in_graph = call_in_graph

    def traced(self, args: Any, kwargs: Any) -> Any:
        """Trace a call of the function as one operator.

        Raises:
            StrategyError: if the arguments or results do not match the notation.
        """
        body = FunctionBody(self.function)
        where = f"{body.description} at {current_line()}"
        return LocalPart(where, self.options, body, body).traced(args, kwargs, [])


def calls_in_graph() -> AbstractContextManager[Any]:
    """Return a context in which TorchDynamo traces each call of a marked function as one node."""

    def call(self: LocalFunction, *args: Any, **kwargs: Any) -> Any:
        return self.call_in_graph(args, kwargs)

    return patch.object(LocalFunction, "__call__", call)


def call_locally(function: LocalFunction, args: Any, kwargs: Any) -> Any:
    """Call a marked function; a capture records the call as one operator."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Only an export passes the call to modes; otherwise they see the operators of the function.
    if torch.compiler.is_exporting() and has_torch_function(tensors):
        return handle_torch_function(call_locally, tensors, function, args, kwargs)
    return function.function(*args, **kwargs)


_NORMALIZATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def _is_running_statistic(module: nn.Module, name: str) -> bool:
    """Whether a tensor is a running statistic of a normalization in training mode."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    return isinstance(owner, _NORMALIZATIONS) and owner.training and leaf in own_buffers(owner)


def _collect_tensor_names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return all names of each parameter and buffer by tensor id, parameters first."""
    names: dict[int, tuple[str, ...]] = {}
    for named in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def _copy_to_meta_device(module: nn.Module) -> nn.Module:
    """Copy a module with its parameters and buffers on the meta device."""
    memo: dict[int, Any] = {**copies_of_attributes(module), **memo_of_process_groups(module)}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
            requires_grad=parameter.requires_grad,
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(module, memo)


def _parse_options(
    notation: str,
    partial: Any,
    dtypes: Any,
    random: bool | None,
    flops: float | None,
    saved_bytes: float | None,
) -> Options:
    """Parse the arguments of `local_map`.

    Raises:
        StrategyError: if an argument is malformed.
    """
    before, arrow, after = notation.partition("->") if isinstance(notation, str) else ("", "", "")
    inputs, outputs = _parse_entries(before), _parse_entries(after)
    tokens = [token for entry in (*inputs, *outputs) for token in entry]
    # Numbers are sizes of results only; arguments bring their sizes.
    digits = [token for entry in inputs for token in entry if token.isdigit()]
    bad = [t for t in tokens if not (t.isidentifier() or t.isdigit())] + digits
    if not arrow or not outputs or bad:
        what = f"{bad[0]!r} is no name" if bad else "it needs inputs and results around an arrow"
        raise StrategyError(
            f"local_map: {notation!r} is not a notation: {what}\nwrite a name for each dimension "
            f"that may be sharded, `_` for others, `()` for a tensor without dimensions: {EXAMPLE}"
        )
    partials = tuple(partial) if isinstance(partial, (tuple, list)) else (partial,) * len(outputs)
    if len(partials) != len(outputs) or not {None, "sum", "mean"}.issuperset(partials):
        raise StrategyError(
            f"local_map {notation!r}: partial={partial!r} is not valid for {len(outputs)} results\n"
            'pass "sum", "mean" or None for all results, or one for each: '
            f"partial={('mean', *(None,) * (len(outputs) - 1))}"
        )
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * len(outputs)
    if dtypes is not None and len(dtypes) != len(outputs):
        raise StrategyError(
            f"local_map {notation!r}: {len(dtypes)} dtypes for {len(outputs)} results\n"
            f"pass one dtype per result: dtypes=({'torch.float32, ' * len(outputs)})"
        )
    result_dtypes = None if dtypes is None else tuple(dtypes)
    declaration = Declaration(inputs, outputs, partials, notation)
    _check_can_be_sharded(declaration)
    return Options(declaration, result_dtypes, random, flops, saved_bytes)


def _check_can_be_sharded(declaration: Declaration) -> None:
    """Check that a named dimension is in all results without `partial`.

    Raises:
        StrategyError: if dimensions are named, but each name is missing in a result without
            `partial`.
    """
    names = dict.fromkeys(n for dims in declaration.input_dims for n in dims if n is not None)
    results = list(zip(declaration.output_dims, declaration.partial, strict=True))
    # One name that every result has or reduces is enough to shard the call.
    if not names or any(all(n in dims or partial for dims, partial in results) for n in names):
        return
    # For the message: the first result that prevents sharding, and the name that it lacks.
    number, name = next(
        (number, name)
        for number, (dims, partial) in enumerate(results)
        for name in names
        if name not in dims and not partial
    )
    reductions = ['"mean"' if n == number else repr(p) for n, (_, p) in enumerate(results)]
    given = reductions[0] if len(results) == 1 else f"({', '.join(reductions)})"
    raise StrategyError(
        f"local_map {declaration.notation!r}: result {number} has no dimension {name!r}, so"
        f" inputs cannot be sharded along {name!r}\nsay how the results of shards are reduced: "
        f'partial={given} (or "sum"), or write `_` instead of {name!r}'
    )


def _parse_entries(side: str) -> tuple[tuple[str, ...], ...]:
    entries = [entry.strip() for entry in side.split(",")] if side.strip() else []
    return tuple(() if entry == "()" else tuple(entry.split()) for entry in entries)


def _check_reads_no_trained_tensor(function: Any) -> None:
    """Check that a function reads no trained module or tensor besides its arguments.

    Raises:
        StrategyError: if a function reads a trained module or tensor that is not an argument.
    """
    for owner in trained_reads(function):
        raise StrategyError(
            f"local_map: {function_text(function)!r} reads a"
            f" {type(owner).__name__} that is not among its arguments, and would miss the"
            " gradients of other shards\n"
            "give the module itself (`sw.local_map(net.attention, …)`), or pass the tensor"
        )


def trained_reads(function: Any) -> Iterator[Any]:
    """Yield the trained modules and tensors that a function reads and that are not arguments."""
    for captured in _list_captured_values(function):
        tensors = captured.parameters() if isinstance(captured, nn.Module) else (captured,)
        if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
            yield captured


def _list_captured_values(function: Any) -> Iterator[Any]:
    """Yield the values that a function reads and that are not arguments.

    The values are the object of a method (`__self__`), arguments bound by `functools.partial`,
    variables of enclosing functions, and global variables.
    """
    if isinstance(function, functools.partial):
        yield from pytree.tree_leaves((function.args, function.keywords))
        yield from _list_captured_values(function.func)
        return
    yield getattr(function, "__self__", None)
    # The function of a method, and below decorators with `functools.wraps`.
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function):
        return
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # A variable that has no value yet.
            yield from pytree.tree_leaves(cell.cell_contents)
    for name in _list_global_names(function.__code__):
        yield from pytree.tree_leaves(function.__globals__.get(name))


def _list_global_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the global variables read by code, including nested functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_global_names(constant)
