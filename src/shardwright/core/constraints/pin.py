"""Pins: the constraints that a user has attached to a module or a function.

A pin of a module with submodules constrains its boundary: the tensors that it takes and returns.
During tracing each of these tensors passes through an `aten.alias`, so that the graph has an
operator to which the constraint applies.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.capture.annotations import BoundaryTag, ModulePlace, ModuleTag, tagging
from shardwright.core.capture.experts import is_one_operator
from shardwright.core.capture.local_map import is_local_map
from shardwright.core.constraints.strategy import Entry, OperatorStrategy, entries_text
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError


@dataclass(frozen=True, eq=False)
class Pin(ModuleTag):
    """The constraints of one module or function.

    Args:
        strategy: sharding of the main operator, or of the boundary of a module with submodules.
        parameters: storage sharding of each parameter, by its name in the module.
        operators: strategies by the suffix that follows the module's path in the operator's name:
            `".add_1"`; `"@2"` for the main operator of the second call; `""` for the main operator
            of every call without an entry of its own.
    """

    strategy: OperatorStrategy | None
    parameters: Mapping[str, Entry] = field(default_factory=dict)
    operators: Mapping[str, OperatorStrategy] = field(default_factory=dict)

    def trace(self, module: nn.Module, place: ModulePlace) -> None:
        # What capture replaces by one operator counts as a leaf.
        is_one = is_one_operator(module) or is_local_map(module)
        if self.strategy is not None and not is_one and any(module.children()):
            module.forward = _with_boundary(str(place), module.forward, self.strategy)


class BoundaryPin(Pin, BoundaryTag):
    """The pin of one tensor at the boundary of a module."""


def tagged_calls(function: Any, tag: Any) -> Any:
    """Wrap `function` so that the operators of each call are tagged.

    A wrapper with a tag of the same class is replaced, not nested.
    """
    inner_attribute = f"_without_{type(tag).__name__}"
    inner = getattr(function, inner_attribute, function)

    @wraps(inner)
    def tagged(*args: Any, **kwargs: Any) -> Any:
        # A new tag for every call: tags are compared by identity, so that the operators of two
        # calls of the same function can be distinguished.
        with tagging(replace(tag)):
            return inner(*args, **kwargs)

    vars(tagged)[inner_attribute] = inner
    return tagged


def _with_boundary(where: str, forward: Any, strategy: OperatorStrategy) -> Any:
    """Wrap `forward` so that its tensor arguments and results pass through pinned aliases."""
    signature = inspect.signature(forward)

    @wraps(forward)
    def with_boundary(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        arguments = (call.args, call.kwargs)
        args, kwargs = _pin_tensors(f"{where} is called with", arguments, strategy.inputs)
        result = forward(*args, **kwargs)
        if strategy.outputs is None:
            return result
        return _pin_tensors(f"{where} returns", result, strategy.outputs)

    return with_boundary


def _pin_tensors(what: str, tree: Any, entries: tuple[Entry, ...]) -> Any:
    """Replace each tensor of `tree` that has an entry by a pinned alias.

    Raises:
        StrategyError: if the numbers of tensors and entries differ.
    """
    leaves, spec = pytree.tree_flatten(tree)
    tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(tensor_indices) != len(entries):
        shapes = ", ".join(str(list(leaves[index].shape)) for index in tensor_indices)
        raise StrategyError(
            f"{what} tensors {shapes or 'none'}, and is pinned as {entries_text(entries)}\n"
            f"a module with submodules takes one entry for each of these {len(tensor_indices)}"
            " tensors, or None to leave one open; weights are pinned on the modules that own them"
        )
    for index, entry in zip(tensor_indices, entries, strict=True):
        if entry is not None:
            with tagging(BoundaryPin(OperatorStrategy((entry,)))):
                leaves[index] = torch.ops.aten.alias.default(leaves[index])
    return pytree.tree_unflatten(leaves, spec)
