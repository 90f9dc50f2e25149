"""Layouts of (token, expert) pairs in the masks of a loop over experts.

A loop over experts selects rows by `ids == expert`, by one-hot vectors, or by whether any of a
token's experts is the given one. Capture therefore does not infer the layout from the operators: it
computes the masks from random expert indices, and compares them with each possible layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from shardwright.core.capture.constant_rows import MaskTrials, is_topk, list_integers
from shardwright.core.capture.fx_nodes import node_shape


class NoTemplateError(Exception):
    """Raised for a loop over experts that cannot become one operator; the message is the reason."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Map from (token, expert) pairs to rows of a mask.

    Pairs are in the order of the expert indices `[tokens, top_k]`.

    Args:
        positions: row of each pair, `[pairs]`.
        num_rows: number of rows of the mask.
        top_k: experts of a token; 1 if the mask has the order of the pairs.
    """

    positions: Tensor
    num_rows: int
    top_k: int

    @staticmethod
    def same(pairs: int) -> RowLayout:
        """Return the layout of a mask `[tokens, top_k]`."""
        return RowLayout(torch.arange(pairs), pairs, 1)

    @staticmethod
    def transposed(pairs: int, top_k: int) -> RowLayout:
        """Return the layout of a mask `[top_k, tokens]`."""
        return RowLayout(torch.arange(pairs).view(top_k, -1).T.flatten(), pairs, top_k)

    @staticmethod
    def repeated(pairs: int, top_k: int) -> RowLayout:
        """Return the layout of a mask `[tokens]` that selects the tokens with a given expert."""
        tokens = pairs // top_k
        return RowLayout(torch.arange(tokens).repeat_interleave(top_k), tokens, top_k)

    @property
    def repeats(self) -> bool:
        return len(self.positions) > self.num_rows

    def mask_of(self, pairs: Tensor) -> Tensor:
        """Return the mask `[rows]` of the True elements of `pairs`, `[tokens, top_k]`."""
        mask = torch.zeros(self.num_rows, dtype=torch.bool)
        mask[self.positions[pairs.flatten()]] = True
        return mask


def find_experts_of_masks(masks: Sequence[fx.Node]) -> tuple[fx.Node, RowLayout, list[int]]:
    """Find the expert indices from which the masks of a loop are computed.

    Returns:
        The node of the expert indices, the layout of the masks, and the index in `masks` of the
        mask of expert 0, 1, ….

    Raises:
        NoTemplateError: if a mask does not select the rows of one expert.
    """
    chains = [list_integers(mask) for mask in masks]
    for ids in chains[0]:
        if not all(ids in chain for chain in chains):
            break
        trials = MaskTrials(ids, masks)
        for layout in _list_possible_layouts(ids, prod(node_shape(masks[0]))):
            order = _order_masks_by_expert(trials, layout)
            if order is not None:
                return ids, layout, order
    raise NoTemplateError("this loop selects rows by masks other than `ids == expert`")


def _list_possible_layouts(ids: fx.Node, rows: int) -> Iterator[RowLayout]:
    """Yield the layouts with which masks of `rows` rows may select pairs of `ids`."""
    pairs, sizes = prod(node_shape(ids)), node_shape(ids)
    top_k = sizes[-1] if len(sizes) > 1 else 1
    if rows == pairs:
        yield RowLayout.same(pairs)
    if rows == pairs and top_k > 1:
        yield RowLayout.transposed(pairs, top_k)
    if rows * top_k == pairs and top_k > 1 and is_topk(ids):
        yield RowLayout.repeated(pairs, top_k)


def _order_masks_by_expert(trials: MaskTrials, layout: RowLayout) -> list[int] | None:
    """Return the index of each expert's mask; None unless each mask selects one expert's rows."""
    if not trials.draws:
        return None
    count = len(trials.draws[0][1])
    indices = {
        _serialize_masks([values[index] for _, values in trials.draws]): index
        for index in range(count)
    }
    order = [
        indices.get(_serialize_masks([layout.mask_of(ids == expert) for ids, _ in trials.draws]))
        for expert in range(count)
    ]
    indices_of_masks = [index for index in order if index is not None]
    return indices_of_masks if len(set(indices_of_masks)) == count else None


def _serialize_masks(masks: Sequence[Tensor]) -> bytes:
    return b"".join(mask.flatten().numpy().tobytes() for mask in masks)
