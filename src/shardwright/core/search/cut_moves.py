"""One operator among its neighbors: how a cut lays out its tensors, and the moves to other cuts.

A *move* says which factor each axis cuts; an axis that it lacks cuts none. Moves lay out a shared
tensor as a neighbor does, or change one axis, both as far as the operator's sizes divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardwright.core.graph.graph import Op
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.rules.rule import Cuts, Dims, ShardingRule

FactorOfAxis = Mapping[int, str]
"""For each axis that cuts an operator the factor that it cuts."""

NO_AXES: Mapping[str, Axes] = MappingProxyType({})


@dataclass(frozen=True)
class SharedTensor:
    """A tensor of an operator as a neighbor lays it out.

    Args:
        dims: the factors that it carries in the operator's own rule.
        layout: in which the neighbor makes or reads it.
    """

    dims: Dims
    layout: TensorLayout


@dataclass(frozen=True)
class CutMoves:
    """The moves of one operator.

    Args:
        limits: for each factor that may be cut the number that its number of shards must divide.
        shared: the tensors that it shares with neighbors.
        joined: for factors that cut also the dimensions of another, that other; a move cuts one of
            the two.
    """

    mesh: DeviceMatrix
    limits: Mapping[str, int]
    shared: Sequence[SharedTensor]
    joined: Mapping[str, str] = field(default_factory=dict)

    def followed(self) -> Iterator[dict[int, str]]:
        """For each shared tensor the move that lays it out as the neighbor does."""
        for tensor in self.shared:
            yield {
                axis: factor
                for factor, axes in zip(tensor.dims, tensor.layout.axes, strict=True)
                if factor is not None and factor in self.limits
                for axis in axes
            }

    def changed(self, factors: FactorOfAxis, axes: Iterable[int]) -> Iterator[dict[int, str]]:
        """`factors` with one of `axes` moved to another factor, or to none; of factors that are
        joined all axes move."""
        for axis in axes:
            for factor in (*self.limits, None):
                if factor != factors.get(axis):
                    others = {a: f for a, f in factors.items() if a != axis}
                    if factor is not None:
                        pairs = [{*pair} for pair in self.joined.items() if factor in pair]
                        others = {
                            a: factor if {f, factor} in pairs else f for a, f in others.items()
                        }
                    yield others if factor is None else {**others, axis: factor}

    def divisible(
        self, factors: FactorOfAxis, preferred: Mapping[str, Axes] = NO_AXES
    ) -> dict[str, Axes]:
        """The cuts of a move: each factor on its axes as far as it divides.

        Args:
            preferred: the order of axes of a factor; of axes that it lacks the outermost are first.
        """
        cuts: dict[str, Axes] = {}
        moved = axes_of_factors(factors)
        for factor, limit in self.limits.items():
            if factor not in moved or self.joined.get(factor) in moved:
                continue
            axes = [axis for axis in preferred.get(factor, ()) if axis in moved[factor]]
            axes += [axis for axis in moved[factor] if axis not in axes]
            taken: Axes = ()
            for axis in axes:
                if limit % self.mesh.size((*taken, axis)) == 0:
                    taken = (*taken, axis)
            if taken:
                cuts[factor] = taken
        return cuts


def least_sent(rule: ShardingRule) -> dict[str, int]:
    """The limits of factors for who counts bytes alone: a factor that is joined with another sends
    more, beside computation."""
    return {f: rule.capacity[f] for f in rule.factors if f not in rule.joined}


OpLayouts = tuple[tuple[TensorLayout, ...], tuple[TensorLayout, ...]]
"""The layouts in which an operator reads its inputs and leaves its outputs."""


def layouts_of(op: Op, rule: ShardingRule | None, mesh: DeviceMatrix, cuts: Cuts) -> OpLayouts:
    """The layouts of an operator that is cut so; without a rule it reads and leaves all whole."""
    if rule is not None:
        return rule.layouts(mesh, cuts)
    return (
        tuple(mesh.replicated(len(value.shape)) for value in op.inputs),
        tuple(mesh.replicated(len(value.shape)) for value in op.outputs),
    )


def factor_of_axis(cuts: Cuts) -> dict[int, str]:
    """The factor that each axis cuts."""
    return {axis: factor for factor, axes in cuts.items() for axis in axes}


def axes_of_factors(factors: FactorOfAxis) -> dict[str, Axes]:
    """The axes that cut each factor, the outermost first."""
    cuts: dict[str, Axes] = {}
    for axis in sorted(factors):
        cuts[factors[axis]] = (*cuts.get(factors[axis], ()), axis)
    return cuts


def group_equal_axes(mesh: DeviceMatrix, uses: Sequence[Mapping[int, object]]) -> list[Axes]:
    """The axes of more than one device, joined where all `uses` have the same for them."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for axis, size in enumerate(mesh.device_matrix):
        if size > 1:
            groups.setdefault(tuple(use.get(axis) for use in uses), []).append(axis)
    return [tuple(group) for group in groups.values()]
