"""Masks of attention that only say that it is causal become its argument `is_causal`.

While they are exported, models of `transformers` make the mask of all pairs of positions, which
fast kernels do not read and which no device could hold for a long sequence. What it allows is
proved on the vectors of positions that it compares.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, fx

from shardwright.capture.fx_nodes import insert, is_tensor, node_arguments, node_shape, replace
from shardwright.torch_internals import pytree
from shardwright.torch_internals.operators import OpOverload

aten = torch.ops.aten

AllowedKeys = Literal["all", "causal"]
"""Which keys a mask allows for a query: all, or those up to its own position."""

MOST_ELEMENTS = 1 << 24
"""Of tensors whose numbers are looked at."""

_AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
_NOT = (aten.bitwise_not.default, aten.logical_not.default)
_SAME = (aten.expand.default, aten.reshape.default, aten.to.dtype)
_ONES = (aten.ones.default, aten.new_ones.default, aten.ones_like.default)
_COMPARISONS = {
    aten.ge.Tensor: (torch.ge, False),
    aten.gt.Tensor: (torch.gt, False),
    aten.le.Tensor: (torch.ge, True),
    aten.lt.Tensor: (torch.gt, True),
}
"""As "greater" or "greater or equal", and whether the two sides change places."""
_OPPOSITE = {torch.ge: torch.gt, torch.gt: torch.ge}


def fold_causal_masks(graph: fx.Graph) -> None:
    """Rewrites attention in place; leaves masks without readers for dead code removal."""
    masks = _Masks()
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        arguments = node_arguments(node)
        mask = arguments.pop("attn_mask")
        pairs = (node_shape(arguments["query"])[-2], node_shape(arguments["key"])[-2])
        pattern = masks.pattern(mask) if is_tensor(mask) else None
        if pattern == "all" or (pattern == "causal" and node_shape(mask)[-2:] == pairs):
            arguments["is_causal"] = pattern == "causal"
            inputs = tuple(arguments.pop(name) for name in ("query", "key", "value"))
            replace(node, insert(node, node.target, inputs, arguments))


class _Masks:
    """What the masks of a graph allow."""

    def __init__(self) -> None:
        self._values: dict[fx.Node, Tensor | None] = {}
        self._patterns: dict[fx.Node, AllowedKeys | None] = {}

    def pattern(self, mask: fx.Node) -> AllowedKeys | None:
        """What a boolean mask allows; None for anything else."""
        if mask not in self._patterns:
            self._patterns[mask] = self._pattern(mask)
        return self._patterns[mask]

    def _pattern(self, mask: fx.Node) -> AllowedKeys | None:
        if mask.meta["val"].dtype != torch.bool or mask.op != "call_function":
            return None
        if mask.target in _AND:
            patterns = [self._broadcast(each, mask) for each in mask.all_input_nodes]
            if None in patterns:
                return None
            return "causal" if "causal" in patterns else "all"
        if mask.target in _SAME:
            return self._broadcast(mask.args[0], mask)
        if mask.target in _ONES:
            return "all"
        if mask.target is aten.tril.default and mask.args[1:] in ((), (0,)):
            return "causal" if self.pattern(mask.args[0]) else None  # type: ignore[arg-type]
        if mask.target in _NOT:
            return self._comparison(mask.args[0], opposite=True)  # type: ignore[arg-type]
        if mask.target is aten.eq.Tensor:
            numbers = [n for each in mask.args if (n := self._value(each)) is not None]
            ends = [end.item() for n in numbers for end in n.aminmax()]
            return "all" if len(ends) == 4 and len(set(ends)) == 1 else None
        if mask.target in _COMPARISONS:
            return self._comparison(mask)
        value = self._value(mask)
        return "all" if value is not None and bool(value.all()) else None

    def _broadcast(self, source: Any, mask: fx.Node) -> AllowedKeys | None:
        """The pattern of a mask that becomes one of perhaps more pairs."""
        pattern = self.pattern(source)
        same_pairs = node_shape(source)[-2:] == node_shape(mask)[-2:]
        return pattern if pattern == "all" or same_pairs else None

    def _comparison(self, mask: fx.Node, opposite: bool = False) -> AllowedKeys | None:
        """Of numbers of the queries `[..., s, 1]` with those of the keys `[..., 1, t]`."""
        if mask.target not in _COMPARISONS or len(node_shape(mask)) < 2:
            return None
        greater, swapped = _COMPARISONS[mask.target]
        first, second = (self._value(each) for each in mask.args)
        if first is None or second is None:
            return None
        dtype = torch.promote_types(first.dtype, second.dtype)
        first, second = first[(None,) * 2].to(dtype), second[(None,) * 2].to(dtype)
        if opposite:
            greater, swapped = _OPPOSITE[greater], not swapped
        if swapped:
            first, second = second, first
        if first.shape[-1] == 1 and second.shape[-2] == 1:
            return _allowed(first.squeeze(-1), second.squeeze(-2), greater)
        if first.shape[-2] == 1 and second.shape[-1] == 1:
            return _allowed(_reversed(second).squeeze(-1), _reversed(first).squeeze(-2), greater)
        return None

    def _value(self, node: Any) -> Tensor | None:
        """The numbers of a tensor that is made of nothing but constants, if they are few."""
        if not is_tensor(node):
            return None
        if node not in self._values:
            self._values[node] = self._evaluated(node)
        return self._values[node]

    def _evaluated(self, node: fx.Node) -> Tensor | None:
        size = node.meta["val"].numel()
        if not isinstance(node.target, OpOverload) or not 0 < size <= MOST_ELEMENTS:
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        numbers = {each: self._value(each) for each in node.all_input_nodes}
        if any(number is None for number in numbers.values()):
            return None
        args, kwargs = pytree.tree_map_only(fx.Node, numbers.get, (node.args, node.kwargs))
        with torch.device("cpu"), torch.no_grad():
            result: Tensor = node.target(*args, **kwargs)
        return result


def _allowed(queries: Tensor, keys: Tensor, greater: Any) -> AllowedKeys | None:
    """Which keys are allowed where `greater(query, key)`; both `[..., positions]`."""
    if bool(greater(queries.amin(), keys.amax())):
        return "all"
    count = min(queries.shape[-1], keys.shape[-1])
    before = keys.cummax(-1).values[..., :count]
    after = keys.flip(-1).cummin(-1).values.flip(-1)[..., 1 : queries.shape[-1] + 1]
    causal = greater(queries[..., :count], before).all()
    causal &= ~greater(queries[..., : after.shape[-1]], after).any()
    return "causal" if count == queries.shape[-1] and bool(causal) else None


def _reversed(numbers: Tensor) -> Tensor:
    """Numbers in the opposite order; the negative of an integer may overflow."""
    return -numbers if numbers.is_floating_point() else ~numbers.long()
