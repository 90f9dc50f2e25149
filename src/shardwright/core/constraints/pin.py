"""What a user has pinned of a module or a function.

The pin of a module that has others inside is of its boundary: of the tensors that it is called with
and those that it returns. While it is traced each of them passes through an `aten.alias`, which is
an operator like any other and is pinned as one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.capture.annotations import BoundaryTag, ModuleTag, tagging
from shardwright.core.capture.experts import is_one_operator
from shardwright.core.constraints.strategy import Entry, OperatorStrategy, entries_text
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError


@dataclass(frozen=True, eq=False)
class Pin(ModuleTag):
    """The constraints of one module or function.

    Args:
        strategy: of its main operator, or of its boundary.
        parameters: how parameters are stored, by name in the module.
        operators: strategies by the suffix that follows the module's path in the operator's name:
            `".add_1"`; `"@2"` for the main operator of the second call; `""` for the main operator
            of every call without an entry of its own.
    """

    strategy: OperatorStrategy | None
    parameters: Mapping[str, Entry] = field(default_factory=dict)
    operators: Mapping[str, OperatorStrategy] = field(default_factory=dict)

    def trace(self, module: nn.Module, where: str) -> None:
        one = is_one_operator(module) or not any(module.children())
        if self.strategy is not None and not one:
            module.forward = _with_boundary(where, module.forward, self.strategy)


class BoundaryPin(Pin, BoundaryTag):
    """The pin of one tensor that enters or leaves a module."""


def tagged_calls(function: Any, tag: Any) -> Any:
    """A function that tags the operators of each call; it replaces an earlier one of this kind."""
    earlier = f"_without_{type(tag).__name__}"
    inner = getattr(function, earlier, function)

    @wraps(inner)
    def tagged(*args: Any, **kwargs: Any) -> Any:
        # Every call has a tag of its own, which tells its operators from those of other calls.
        with tagging(replace(tag)):
            return inner(*args, **kwargs)

    vars(tagged)[earlier] = inner
    return tagged


def _with_boundary(where: str, forward: Any, strategy: OperatorStrategy) -> Any:
    """`forward`, with a pinned alias of each tensor that it is called with and returns."""
    signature = inspect.signature(forward)

    @wraps(forward)
    def with_boundary(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = (call.args, call.kwargs)
        args, kwargs = _pinned_tensors(f"{where} is called with", given, strategy.inputs)
        result = forward(*args, **kwargs)
        if strategy.outputs is None:
            return result
        return _pinned_tensors(f"{where} returns", result, strategy.outputs)

    return with_boundary


def _pinned_tensors(what: str, tree: Any, entries: tuple[Entry, ...]) -> Any:
    """`tree` with an alias of each of its tensors that has an entry, which is pinned so.

    Raises:
        StrategyError: if there are not as many tensors as entries.
    """
    leaves, spec = pytree.tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(places) != len(entries):
        shapes = ", ".join(str(list(leaves[place].shape)) for place in places)
        raise StrategyError(
            f"{what} tensors {shapes or 'none'}, and is pinned as {entries_text(entries)}: a module"
            f" with others inside takes one entry for each of the {len(places)}, None to leave it"
            " open; weights are pinned on the modules that own them"
        )
    for place, entry in zip(places, entries, strict=True):
        if entry is not None:
            with tagging(BoundaryPin(OperatorStrategy((entry,)))):
                leaves[place] = torch.ops.aten.alias.default(leaves[place])
    return pytree.tree_unflatten(leaves, spec)
