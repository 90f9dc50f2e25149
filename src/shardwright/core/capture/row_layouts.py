"""Layouts of the rows of experts in the masks of a loop, tried on drawn experts.

A loop over experts selects rows by `ids == expert`, by one-hot vectors, or by any of a token's
experts. Where the rows of each expert are among those of its mask is therefore not read from the
operators, but tried: the masks are computed from random experts.
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
    """The experts of a loop cannot be computed at once; the message is what the loop does, as a
    verb in the third person and its object."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Position of the row of each (token, expert) pair among the rows of a mask.

    Pairs are in the order of `ids`, `[tokens, top_k]`.

    Args:
        positions: row of the mask of each pair, `[pairs]`.
        num_rows: number of rows of the mask.
        top_k: 1 if the mask has the order of the pairs.
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
        """Return the mask that selects the rows of `pairs`, a boolean tensor `[tokens, top_k]`."""
        mask = torch.zeros(self.num_rows, dtype=torch.bool)
        mask[self.positions[pairs.flatten()]] = True
        return mask


def find_experts_of_masks(masks: Sequence[fx.Node]) -> tuple[fx.Node, RowLayout, list[int]]:
    """Return the experts of each token, the layout of their pairs in the rows of a mask, and the
    indices of `masks` in the order of their experts, which are 0 and following.

    Raises:
        NoTemplateError: if the masks select other rows than those of an expert.
    """
    chains = [list_integers(mask) for mask in masks]
    for ids in chains[0]:
        if not all(ids in chain for chain in chains):
            break
        trials = MaskTrials(ids, masks)
        for layout in _make_layouts(ids, prod(node_shape(masks[0]))):
            order = _order_by_expert(trials, layout)
            if order is not None:
                return ids, layout, order
    raise NoTemplateError("selects rows by other masks than `ids == expert`")


def _make_layouts(ids: fx.Node, rows: int) -> Iterator[RowLayout]:
    """Yield the possible layouts of masks of `rows` rows."""
    pairs, sizes = prod(node_shape(ids)), node_shape(ids)
    top_k = sizes[-1] if len(sizes) > 1 else 1
    if rows == pairs:
        yield RowLayout.same(pairs)
    if rows == pairs and top_k > 1:
        yield RowLayout.transposed(pairs, top_k)
    if rows * top_k == pairs and top_k > 1 and is_topk(ids):
        yield RowLayout.repeated(pairs, top_k)


def _order_by_expert(trials: MaskTrials, layout: RowLayout) -> list[int] | None:
    """Return, for each expert, the index of the mask that selects its rows; None unless masks and
    experts correspond one to one."""
    if not trials.draws:
        return None
    count = len(trials.draws[0][1])
    indices = {
        _identify([values[index] for _, values in trials.draws]): index for index in range(count)
    }
    order = [
        indices.get(_identify([layout.mask_of(ids == expert) for ids, _ in trials.draws]))
        for expert in range(count)
    ]
    indices_of_masks = [index for index in order if index is not None]
    return indices_of_masks if len(set(indices_of_masks)) == count else None


def _identify(masks: Sequence[Tensor]) -> bytes:
    """Return bytes that are equal for equal masks."""
    return b"".join(mask.flatten().numpy().tobytes() for mask in masks)
