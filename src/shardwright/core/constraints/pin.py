"""Pins: the constraints that a user has attached to a module or a function.

A pin of a module with submodules constrains its *boundary*: the tensors that it takes and returns.
During tracing each of these tensors passes through an `aten.alias`, so that the graph has an
operator to which the constraint applies.

A module without submodules, or a function, may turn out to be a single operator, which is then
pinned itself. As only its graph shows this, its aliases are *candidates* until the end of tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.capture.annotations import (
    BoundaryTag,
    CandidateBoundary,
    ModuleLocation,
    ModuleTag,
    PinnedCall,
    tagging,
)
from shardwright.core.capture.experts import is_one_operator
from shardwright.core.capture.local_map import is_local_map
from shardwright.core.constraints.named_strategy import (
    AxisDims,
    NamedStrategy,
    PinnedStrategy,
    RequestedEntry,
    UserEntry,
    argument_names,
    requested_entry,
    signature_of,
)
from shardwright.core.constraints.strategy import OperatorStrategy, entries_text
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.errors import StrategyError


@dataclass(frozen=True, eq=False)
class Pin(ModuleTag):
    """Sharding constraints that a user attached to one module or function.

    Args:
        strategy: sharding of the main operator, or of the boundary of a module with submodules;
            None if only parameters or other operators are pinned.
        parameters: storage sharding of each parameter, by its name in the module.
        operators: strategies by the part of the operator's name after the module's path:
            `".add_1"`; `"@2"` for the main operator of the second call; `""` for the main operator
            of every call that has no entry of its own.
    """

    strategy: PinnedStrategy | None
    parameters: Mapping[str, RequestedEntry] = field(default_factory=dict)
    operators: Mapping[str, PinnedStrategy] = field(default_factory=dict)

    def trace(self, module: nn.Module, location: ModuleLocation) -> None:
        # Modules that capture replaces by one operator are pinned like that operator.
        if self.strategy is None or is_one_operator(module) or is_local_map(module):
            return
        # A module with submodules is never a single operator, so its boundary is pinned for
        # certain.
        if any(module.children()):
            module.forward = _wrap_with_pinned_aliases(str(location), module.forward, self.strategy)
        else:
            module.forward = _wrap_with_candidate_aliases(
                str(location), module.forward, self.strategy
            )


class NamedFunction(nn.Module):
    """Wrap a function in a module, so that it has a name in the module tree, in pins and in plans.

    Args:
        function: any function; it is called with the arguments of the module.

    Raises:
        StrategyError: if `function` is a module or not callable.

    >>> net = nn.Module()
    >>> net.matmul1 = NamedFunction(torch.matmul)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        if isinstance(function, nn.Module) or not callable(function):
            raise StrategyError(
                f"`Op` takes a function, not {function!r}\n"
                "pass a function; a module already has a name, and needs no `Op`"
            )
        self.function = function

    def _get_name(self) -> str:
        return "Op"  # the name under which the package exports it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        return str(getattr(self.function, "__name__", self.function))


class BoundaryPin(Pin, BoundaryTag):
    """Requested sharding of one tensor that enters or leaves a module."""

    def entry_rank(self) -> int | None:
        """Return the number of dimensions of the entry; None for an entry that names axes."""
        if not isinstance(self.strategy, OperatorStrategy):
            return None
        (entry,) = self.strategy.inputs
        return len(entry.shard_counts if isinstance(entry, TensorLayout) else entry or ())


def tagged_calls(function: Any, tag: Any) -> Any:
    """Wrap `function` so that the operators of each call have their own copy of `tag`.

    If `function` is already wrapped with a tag of the same class, `tag` replaces that tag.
    """
    inner_attribute = f"_without_{type(tag).__name__}"
    # Unwrap, so that the tag replaces an earlier one instead of adding to it.
    inner = getattr(function, inner_attribute, function)

    @wraps(inner)
    def tagged(*args: Any, **kwargs: Any) -> Any:
        # A new tag for every call: tags are compared by identity, so that the operators of two
        # calls of the same function can be distinguished.
        call_tag = replace(tag)
        with tagging(call_tag):
            # Only graphs have aliases; in eager code the function is called as it is.
            if isinstance(call_tag, Pin) and call_tag.strategy and torch.compiler.is_exporting():
                name = getattr(inner, "__name__", "a pinned function")
                call = _bind_arguments(inner, call_tag.strategy, args, kwargs)
                return _call_with_candidate_aliases(name, inner, call_tag.strategy, call_tag, call)
            return inner(*args, **kwargs)

    vars(tagged)[inner_attribute] = inner
    return tagged


class _ModuleCallTag:
    """Tag of all operators of one call of a module."""


def _wrap_with_candidate_aliases(where: str, forward: Any, strategy: PinnedStrategy) -> Any:
    """Wrap `forward` of a module without submodules so that its boundary can be pinned.

    The strategy applies to the module's operator if there is only one, otherwise to the boundary.

    Args:
        where: path and class of the module, for errors.
        forward: the module's bound `forward`.
        strategy: the strategy of the pin.
    """

    @wraps(forward)
    def with_candidates(*args: Any, **kwargs: Any) -> Any:
        call, tag = _bind_arguments(forward, strategy, args, kwargs), _ModuleCallTag()
        # The strategy has entries for weights, so it is that of a single operator, by position.
        if call.entries(strategy) is None:
            return forward(*args, **kwargs)
        # So that the operators of this call, and whether there is only one, are known in the graph.
        with tagging(tag):
            return _call_with_candidate_aliases(where, forward, strategy, tag, call)

    return with_candidates


@dataclass(frozen=True)
class _BoundCall:
    """Arguments of a pinned call, in the order of the function's signature.

    Args:
        arguments: (args, kwargs) of the call.
        names: the argument name of each tensor; None for a strategy without names of arguments.
    """

    arguments: tuple[Any, Any]
    names: tuple[str, ...] | None

    def entries(self, strategy: PinnedStrategy) -> tuple[RequestedEntry, ...] | None:
        """Return the strategy entry of each tensor argument; None if the numbers of entries and
        tensors differ, as when the strategy has entries for weights."""
        if isinstance(strategy.inputs, Mapping):
            return tuple(strategy.inputs.get(name) for name in self.names or ())
        leaves = pytree.tree_leaves(self.arguments)
        num_tensors = sum(isinstance(leaf, Tensor) for leaf in leaves)
        return strategy.inputs if num_tensors == len(strategy.inputs) else None


def _bind_arguments(function: Any, strategy: PinnedStrategy, args: Any, kwargs: Any) -> _BoundCall:
    # `NamedFunction.forward` takes `*args`, so the names are those of the function that it wraps.
    owner = getattr(function, "__self__", None)
    named = owner.function if isinstance(owner, NamedFunction) else function
    if not isinstance(strategy.inputs, Mapping):
        # Entries are in the order of the signature, so keyword arguments are brought into this
        # order.
        names = _list_parameter_names(named) if len(kwargs) > 1 else []
        ordered = sorted(kwargs, key=lambda name: [*names, *kwargs].index(name))
        return _BoundCall((args, {name: kwargs[name] for name in ordered}), None)
    call = signature_of(named).bind(*args, **kwargs)
    return _BoundCall((call.args, call.kwargs), argument_names(call))


def _list_parameter_names(function: Any) -> list[str]:
    """Return the names of a function's parameters in order; empty if they are unknown."""
    if isinstance(function, OpOverload):
        return [argument.name for argument in schema_of(function).arguments]
    try:
        return [*signature_of(function).parameters]
    except StrategyError:
        return []


def _call_with_candidate_aliases(
    where: str, function: Any, strategy: PinnedStrategy, tag: Any, traced_call: _BoundCall
) -> Any:
    """Call a function, and pass its tensor arguments and results through candidate aliases.

    If the strategy does not have one entry per tensor argument, some entries are for weights, so
    the function must be a single operator, and no aliases are inserted.

    Args:
        where: the function or module, for errors.
        function: the function to call.
        strategy: the strategy of the pin.
        tag: tag for the operators of this call.
        traced_call: the arguments of the call.
    """
    # The tag of a pinned function is its pin, while that of a module only marks the call.
    call, names = PinnedCall(tag, [], isinstance(tag, Pin)), traced_call.names

    def pin_candidates(
        verb: str, tree: Any, entries: tuple[RequestedEntry, ...], names: tuple[str, ...] | None
    ) -> Any:
        return _pin_tensors(
            f"{where} {verb}",
            tree,
            entries,
            lambda pin, index: CandidateBoundary(
                call, pin, names[index] if names else None, pin.entry_rank()
            ),
        )

    entries = traced_call.entries(strategy)
    args, kwargs = traced_call.arguments
    if entries is None:
        return function(*args, **kwargs)
    # Names of weights are right for a single operator only; the graph will show whether it is one.
    if isinstance(strategy.inputs, Mapping) and (
        weights := strategy.inputs.keys() - set(names or ())
    ):
        call.problems.append(
            f"{where} has several operators, but its pin has entries for"
            f" {', '.join(map(repr, sorted(weights)))}, which it is not called with\nname"
            " arguments only, or pin a module with one operator"
        )
    args, kwargs = pin_candidates("is called with", (args, kwargs), entries, names)
    result = function(*args, **kwargs)
    if strategy.outputs is None:
        return result
    try:
        return pin_candidates("returns", result, strategy.outputs, None)
    except StrategyError as error:
        # Raised only if the captured graph has several operators for this call: the strategy is
        # then that of the boundary, and not that of a single operator.
        call.problems.append(str(error))
        return result


def _wrap_with_pinned_aliases(where: str, forward: Any, strategy: PinnedStrategy) -> Any:
    """Wrap `forward` so that its tensor arguments and results pass through pinned aliases."""

    @wraps(forward)
    def with_boundary(*args: Any, **kwargs: Any) -> Any:
        call = _bind_arguments(forward, strategy, args, kwargs)
        entries = call.entries(strategy)
        # `_pin_tensors` raises the error about the number of entries.
        if entries is None:
            assert not isinstance(strategy.inputs, Mapping)
            entries = strategy.inputs
        args, kwargs = _pin_tensors(f"{where} is called with", call.arguments, entries)
        result = forward(*args, **kwargs)
        if strategy.outputs is None:
            return result
        return _pin_tensors(f"{where} returns", result, strategy.outputs)

    return with_boundary


def _pin_tensors(
    where: str,
    tree: Any,
    entries: tuple[RequestedEntry, ...],
    tag_of: Callable[[BoundaryPin, int], Any] = lambda pin, index: pin,
) -> Any:
    """Replace each tensor of `tree` whose entry is not None by a pinned alias.

    Args:
        where: start of error messages, such as `block (Block) returns`.
        tree: the arguments or results of a module.
        entries: one entry per tensor of `tree`.
        tag_of: function that returns the tag of an alias, given the pin and index of its tensor.

    Raises:
        StrategyError: if the numbers of tensors and entries differ.
    """
    leaves, spec = pytree.tree_flatten(tree)
    tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(tensor_indices) != len(entries):
        shapes = ", ".join(str(list(leaves[index].shape)) for index in tensor_indices)
        raise StrategyError(
            f"{where} {f'tensors of shapes {shapes}' if shapes else 'no tensors'}, but its pin"
            f" {entries_text(entries)} has {len(entries)} entries\n"
            f"use {len(tensor_indices)} entries, one per tensor, with None for a tensor whose"
            " sharding is left to the search; pin weights on the modules that own them"
        )
    for number, (index, entry) in enumerate(zip(tensor_indices, entries, strict=True)):
        if entry is not None:
            leaves[index] = _insert_tagged_alias(
                leaves[index], tag_of(_make_boundary_pin(entry), number)
            )
    return pytree.tree_unflatten(leaves, spec)


def _make_boundary_pin(entry: RequestedEntry) -> BoundaryPin:
    # Layouts need the sizes of axes, which `plan` receives.
    if isinstance(entry, AxisDims):
        return BoundaryPin(NamedStrategy((entry,)))
    return BoundaryPin(OperatorStrategy((entry,)))


def _insert_tagged_alias(tensor: Tensor, tag: Any) -> Tensor:
    # Enable gradients also under `torch.no_grad()`, where eager code returns the tensor itself,
    # which requires its gradient.
    with tagging(tag), torch.enable_grad():
        alias: Tensor = torch.ops.aten.alias.default(tensor)
        return alias


def reshard(x: Tensor, layout: UserEntry) -> Tensor:
    """Redistribute a tensor to a layout at this point of `forward`.

    The search still decides how the operators before and after this point are sharded. In eager
    code, and in a model that is not planned, `x` is returned unchanged.

    Args:
        x: a tensor of any shape.
        layout: the number of shards of each dimension, `(2, 4)`, a `TensorLayout`, or the dimension
            that each mesh axis shards, `{"dp": 0, "tp": -1}`.

    Returns:
        A tensor with the values of `x`, in the layout.

    Raises:
        StrategyError: if `layout` is not a valid entry; `plan` checks it against the shape of `x`.

    >>> import torch
    >>> import shardwright as sw
    >>> x = torch.ones(8, 4)
    >>> sw.reshard(x, (2, 1)) is x
    True
    """
    entry = requested_entry("layout", layout)
    # An alias in eager code would be another tensor object than `x`.
    if entry is None or not torch.compiler.is_exporting():
        return x
    return _insert_tagged_alias(x, _make_boundary_pin(entry))
