"""From a strategy to cuts of the operator's factors, with every check that needs shapes.

Counts take the axes of the device matrix from the outermost on, in the order in which factors first
appear: on 8 = 2·2·2 devices `((2, 4), (1, 4))` of a linear layer cuts b over axis a, and k over b
and c. Devices that no count takes repeat the computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

import torch

from shardwright.constraints.strategy import Entry, OperatorStrategy, entry_text
from shardwright.errors import LayoutError, StrategyError
from shardwright.graph.graph import Op, target_name
from shardwright.layout.axes import Axes, axis_names, common_axes, prime_factors
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.rules import ShardingRule, rule_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _DimRequest:
    """What one dimension of one input says of its factor; of an output where `input` is None."""

    input: int | None
    dim: int
    parts: int
    axes: Axes | None

    @property
    def where(self) -> str:
        tensor = "the output" if self.input is None else f"input {self.input}"
        return f"dimension {self.dim} of {tensor}"


@dataclass(frozen=True)
class Reading:
    """A strategy read as one of a certain operator, on a certain device matrix."""

    op: Op
    strategy: OperatorStrategy
    mesh: Layout

    def error(self, why: str) -> StrategyError:
        """An error that names operator, shapes and strategy."""
        return StrategyError(
            f"{self.op.name}: strategy {self.strategy} for {signature(self.op)}: {why}"
        )

    @property
    def rule(self) -> ShardingRule:
        found = rule_of(self.op)
        if found is None:
            raise self.error("the operator has no sharding rule, every device computes it whole")
        return found

    def cuts(self) -> dict[str, Axes]:
        """Factor → the axes that cut it.

        Raises:
            StrategyError: if the operator cannot be cut so; says what is valid.
        """
        found: dict[str, _DimRequest] = {}
        for said, factor in self._said():
            before = found.setdefault(factor, said)
            if not _agree(before, said):
                raise self._disagreement(factor, before, said)
            if before.axes is None:
                found[factor] = replace(before, axes=said.axes)
        self._check_total(found)
        return self._axes(found)

    def _said(self) -> Iterator[tuple[_DimRequest, str]]:
        op, inputs = self.op, self.strategy.inputs
        dims_of = self.rule.inputs
        if len(inputs) != len(op.inputs):
            bias = "; a bias is added by an operator of its own, which follows"
            raise self.error(
                f"{len(inputs)} entries for {len(op.inputs)} tensor inputs"
                + (bias if op.target in _BIASED else "")
            )
        for index, (entry, value) in enumerate(zip(inputs, op.inputs, strict=True)):
            if entry is None:
                continue
            parts, axes = self._parts(f"input {index}", entry, value.shape)
            for dim, factor in enumerate(dims_of[index]):
                said = _DimRequest(index, dim, parts[dim], None if axes is None else axes[dim])
                self._check_dimension(said, factor)
                if factor is not None and factor in self.rule.factors:
                    yield said, factor
        yield from self._said_of_outputs()

    def _said_of_outputs(self) -> Iterator[tuple[_DimRequest, str]]:
        """What outputs say of factors that no input carries: those of `expand`."""
        carried = {factor for dims in self.rule.inputs for factor in dims}
        entries, values = self.strategy.outputs or (), self.op.outputs
        for index, (entry, value) in enumerate(zip(entries, values, strict=False)):
            dims = self.rule.outputs[index]
            if entry is None or carried.issuperset(dims):
                continue
            parts, axes = self._parts(f"output {index}", entry, value.shape)
            for dim, factor in enumerate(dims):
                if factor is not None and factor in self.rule.factors and factor not in carried:
                    said = _DimRequest(None, dim, parts[dim], None if axes is None else axes[dim])
                    self._check_dimension(said, factor)
                    yield said, factor

    def _parts(
        self, which: str, entry: tuple[int, ...] | TensorLayout, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[Axes, ...] | None]:
        """In how many parts each dimension is cut, and by which axes if a layout says it."""
        axes = None
        if isinstance(entry, TensorLayout):
            axes = placed(self.op.name, entry, self.mesh)
        parts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
        if len(parts) != len(shape):
            raise self.error(
                f"{which} has {len(shape)} dimensions, {list(shape)}, and"
                f" {entry_text(entry)} is for {len(parts)}"
            )
        for dim, (size, count) in enumerate(zip(shape, parts, strict=True)):
            if size % count:
                raise self.error(
                    f"dimension {dim} of {which} has size {size}, which {count} equal parts do not"
                    f" divide; valid are {divisors(size, self.mesh.num_devices)}"
                )
        return parts, axes

    def _check_dimension(self, said: _DimRequest, factor: str | None) -> None:
        if said.parts == 1:
            return
        which = said.where
        if factor is None or factor not in self.rule.factors:
            raise self.error(f"{which} must stay whole; rule: {self.rule}; valid is 1")
        capacity = self.rule.capacity[factor]
        if capacity % said.parts:
            raise self.error(
                f"{which} can be cut in parts that divide {capacity} only, as the operator joins"
                f" or splits it; valid are {divisors(capacity, self.mesh.num_devices)}"
            )

    def _disagreement(self, factor: str, first: _DimRequest, second: _DimRequest) -> StrategyError:
        def where(said: _DimRequest) -> str:
            over = ""
            if said.axes and first.parts == second.parts:
                over = f" over axes {''.join(self.mesh.alias_names[a] for a in said.axes)}"
            return f"{said.where} in {said.parts}{over}"

        hint = ""
        if self.op.target is aten.linear.default:
            hint = "; the weight of nn.Linear is stored as (out_features, in_features)"
        valid = next((f"; valid is {s}" for s in self._corrected(first, second)), "")
        return self.error(
            f"factor {factor} of {self.rule} is cut differently: {where(first)},"
            f" {where(second)}{hint}{valid}"
        )

    def _corrected(self, first: _DimRequest, second: _DimRequest) -> Iterator[OperatorStrategy]:
        """Strategies near the one that was given that can be."""
        inputs = self.strategy.inputs
        candidates: list[tuple[int, Entry]] = []
        weight = inputs[-1]
        if self.op.target is aten.linear.default and isinstance(weight, tuple):
            candidates.append((len(inputs) - 1, weight[::-1]))
        for said, parts in ((second, first.parts), (first, second.parts)):
            entry = None if said.input is None else inputs[said.input]
            if isinstance(entry, tuple) and said.input is not None:
                changed = (*entry[: said.dim], parts, *entry[said.dim + 1 :])
                candidates.append((said.input, changed))
        for index, entry in candidates:
            strategy = OperatorStrategy((*inputs[:index], entry, *inputs[index + 1 :]))
            if self._is_valid(strategy):
                yield strategy

    def _is_valid(self, strategy: OperatorStrategy) -> bool:
        reading = Reading(self.op, strategy, self.mesh)
        found: dict[str, _DimRequest] = {}
        try:
            agree = all(_agree(found.setdefault(f, said), said) for said, f in reading._said())
            if agree:
                reading._check_total(found)
        except StrategyError:
            return False
        return agree

    def _check_total(self, found: Mapping[str, _DimRequest]) -> None:
        devices = self.mesh.num_devices
        total = prod(said.parts for said in found.values())
        product = " · ".join(f"{f} {said.parts}" for f, said in found.items() if said.parts > 1)
        if total > devices:
            raise self.error(f"{total} parts ({product}) are more than {devices} devices")
        if devices % total:
            raise self.error(
                f"{total} parts ({product}) do not divide {devices} devices; valid are"
                f" {divisors(devices, devices)} parts in all"
            )

    def _axes(self, found: Mapping[str, _DimRequest]) -> dict[str, Axes]:
        """The axes of every factor: those of layouts as they are, then those of counts."""
        used: dict[int, str] = {}
        for factor, said in found.items():
            for axis in said.axes or ():
                if axis in used:
                    raise self.error(
                        f"axis {self.mesh.alias_names[axis]} of the device matrix"
                        f" {self.mesh.device_matrix} cuts two factors, {used[axis]} and {factor},"
                        f" of {self.rule}; every axis may cut one"
                    )
                used[axis] = factor
        free = [a for a in range(len(self.mesh.device_matrix)) if a not in used]
        cuts = {}
        for factor, said in found.items():
            axes = said.axes if said.axes is not None else first_axes(said.parts, free, self.mesh)
            if axes is None:
                raise self.error(
                    f"no axes of the device matrix {self.mesh.device_matrix} are left that cut"
                    f" {factor} in {said.parts}"
                )
            if axes:
                cuts[factor] = axes
        return cuts


def _agree(one: _DimRequest, other: _DimRequest) -> bool:
    if one.axes is not None and other.axes is not None:
        return one.axes == other.axes
    return one.parts == other.parts


_BIASED = (
    aten.linear.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
)


def signature(op: Op) -> str:
    """`aten.linear(x [8, 16], layer.weight [32, 16])`"""
    name = target_name(op.target).removesuffix(".default")
    return f"{name}({', '.join(f'{v.name} {list(v.shape)}' for v in op.inputs)})"


def divisors(number: int, most: int) -> str:
    found = [str(n) for n in range(1, min(number, most) + 1) if number % n == 0]
    return ", ".join(found)


def mesh_of(devices: int, layouts: Iterable[tuple[str, TensorLayout]]) -> Layout:
    """The device matrix of prime axes in which all `layouts` can be expressed.

    Args:
        layouts: each with the name of what it is said of.

    Raises:
        LayoutError: if one is of another number of devices, or they have no axes in common.
    """
    said = list(layouts)
    for where, layout in said:
        if sorted(layout.layout.ranks) != list(range(devices)):
            matrix = layout.device_matrix
            raise LayoutError(
                f"{where}: the device matrix {matrix} of the layout {layout} is of"
                f" {prod(matrix)} devices (ranks {min(layout.layout.ranks)} to"
                f" {max(layout.layout.ranks)}), the plan is for {devices} (ranks 0 to"
                f" {devices - 1}); valid is a device matrix whose product is {devices}"
            )
    plain = {layout.device_matrix: where for where, layout in said if not layout.layout.rank_list}
    try:
        sizes = common_axes((devices,), *plain)
    except LayoutError as error:
        users = ", ".join(f"{where} {matrix}" for matrix, where in plain.items())
        raise LayoutError(f"{error}; they are pinned at {users}") from None
    mesh = Layout(sizes, tuple(islice(axis_names(), len(sizes))))
    for where, layout in said:
        placed(where, layout, mesh)
    return mesh


def placed(where: str, layout: TensorLayout, mesh: Layout) -> tuple[Axes, ...]:
    """The axes of `mesh` that cut each dimension.

    Raises:
        LayoutError: if `mesh` has no axes that make up those of the layout.
    """
    try:
        return layout.on(mesh).axes
    except LayoutError as error:
        raise LayoutError(f"{where}: the layout {layout} cannot be used: {error}") from None


def first_axes(parts: int, free: list[int], mesh: Layout) -> Axes | None:
    """Takes the outermost `free` axes whose sizes make up `parts`; None if there are none."""
    taken = []
    for prime in prime_factors(parts):
        axis = next((a for a in free if mesh.device_matrix[a] == prime), None)
        if axis is None:
            return None
        free.remove(axis)
        taken.append(axis)
    return tuple(sorted(taken))
