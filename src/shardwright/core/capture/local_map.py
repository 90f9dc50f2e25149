"""`local_map`: a part of a model that capture leaves as it is, as one operator of the graph."""

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

from shardwright.core.capture.annotations import ModulePlace, ModuleTag, attach
from shardwright.core.capture.local_trace import LocalPart, Options
from shardwright.core.capture.naming import current_line
from shardwright.core.deferred import copies_of_attributes
from shardwright.core.graph.local_declaration import Declaration, Partial
from shardwright.core.graph.local_map import FunctionBody, ModuleBody, function_text
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dynamo import ModuleCall, as_one_call
from shardwright.core.torch_internals.modules import own_buffers, process_groups
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
    """Run a module or a function as it is, on local shards.

    It is not captured: it runs eagerly, with its own Python, kernels and data-dependent shapes, and
    autograd computes its backward pass.

    The whole model may be the target. It is then trained data parallel, with parameters stored as
    the plan says, as by DDP or FSDP2. Like `shard_map` of JAX and `local_map` of DTensor; which
    mesh axes cut which dimension is decided by the plan.

    Args:
        target: a module, which is marked and returned; or a function of tensors, whose marked form
            is returned, to be called in `forward`. Parameters and buffers of a module are gathered
            before a call, and the gradients of shards are summed.
        notation: the dimensions of each tensor that it is called with, in order, and of each
            result: `"b s _h, _h -> b s _h"`. A name is a dimension that may be sharded: shards give
            the same as if they were computed together. `_` is one that may not, `_h` too, with a
            name by which results have its size; `()` is a tensor without dimensions, and a number
            the size of a result.
        partial: of results that lack a name of an input: `"sum"` if they add up over its shards,
            `"mean"` if their mean counts, as of a mean loss; one for all or one for each. Without
            it, such a name is not sharded.
        dtypes: of the results, where the target cannot run on tensors without values and they are
            not that of the first floating-point input.
        random: whether it draws random numbers from `torch`, where that cannot be seen so either.
        buffers: names of the buffers of a module that it changes, where that cannot be seen so
            either. New values become the mean over shards, counters those of the first.
        flops, saved_bytes: of its forward pass on the whole batch: floating-point operations, and
            bytes that are kept for the backward pass. By default they are counted on tensors
            without values, or else taken from its inputs and results.

    Returns:
        The module itself, or the marked function.

    Raises:
        StrategyError: if the notation is malformed, or a function holds a module or a tensor that
            is trained.

    >>> import torch
    >>> import shardwright as sw
    >>> def clipped(x):
    ...     return torch.stack([row / row.norm() if row.norm() > 1 else row for row in x])
    >>> clip_rows = sw.local_map(clipped, "b _h -> b _h")
    >>> clip_rows(torch.ones(2, 4)).norm(dim=1)
    tensor([1., 1.])
    """
    if isinstance(target, type) or not callable(target):
        raise StrategyError(
            f"local_map takes a module or a function, not {target!r}\n"
            f"write `sw.local_map(net.attention, {EXAMPLE})`"
        )
    options = _options(notation, partial, dtypes, random, flops, saved_bytes)
    if isinstance(target, nn.Module):
        attach(target, LocalMapTag(options, _known_buffers(target, buffers)))
        return target
    _check_closure(target)
    function: Any = LocalFunction(target, options)
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class LocalMapTag(ModuleTag):
    """Marks a module as a `local_map`."""

    options: Options
    buffers: frozenset[str] = frozenset()

    def trace(self, module: nn.Module, place: ModulePlace) -> None:
        part, names = self._part(module, place), list(_all_names(module).values())

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Here, as a trace puts others in their place.
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            return part.traced(args, kwargs, [tensors[name] for name, *_ in names])

        module.forward = forward

    def _part(self, module: nn.Module, place: ModulePlace) -> LocalPart:
        names = tuple(_all_names(module).values())
        sample = _without_values(module)
        text = f"{type(module).__module__}.{type(module).__qualname__} {module!r}"
        count = len({id(parameter) for parameter in module.parameters()})
        body = ModuleBody(weakref.ref(place.root), place.path, names, count, text)
        sampled = ModuleBody(lambda: sample, "", names, count, text)
        statistics = tuple(
            number
            for number, (name, *_) in enumerate(names)
            if name in self.buffers or _is_statistic(module, name)
        )
        return LocalPart(str(place), self.options, body, sampled, statistics)

    def module_call(self, module: nn.Module, place: ModulePlace) -> ModuleCall:
        """The call of a copy of the module that TorchDynamo puts into its graph."""
        part = self._part(module, place)
        names = tuple(name for name, *_ in _all_names(module).values())
        return ModuleCall(as_one_call(lambda *call: part.traced(*call)), names)


def _known_buffers(module: nn.Module, names: Sequence[str]) -> frozenset[str]:
    """
    Raises:
        StrategyError: if a name is of no buffer.
    """
    own = dict(module.named_buffers())
    for name in names:
        if name not in own:
            raise StrategyError(
                f"local_map: {name!r} is no buffer of the {type(module).__name__}\n"
                f"its buffers are {', '.join(own) or 'none'}"
            )
    return frozenset(names)


def calls_of_modules(twin: nn.Module, root: nn.Module) -> dict[int, ModuleCall]:
    """The calls of the `local_map` modules of `twin`, a copy of the model `root`, by their id."""
    calls: dict[int, ModuleCall] = {}
    for path, module in twin.named_modules():
        tag = vars(module).get("shardwright", {}).get(LocalMapTag.__name__)
        if tag is not None:
            place = ModulePlace(root, path, type(module).__name__)
            calls[id(module)] = tag.module_call(module, place)
    return calls


def is_local_map(module: nn.Module) -> bool:
    """Whether a module is marked as a `local_map`."""
    return any(isinstance(tag, LocalMapTag) for tag in vars(module).get("shardwright", {}).values())


class LocalFunction:
    """A function that is marked as a `local_map`; called as the function."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self.function, self.options = function, options
        update_wrapper(self, function)
        self._set_call_in_graph()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_locally(self, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "call_in_graph"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_call_in_graph()

    def _set_call_in_graph(self) -> None:
        reference = weakref.ref(self)

        @as_one_call
        def call_in_graph(args: Any, kwargs: Any) -> Any:
            function = reference()
            assert function is not None
            return function.traced(args, kwargs)

        self.call_in_graph = call_in_graph

    def traced(self, args: Any, kwargs: Any) -> Any:
        """The call while a model is traced."""
        body = FunctionBody(self.function)
        where = f"{body.text} at {current_line()}"
        return LocalPart(where, self.options, body, body).traced(args, kwargs, [])


def calls_in_graph() -> AbstractContextManager[Any]:
    """A context in which TorchDynamo traces calls of marked functions as one call each."""

    def call(self: LocalFunction, *args: Any, **kwargs: Any) -> Any:
        return self.call_in_graph(args, kwargs)

    return patch.object(LocalFunction, "__call__", call)


def call_locally(function: LocalFunction, args: Any, kwargs: Any) -> Any:
    """Calls a marked function; a capture takes the call for one operator."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Modes are asked only here, so that they surround the function everywhere else.
    if torch.compiler.is_exporting() and has_torch_function(tensors):
        return handle_torch_function(call_locally, tensors, function, args, kwargs)
    return function.function(*args, **kwargs)


_NORMALIZATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def _is_statistic(module: nn.Module, name: str) -> bool:
    """Whether a tensor is a running statistic of a normalization that is being trained."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    return isinstance(owner, _NORMALIZATIONS) and owner.training and leaf in own_buffers(owner)


def _all_names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """All names of each parameter and buffer, the parameters first."""
    names: dict[int, tuple[str, ...]] = {}
    for named in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def _without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {**copies_of_attributes(module), **process_groups(module)}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
            requires_grad=parameter.requires_grad,
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(module, memo)


def _options(
    notation: str,
    partial: Any,
    dtypes: Any,
    random: bool | None,
    flops: float | None,
    saved_bytes: float | None,
) -> Options:
    """
    Raises:
        StrategyError: if they are malformed.
    """
    left, arrow, right = notation.partition("->") if isinstance(notation, str) else ("", "", "")
    inputs, outputs = _entries(left), _entries(right)
    tokens = [token for entry in (*inputs, *outputs) for token in entry]
    digits = [token for entry in inputs for token in entry if token.isdigit()]
    bad = [t for t in tokens if not (t.isidentifier() or t.isdigit())] + digits
    if not arrow or not outputs or bad:
        what = f"{bad[0]!r} is no name" if bad else "it has no inputs and results around an arrow"
        raise StrategyError(
            f"local_map: {notation!r} is not a notation: {what}\nwrite a name of a dimension that "
            f"may be sharded, `_` for another, `()` for a number, such as {EXAMPLE}"
        )
    partials = tuple(partial) if isinstance(partial, (tuple, list)) else (partial,) * len(outputs)
    if len(partials) != len(outputs) or not {None, "sum", "mean"}.issuperset(partials):
        raise StrategyError(
            f"local_map {notation!r}: partial={partial!r} does not fit its {len(outputs)} results\n"
            'give `"sum"`, `"mean"` or None for all, or one for each: '
            f"partial={('mean', *(None,) * (len(outputs) - 1))}"
        )
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * len(outputs)
    if dtypes is not None and len(dtypes) != len(outputs):
        raise StrategyError(
            f"local_map {notation!r}: {len(dtypes)} dtypes for {len(outputs)} results\n"
            f"give one for each: dtypes=({'torch.float32, ' * len(outputs)})"
        )
    kinds = None if dtypes is None else tuple(dtypes)
    declaration = Declaration(inputs, outputs, partials, notation)
    _check_can_be_sharded(declaration)
    return Options(declaration, kinds, random, flops, saved_bytes)


def _check_can_be_sharded(declaration: Declaration) -> None:
    """
    Raises:
        StrategyError: if some dimensions are named, and results without `partial` lack all of them.
    """
    names = dict.fromkeys(n for dims in declaration.input_dims for n in dims if n is not None)
    results = list(zip(declaration.output_dims, declaration.partial, strict=True))
    if not names or any(all(n in dims or partial for dims, partial in results) for n in names):
        return
    number, name = next(
        (number, name)
        for number, (dims, partial) in enumerate(results)
        for name in names
        if name not in dims and not partial
    )
    reductions = ['"mean"' if n == number else repr(p) for n, (_, p) in enumerate(results)]
    given = reductions[0] if len(results) == 1 else f"({', '.join(reductions)})"
    raise StrategyError(
        f"local_map {declaration.text!r}: result {number} lacks {name!r}, so nothing can be sharded"
        f'\nsay what it is over shards: partial={given}, or "sum"; or write `_` for {name!r}'
    )


def _entries(side: str) -> tuple[tuple[str, ...], ...]:
    texts = [text.strip() for text in side.split(",")] if side.strip() else []
    return tuple(() if text == "()" else tuple(text.split()) for text in texts)


def _check_closure(function: Any) -> None:
    """
    Raises:
        StrategyError: if a function reads what is trained other than by its arguments.
    """
    for owner in trained_reads(function):
        raise StrategyError(
            f"local_map: {function_text(function)!r} reads a"
            f" {type(owner).__name__} that is not among its arguments, and would get no"
            " gradient of other shards\n"
            "give the module itself (`sw.local_map(net.attention, …)`), or pass the tensor"
        )


def trained_reads(function: Any) -> Iterator[Any]:
    """The trained modules and tensors that a function reads beside its arguments."""
    for thing in _things_read(function):
        tensors = thing.parameters() if isinstance(thing, nn.Module) else (thing,)
        if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
            yield thing


def _things_read(function: Any) -> Iterator[Any]:
    """What a function has besides its arguments: its object, bound arguments, variables of
    enclosing functions, and global variables that its code reads."""
    if isinstance(function, functools.partial):
        yield from pytree.tree_leaves((function.args, function.keywords))
        yield from _things_read(function.func)
        return
    yield getattr(function, "__self__", None)
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function):
        return
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # Of a variable that has no value yet.
            yield from pytree.tree_leaves(cell.cell_contents)
    for name in _global_names(function.__code__):
        yield from pytree.tree_leaves(function.__globals__.get(name))


def _global_names(code: CodeType) -> Iterator[str]:
    """Names of the global variables that code and the functions in it read."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
