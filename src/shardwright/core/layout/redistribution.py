"""Find the collectives that redistribute a tensor from one layout to another, and their volume.

Does not import torch.

>>> from shardwright.core.layout.layout import DeviceMatrix
>>> layout = DeviceMatrix((2, 4), ("dp", "mp"))
>>> print(redistribution(layout("mp", "None"), layout("None", "mp"), (8, 8)))
(mp, None) on (dp 2, mp 4) -> (None, mp) on (dp 2, mp 4), shape (8, 8)
  all_to_all mp, dimension 0 to 1: 48 bytes forward, 48 backward (all_to_all)

The communication volume of each kind of step is defined in `core/layout/collective_spec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, islice

from shardwright.core.layout import route_search
from shardwright.core.layout.axes import (
    Shape,
    axis_names,
    common_axes,
)
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.core.layout.route_translation import RouteTranslation, convert_move_to_step
from shardwright.errors import LayoutError


@dataclass(frozen=True)
class Redistribution:
    """The steps from one layout of a tensor to another, with their communication volume.

    Args:
        shape: global shape of the tensor.
        itemsize: bytes per element.
    """

    source: TensorLayout
    target: TensorLayout
    shape: Shape
    itemsize: int
    steps: tuple[RedistributionStep, ...]

    @cached_property
    def forward_bytes(self) -> int:
        return sum(step.forward_bytes(self.shape, self.itemsize) for step in self.steps)

    @cached_property
    def backward_bytes(self) -> int:
        return sum(step.backward_bytes(self.shape, self.itemsize) for step in self.steps)

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}, shape {self.shape}"]
        for step in self.steps:
            forward = step.forward_bytes(self.shape, self.itemsize)
            backward = step.backward_bytes(self.shape, self.itemsize)
            collective = f" ({step.backward})" if step.backward else ""
            lines.append(f"  {step}: {forward} bytes forward, {backward} backward{collective}")
        return "\n".join(lines if self.steps else [*lines, "  nothing to do"])


def redistribution(
    source: TensorLayout,
    target: TensorLayout,
    shape: Shape,
    itemsize: int = 4,
    differentiable: bool = True,
) -> Redistribution:
    """Find the cheapest redistribution of a tensor.

    Layouts on different device matrices are refined to the common axes of both.

    Args:
        source, target: the layouts before and after.
        shape: global shape of the tensor.
        itemsize: bytes per element.
        differentiable: whether the cost includes the volume of the backward pass.

    Raises:
        LayoutError: if the device matrices have no common axes, or no redistribution exists (see
            `redistribution_steps`).
    """
    mesh = source.layout
    if target.layout != mesh:
        sizes = common_axes(mesh.device_matrix, target.layout.device_matrix)
        # In the order of the source's ranks; `on` raises if no axes express the target in this
        # order.
        common = DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))), mesh.rank_list)
        source, target = source.on(common), target.on(common)
    steps = redistribution_steps(source, target, shape, differentiable)
    return Redistribution(source, target, shape, itemsize, steps)


@lru_cache(maxsize=1 << 17)
def redistribution_steps(
    source: TensorLayout, target: TensorLayout, shape: Shape, differentiable: bool = True
) -> tuple[RedistributionStep, ...]:
    """Find the cheapest steps that redistribute a tensor of `shape` from `source` to `target`.

    The cost is the bytes sent in both passes (in the forward pass if not `differentiable`), then
    the number of steps. Ties go to slices first and gathers last, and to outer axes before inner
    axes.

    If the layouts differ in at most three axes, the result is optimal among all steps over these
    axes and the dimensions that differ. Otherwise it is a heuristic that costs at most as much as
    all-reduce, all-gather and slice. If not `differentiable`, varying axes of the target are
    treated as replicated.

    Raises:
        LayoutError: if the layouts have different device matrices or numbers of dimensions, do not
            divide `shape`, the source is varying, or the target is partial over axes over which the
            source is not.
    """
    # Varying differs from replicated in the gradient only.
    if not differentiable and target.varying:
        target = replace(target, varying=frozenset())
    _check_redistribution_exists(source, target, shape)
    if source == target:
        return ()
    translation = RouteTranslation.of(source, target)
    problem = translation.problem(source, target, shape, differentiable)
    steps, current = [], source
    for move in route_search.route(problem):
        following = translation.layout_after(current, move)
        steps.append(convert_move_to_step(move, translation, current, following))
        current = following
    return tuple(_order_by_link_speed(steps))


def joined_step(
    first: RedistributionStep, second: RedistributionStep, shape: Shape, itemsize: int
) -> RedistributionStep | None:
    """Return one step that replaces two consecutive steps and sends at most as many bytes.

    Returns None if there is no such step.

    Args:
        shape: global shape of the tensor.
        itemsize: bytes per element.
    """
    for spec in COLLECTIVES.values():
        if spec.axes_between is None or not first.operation == second.operation == spec.joins:
            continue
        # From the first source to the last target: no value is read in the layout in between.
        axes = spec.axes_between(first.source, second.target)
        if axes is None:
            continue
        step = RedistributionStep(spec.name, axes, None, None, first.source, second.target)
        forward = sum(s.forward_bytes(shape, itemsize) for s in (first, second))
        backward = sum(s.backward_bytes(shape, itemsize) for s in (first, second))
        # Equal volume suffices: one step has the latency of one collective instead of two.
        if (
            step.forward_bytes(shape, itemsize) <= forward
            and step.backward_bytes(shape, itemsize) <= backward
        ):
            return step
    return None


def _order_by_link_speed(path: list[RedistributionStep]) -> list[RedistributionStep]:
    """Order consecutive all-gathers from outer to inner axes, reduce-scatters from inner to outer.

    The steps over outer axes, which have slower links, then send the fewest bytes. The order does
    not change the total bytes of steps that have the same collective in the backward pass.
    """
    ordered: list[RedistributionStep] = []
    # Steps with other gradients keep their place, or the backward pass would send more.
    for (operation, _), group in groupby(path, key=lambda step: (step.operation, step.backward)):
        steps = list(group)
        gathers_or_scatters = operation in ("all_gather", "reduce_scatter")
        # Two steps on one dimension have a fixed order: only its last axes can be gathered.
        if not gathers_or_scatters or len({s.dim for s in steps}) < len(steps):
            ordered += steps
            continue
        layout = steps[0].source
        # The smallest index is the outermost axis, which has the slowest links.
        for step in sorted(steps, key=lambda s: min(s.axes), reverse=operation == "reduce_scatter"):
            ordered.append(_replace_source_layout(step, layout))
            layout = ordered[-1].target
    return ordered


def _replace_source_layout(step: RedistributionStep, source: TensorLayout) -> RedistributionStep:
    """Return `step` on another source layout; its target layout changes accordingly."""
    axes = tuple(
        step.target.axes[dim] if dim == step.dim else dim_axes
        for dim, dim_axes in enumerate(source.axes)
    )
    # Only the changes of this step: in the new order, other steps precede it.
    partial = source.partial - (step.source.partial - step.target.partial)
    varying = source.varying | (step.target.varying - step.source.varying)
    target = TensorLayout(source.layout, axes, partial, varying)
    return replace(step, source=source, target=target)


def _check_redistribution_exists(source: TensorLayout, target: TensorLayout, shape: Shape) -> None:
    """Raise LayoutError if no steps lead from `source` to `target`."""
    if source.layout != target.layout:
        raise LayoutError(
            f"{source} and {target} are on different device matrices\n"
            "express both on the same device matrix with `TensorLayout.on()`"
        )
    # Both raise if the layout does not divide the shape.
    source.shard_shape(shape)
    target.shard_shape(shape)
    if source.varying:
        raise LayoutError(
            f"{source} is varying, but only the target of a redistribution can be varying\n"
            "remove `varying` from the source"
        )
    if not target.partial <= source.partial:
        raise LayoutError(
            f"{target} is partial over axes over which {source} is not, but no redistribution"
            " creates partial sums\nremove these axes from `partial` of the target"
        )
