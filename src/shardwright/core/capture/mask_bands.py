"""Detection of attention masks that are bands, in which each query attends to keys near its
position, as in causal and sliding-window attention.

For a mask that compares positions of queries and keys, the check evaluates the two vectors of
positions, not the mask of all pairs.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwright.core.capture.fx_nodes import is_tensor, node_shape
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload

aten = torch.ops.aten


class Band(NamedTuple):
    """Mask in which query i attends to the keys from i - `before` to i + `after`."""

    before: float = inf
    after: float = inf

    def __and__(self, other: Band) -> Band:
        return Band(min(self.before, other.before), min(self.after, other.after))


ALL, CAUSAL = Band(), Band(after=0)

MOST_ELEMENTS = 1 << 24
"""Maximum number of elements of a constant that is evaluated to detect a band."""

AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
_NOT = (aten.bitwise_not.default, aten.logical_not.default)
SAME = (aten.expand.default, aten.reshape.default, aten.to.dtype)
_ONES = (aten.ones.default, aten.new_ones.default, aten.ones_like.default)
_TRIANGLES: dict[Any, str] = {aten.tril.default: "after", aten.triu.default: "before"}
_COMPARISONS = {
    aten.ge.Tensor: (torch.ge, False),
    aten.gt.Tensor: (torch.gt, False),
    aten.le.Tensor: (torch.ge, True),
    aten.lt.Tensor: (torch.gt, True),
}
"""By comparison operator: the equivalent `gt` or `ge`, and whether to swap the operands."""
_OPPOSITE = {torch.ge: torch.gt, torch.gt: torch.ge}


class BandDetector:
    """Detector of attention masks that are bands, with the results for one graph."""

    def __init__(self) -> None:
        self._values: dict[fx.Node, Tensor | None] = {}
        self._bands: dict[fx.Node, Band | None] = {}

    def band(self, mask: fx.Node) -> Band | None:
        """Return the band of a boolean mask; None if it cannot be shown to be a band."""
        if mask not in self._bands:
            self._bands[mask] = self._infer_band(mask)
        return self._bands[mask]

    def _infer_band(self, mask: fx.Node) -> Band | None:
        if mask.meta["val"].dtype != torch.bool or mask.op != "call_function":
            return None
        if mask.target in AND:
            first, *others = (self._infer_reshaped_band(each, mask) for each in mask.args)
            for band in others:
                first = None if first is None or band is None else first & band
            return first
        if mask.target in SAME:
            return self._infer_reshaped_band(mask.args[0], mask)
        if mask.target in _ONES:
            return ALL
        if mask.target in _TRIANGLES:
            return self._infer_triangle_band(mask)
        if mask.target in _NOT:
            return self._infer_comparison_band(mask.args[0], opposite=True)  # type: ignore[arg-type]
        if mask.target is aten.eq.Tensor:
            numbers = [
                n for each in mask.args if (n := self._compute_small_constant(each)) is not None
            ]
            # Both operands are known, and all their elements are one number: every pair is equal.
            ends = [end.item() for n in numbers for end in n.aminmax()]
            return ALL if len(ends) == 4 and len(set(ends)) == 1 else None
        if mask.target in _COMPARISONS:
            return self._infer_comparison_band(mask)
        # Any other constant mask that is True everywhere.
        value = self._compute_small_constant(mask)
        return ALL if value is not None and bool(value.all()) else None

    def _infer_reshaped_band(self, source: Any, mask: fx.Node) -> Band | None:
        """Return the band of `mask`, an expanded or reshaped `source`; None if it cannot be shown
        to be a band."""
        band = self.band(source)
        same_pairs = node_shape(source)[-2:] == node_shape(mask)[-2:]
        # A band counts positions in the last two dimensions; a mask of all pairs has any shape.
        return band if band == ALL or same_pairs else None

    def _infer_triangle_band(self, mask: fx.Node) -> Band | None:
        """Return the band of `tril` or `triu` of a mask; None if the result cannot be shown to be
        a band."""
        source, diagonal, *_ = (*mask.args, 0)
        band, name = self.band(source), _TRIANGLES[mask.target]  # type: ignore[arg-type]
        # `tril(d)` keeps keys j <= i + d, and `triu(d)` keys j >= i + d, so `before` is -d.
        reach = float(diagonal if name == "after" else -diagonal)  # type: ignore[arg-type,operator]
        return None if band is None or reach < 0 else band & Band(**{name: reach})

    def _infer_comparison_band(self, mask: fx.Node, opposite: bool = False) -> Band | None:
        """Return the band of a mask that compares queries `[..., s, 1]` with keys `[..., 1, t]`;
        None if it cannot be shown to be a band.

        Args:
            opposite: whether the mask is the negation of the comparison.
        """
        if mask.target not in _COMPARISONS or len(node_shape(mask)) < 2:
            return None
        greater, swapped = _COMPARISONS[mask.target]
        first, second = (self._compute_small_constant(each) for each in mask.args)
        if first is None or second is None:
            return None
        dtype = torch.promote_types(first.dtype, second.dtype)
        # Leading dimensions of size 1, so that operands with fewer than two have rows and columns.
        first, second = first[(None,) * 2].to(dtype), second[(None,) * 2].to(dtype)
        if opposite:
            # not (a >= b) is b > a, and not (a > b) is b >= a.
            greater, swapped = _OPPOSITE[greater], not swapped
        if swapped:
            first, second = second, first
        if first.shape[-1] == 1 and second.shape[-2] == 1:
            return _infer_band_of_vectors(first.squeeze(-1), second.squeeze(-2), greater)
        if first.shape[-2] == 1 and second.shape[-1] == 1:
            # key > query is -query > -key, of which the first operand is again the queries.
            return _infer_band_of_vectors(
                _reverse_order(second).squeeze(-1), _reverse_order(first).squeeze(-2), greater
            )
        return None

    def _compute_small_constant(self, node: Any) -> Tensor | None:
        """Return the values of a small tensor computed from constants; None for other tensors."""
        if not is_tensor(node):
            return None
        if node not in self._values:
            self._values[node] = self._evaluate_constant(node)
        return self._values[node]

    def _evaluate_constant(self, node: fx.Node) -> Tensor | None:
        size = node.meta["val"].numel()
        if not isinstance(node.target, OpOverload) or not 0 < size <= MOST_ELEMENTS:
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        numbers = {each: self._compute_small_constant(each) for each in node.all_input_nodes}
        if any(number is None for number in numbers.values()):
            return None
        args, kwargs = pytree.tree_map_only(fx.Node, numbers.get, (node.args, node.kwargs))
        with torch.device("cpu"), torch.no_grad():
            result: Tensor = node.target(*args, **kwargs)
        return result


def _infer_band_of_vectors(queries: Tensor, keys: Tensor, greater: Any) -> Band | None:
    """Return the band of the mask `greater(queries, keys)`, for tensors `[..., positions]`; None if
    the mask cannot be shown to be a band."""
    # Every query exceeds every key.
    if bool(greater(queries.amin(), keys.amax())):
        return ALL
    # A query at i sees keys up to i + after: it exceeds earlier keys and none later.
    after = _count_keys_after(queries, keys, greater)
    if after is not None:
        return Band(after=after)
    # In reversed order, keys after a position are those before it; flipping aligns the last
    # positions, so both lengths must agree.
    before = _count_keys_after(queries.flip(-1), keys.flip(-1), greater)
    same = queries.shape[-1] == keys.shape[-1]
    return Band(before=before) if same and before is not None else None


def _count_keys_after(queries: Tensor, keys: Tensor, greater: Any) -> int | None:
    """Return how many keys after its own position each query attends to, besides all earlier keys.

    Returns None if the number differs between queries, or if a query does not attend to its own
    position.
    """
    if queries.shape[-1] > keys.shape[-1]:
        return None
    # A guess from the first query, which is then checked for all.
    reach = int(greater(queries[..., :1], keys).sum(-1).amin()) - 1
    if reach < 0:
        return None
    last = (torch.arange(queries.shape[-1]) + reach).clamp(max=keys.shape[-1] - 1)
    # Largest key up to position i + reach, and smallest key beyond: query i must exceed the first
    # and not the second.
    before = keys.cummax(-1).values[..., last]
    after = keys.flip(-1).cummin(-1).values.flip(-1)[..., reach + 1 : queries.shape[-1] + reach + 1]
    exact = greater(queries, before).all()
    exact &= ~greater(queries[..., : after.shape[-1]], after).any()
    return reach if bool(exact) else None


def _reverse_order(numbers: Tensor) -> Tensor:
    """Reverse the order of numbers: negate floats, invert integers (negation may overflow)."""
    return -numbers if numbers.is_floating_point() else ~numbers.long()
