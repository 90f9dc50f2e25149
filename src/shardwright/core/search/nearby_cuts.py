"""Cuts of one operator that match a neighbor's layout or change one axis; conversions of cuts.

Cuts are changed as a mapping from axis to factor, in which axes that cut no factor are missing.
Then axes that do not divide the operator's sizes are removed.
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
"""Mapping from the index of a mesh axis to the factor that it cuts; unused axes are omitted."""

NO_AXES: Mapping[str, Axes] = MappingProxyType({})


@dataclass(frozen=True)
class SharedTensor:
    """A tensor that an operator shares with a neighbor, in the neighbor's layout.

    Args:
        dims: the factor of each dim in the rule of the operator, not of the neighbor.
        layout: the layout in which the neighbor computes or reads the tensor.
    """

    dims: Dims
    layout: TensorLayout


@dataclass(frozen=True)
class NearbyCuts:
    """Generator of cuts of one operator that match a neighbor, or change one axis.

    Args:
        limits: for each factor that may be cut, an integer that must be a multiple of its number of
            shards.
        shared: the tensors that the operator shares with neighbors.
        joined: pairs of factors that cut the same dims, as in `ShardingRule.joined`; at most one of
            a pair is cut.
    """

    mesh: DeviceMatrix
    limits: Mapping[str, int]
    shared: Sequence[SharedTensor]
    joined: Mapping[str, str] = field(default_factory=dict)

    def matching_neighbors(self) -> Iterator[dict[int, str]]:
        """Yield, for each shared tensor, the cuts with which the operator reads or computes it in
        the neighbor's layout, as a dict from axis to factor."""
        for tensor in self.shared:
            # Axes over which the neighbor's layout is partial or varying shard no dim and are
            # missing.
            yield {
                axis: factor
                for factor, axes in zip(tensor.dims, tensor.layout.axes, strict=True)
                # A dim that the operator cannot cut stays replicated, whatever the neighbor does.
                if factor is not None and factor in self.limits
                for axis in axes
            }

    def with_one_axis_changed(
        self, factors: FactorOfAxis, axes: Iterable[int]
    ) -> Iterator[dict[int, str]]:
        """Yield `factors` with one of `axes` changed to another factor, or to none.

        If the new factor is joined with another factor, all axes of that other factor change to the
        new factor too, as an operator must not be cut by both.
        """
        for axis in axes:
            # None last, so that of equal costs a cut is found before no cut.
            for factor in (*self.limits, None):
                if factor != factors.get(axis):
                    other_axes = {a: f for a, f in factors.items() if a != axis}
                    if factor is not None:
                        # Moving one axis alone would leave the operator cut by both.
                        pairs = [{*pair} for pair in self.joined.items() if factor in pair]
                        other_axes = {
                            a: factor if {f, factor} in pairs else f for a, f in other_axes.items()
                        }
                    yield other_axes if factor is None else {**other_axes, axis: factor}

    def divisible(
        self, factors: FactorOfAxis, preferred: Mapping[str, Axes] = NO_AXES
    ) -> dict[str, Axes]:
        """Return the cuts in which each axis shards the factor given by `factors`, without axes
        that do not divide the sizes.

        Args:
            preferred: for each factor, the axes to take first, in this order; other axes follow,
                outermost first.
        """
        cuts: dict[str, Axes] = {}
        axes_of = axes_of_factors(factors)
        for factor, limit in self.limits.items():
            # Of two joined factors the inner one stays: together they would cut one dim twice.
            if factor not in axes_of or self.joined.get(factor) in axes_of:
                continue
            axes = [axis for axis in preferred.get(factor, ()) if axis in axes_of[factor]]
            axes += [axis for axis in axes_of[factor] if axis not in axes]
            divisible_axes: Axes = ()
            for axis in axes:
                # An axis that does not divide the size is skipped; later axes may still divide it.
                if limit % self.mesh.size((*divisible_axes, axis)) == 0:
                    divisible_axes = (*divisible_axes, axis)
            if divisible_axes:
                cuts[factor] = divisible_axes
        return cuts


def unjoined_limits(rule: ShardingRule) -> dict[str, int]:
    """Return the largest number of shards of each factor, except joined factors such as `ring`.

    Used by searches that compare communication volumes: the volume of ring attention exceeds that
    of a gather of keys and values, but overlaps computation, which the volume does not show.
    """
    return {f: rule.capacity[f] for f in rule.factors if f not in rule.joined}


OpLayouts = tuple[tuple[TensorLayout, ...], tuple[TensorLayout, ...]]
"""The layouts of an operator's inputs, and those of its outputs."""


def layouts_of(op: Op, rule: ShardingRule | None, mesh: DeviceMatrix, cuts: Cuts) -> OpLayouts:
    """Return the layouts of an operator's inputs and those of its outputs under `cuts`; replicated
    without a sharding rule."""
    if rule is not None:
        return rule.layouts(mesh, cuts)
    # An operator without a rule runs on full tensors on every device.
    return (
        tuple(mesh.replicated(len(value.shape)) for value in op.inputs),
        tuple(mesh.replicated(len(value.shape)) for value in op.outputs),
    )


def factor_of_axis(cuts: Cuts) -> dict[int, str]:
    """Return `cuts` inverted: a dict from the index of each axis to the factor that it cuts."""
    return {axis: factor for factor, axes in cuts.items() for axis in axes}


def axes_of_factors(factors: FactorOfAxis) -> dict[str, Axes]:
    """Return `factors` inverted: a dict from each factor to the axes that cut it, outermost
    first."""
    cuts: dict[str, Axes] = {}
    for axis in sorted(factors):
        # Sorted, as the axes are numbered from the outermost, most significant one.
        cuts[factors[axis]] = (*cuts.get(factors[axis], ()), axis)
    return cuts


def group_equal_axes(mesh: DeviceMatrix, properties: Sequence[Mapping[int, object]]) -> list[Axes]:
    """Group the axes with more than one device that have equal values of all properties.

    Args:
        properties: mappings from an axis to a value; a missing axis has the value None.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for axis, size in enumerate(mesh.device_matrix):
        if size > 1:
            groups.setdefault(tuple(each.get(axis) for each in properties), []).append(axis)
    return [tuple(group) for group in groups.values()]
