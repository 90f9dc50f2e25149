"""Parses an operator's strategy into cuts of its factors, with every check that needs shapes.

Shard counts take the axes of the device matrix from the outermost inwards, in the order in which
the factors first appear: on 8 = 2·2·2 devices `((2, 4), (1, 4))` of a linear layer cuts factor b
over axis a, and factor k over axes b and c. Over axes that no count takes the computation is
replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from math import gcd, prod

import torch

from shardwright.core.constraints.corrections import with_equal_counts
from shardwright.core.constraints.strategy import Entry, OperatorStrategy, entry_text
from shardwright.core.graph.graph import Op, target_name
from shardwright.core.layout.axes import Axes, axis_names, common_axes, prime_factors
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.rules import ShardingRule, rule_of
from shardwright.errors import LayoutError, StrategyError

aten = torch.ops.aten


@dataclass(frozen=True)
class _DimRequest:
    """The shards that one dimension of an input requests of its factor; `input` is None for an
    output."""

    input: int | None
    dim: int
    num_shards: int
    axes: Axes | None

    @property
    def location(self) -> str:
        tensor = "the output" if self.input is None else f"input {self.input}"
        return f"dimension {self.dim} of {tensor}"


class _ConflictError(Exception):
    """A factor, and two dimensions that request other shards of it."""


@dataclass(frozen=True)
class StrategyParser:
    """Parses the strategy of one operator on one device matrix."""

    op: Op
    strategy: OperatorStrategy
    mesh: DeviceMatrix

    def error(self, why: str) -> StrategyError:
        """An error that names operator, shapes and strategy."""
        return StrategyError(
            f"{self.op.name}: strategy {self.strategy} for {op_signature(self.op)}: {why}"
        )

    @property
    def rule(self) -> ShardingRule:
        rule = rule_of(self.op)
        if rule is None:
            raise self.error("the operator has no sharding rule, so every device computes it whole")
        return rule

    def cuts(self) -> dict[str, Axes]:
        """The axes that cut each factor.

        Raises:
            StrategyError: if the operator cannot be sharded like this; the message says what is
                valid.
        """
        try:
            return self._axes(self._of_factors())
        except _ConflictError as conflict:
            raise self._disagreement(*conflict.args) from None

    def _of_factors(self) -> dict[str, _DimRequest]:
        """What is requested of each factor.

        Raises:
            _ConflictError: if two dimensions do not agree.
            StrategyError: as `cuts`.
        """
        requests: dict[str, _DimRequest] = {}
        for request, factor in self._requests():
            first = requests.setdefault(factor, request)
            if not _agree(first, request):
                raise _ConflictError(factor, first, request)
            if first.axes is None:
                requests[factor] = replace(first, axes=request.axes)
        requests = self._apart(requests)
        self._check_total(requests)
        return requests

    def _apart(self, requests: Mapping[str, _DimRequest]) -> dict[str, _DimRequest]:
        """What is left to a factor that cuts further what another one cuts that is joined with it.

        Raises:
            _ConflictError: if the other one is to cut its own dimensions otherwise.
        """
        left = dict(requests)
        for factor, other in self.rule.joined.items():
            own, both = left.get(factor), left.get(other)
            if own is not None and both is not None:
                parts = self._further(own, both)
                if parts is None:
                    raise _ConflictError(factor, both, own)
                left[factor], left[other] = parts
        return left

    def _further(
        self, own: _DimRequest, both: _DimRequest
    ) -> tuple[_DimRequest, _DimRequest] | None:
        """The shards of a factor's own dimensions, and those of another one that cuts further what
        the two cut together; None if these are cut otherwise."""
        if both.num_shards % own.num_shards:
            return None
        rest = replace(both, num_shards=both.num_shards // own.num_shards)
        if both.axes is None:
            return own, rest
        lengths = range(len(both.axes) + 1)
        first = next((n for n in lengths if self.mesh.size(both.axes[:n]) == own.num_shards), 0)
        axes, others = both.axes[:first], both.axes[first:]
        if self.mesh.size(axes) != own.num_shards or own.axes not in (None, axes):
            return None
        return replace(own, axes=axes), replace(rest, axes=others)

    def named(self, axes: Iterable[int]) -> str:
        """Axes of the mesh, as the strategy's layouts call those that they are of; nothing if it
        has none."""
        names: dict[int, str] = {}
        for own in (layout.layout for layout in self.strategy.layouts):
            each = TensorLayout(own, tuple((axis,) for axis in range(len(own.device_matrix))))
            pieces = axes_on_mesh(self.op.name, each, self.mesh)
            for name, piece in zip(own.alias_names, pieces, strict=True):
                names = dict.fromkeys(piece, name) | names
        return "·".join(dict.fromkeys(names[axis] for axis in axes if axis in names))

    def _requests(self) -> Iterator[tuple[_DimRequest, str]]:
        op, inputs = self.op, self.strategy.inputs
        dims_of = self.rule.inputs
        if len(inputs) != len(op.inputs):
            bias = "; the bias is added by a separate operator that follows"
            raise self.error(
                f"{len(inputs)} entries for {len(op.inputs)} tensor inputs"
                + (bias if op.target in _OPS_WITH_BIAS else "")
            )
        for index, (entry, value) in enumerate(zip(inputs, op.inputs, strict=True)):
            if entry is None:
                continue
            counts, axes = self._shard_counts(f"input {index}", entry, value.shape)
            for dim, factor in enumerate(dims_of[index]):
                request = _DimRequest(index, dim, counts[dim], None if axes is None else axes[dim])
                self._check_dimension(request, factor)
                if factor is not None and factor in self.rule.factors:
                    yield request, factor
        yield from self._output_requests()

    def _output_requests(self) -> Iterator[tuple[_DimRequest, str]]:
        """The requests of outputs for factors that no input carries, such as those of `expand`."""
        carried = {factor for dims in self.rule.inputs for factor in dims}
        entries, values = self.strategy.outputs or (), self.op.outputs
        for index, (entry, value) in enumerate(zip(entries, values, strict=False)):
            dims = self.rule.outputs[index]
            if entry is None or carried.issuperset(dims):
                continue
            counts, axes = self._shard_counts(f"output {index}", entry, value.shape)
            for dim, factor in enumerate(dims):
                if factor is not None and factor in self.rule.factors and factor not in carried:
                    request = _DimRequest(
                        None, dim, counts[dim], None if axes is None else axes[dim]
                    )
                    self._check_dimension(request, factor)
                    yield request, factor

    def _shard_counts(
        self, tensor: str, entry: tuple[int, ...] | TensorLayout, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[Axes, ...] | None]:
        """The shard count of each dimension, and the axes that cut it if the entry is a layout."""
        axes = None
        if isinstance(entry, TensorLayout):
            axes = axes_on_mesh(self.op.name, entry, self.mesh)
        counts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
        if len(counts) != len(shape):
            raise self.error(
                f"{tensor} {list(shape)} has {len(shape)} dimensions, but {entry_text(entry)} has"
                f" {len(counts)}"
            )
        for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
            if size % count:
                raise self.error(
                    f"dimension {dim} of {tensor} has size {size}, which is not divisible into"
                    f" {count} shards; valid are {divisors(size, self.mesh.num_devices)}"
                )
        return counts, axes

    def _check_dimension(self, request: _DimRequest, factor: str | None) -> None:
        if request.num_shards == 1:
            return
        location = request.location
        if factor is None or factor not in self.rule.factors:
            raise self.error(f"{location} cannot be sharded (rule: {self.rule}); valid is 1")
        capacity = self.rule.capacity[factor]
        if capacity % request.num_shards:
            raise self.error(
                f"the number of shards of {location} must divide {capacity}, because the operator"
                f" splits or merges it; valid are {divisors(capacity, self.mesh.num_devices)}"
            )

    def _disagreement(self, factor: str, first: _DimRequest, second: _DimRequest) -> StrategyError:
        def describe(request: _DimRequest) -> str:
            over = ""
            if request.axes and first.num_shards == second.num_shards:
                over = f" over {self.named(request.axes)}"
            return f"{request.location} has {_shards(request.num_shards)}{over}"

        hint = ""
        if self.op.target is aten.linear.default:
            hint = "; the weight of nn.Linear is stored as (out_features, in_features)"
        valid = next((f"; valid is {s}" for s in self._corrections(first, second)), "")
        return self.error(
            f"conflicting shard counts for factor {factor} of {self.rule}: {describe(first)},"
            f" {describe(second)}{hint}{valid}"
        )

    def _corrections(self, first: _DimRequest, second: _DimRequest) -> Iterator[OperatorStrategy]:
        """Valid strategies, first those that differ from the given one in a single entry."""
        equal = with_equal_counts(self.rule, self.strategy.inputs, self.mesh.num_devices)
        nearest = chain(self._with_another_entry(first, second), equal)
        return (strategy for strategy in nearest if self._is_valid(strategy))

    def _with_another_entry(
        self, first: _DimRequest, second: _DimRequest
    ) -> Iterator[OperatorStrategy]:
        inputs = self.strategy.inputs
        candidates: list[tuple[int, Entry]] = []
        weight = inputs[-1]
        if self.op.target is aten.linear.default and isinstance(weight, tuple):
            candidates.append((len(inputs) - 1, weight[::-1]))
        for request, num_shards in ((second, first.num_shards), (first, second.num_shards)):
            entry = None if request.input is None else inputs[request.input]
            if isinstance(entry, tuple) and request.input is not None:
                changed = (*entry[: request.dim], num_shards, *entry[request.dim + 1 :])
                candidates.append((request.input, changed))
        for index, entry in candidates:
            yield OperatorStrategy((*inputs[:index], entry, *inputs[index + 1 :]))

    def _is_valid(self, strategy: OperatorStrategy) -> bool:
        try:
            StrategyParser(self.op, strategy, self.mesh)._of_factors()
        except (_ConflictError, StrategyError):
            return False
        return True

    def _check_total(self, requests: Mapping[str, _DimRequest]) -> None:
        devices = self.mesh.num_devices
        total = prod(request.num_shards for request in requests.values())
        counts = {f: r.num_shards for f, r in requests.items() if r.num_shards > 1}
        product = " · ".join(f"{factor} {count}" for factor, count in counts.items())
        if total > devices:
            raise self.error(
                f"the operator would be cut into {total} shards ({product}), but there are only"
                f" {devices} devices"
            )
        if devices % total:
            raise self.error(
                f"the total number of shards, {total} ({product}), does not divide the {devices}"
                f" devices; valid totals are {divisors(devices, devices)}"
            )

    def _axes(self, requests: Mapping[str, _DimRequest]) -> dict[str, Axes]:
        """The axes of every factor: layouts keep theirs, counts share out those that remain."""
        used: dict[int, str] = {}
        for factor, request in requests.items():
            for axis in request.axes or ():
                if axis in used:
                    raise self.error(
                        f"{self.named([axis])} cuts both factor {used[axis]} and factor {factor} of"
                        f" {self.rule}; an axis can cut only one factor"
                    )
                used[axis] = factor
        free = [a for a in range(len(self.mesh.device_matrix)) if a not in used]
        cuts = {}
        for factor, request in requests.items():
            axes = request.axes
            if axes is None:
                axes = first_axes(request.num_shards, free, self.mesh)
            assert axes is not None, "the product of all divides the devices"
            if axes:
                cuts[factor] = axes
        return cuts


def _agree(one: _DimRequest, other: _DimRequest) -> bool:
    if one.axes is not None and other.axes is not None:
        return one.axes == other.axes
    return one.num_shards == other.num_shards


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"


_OPS_WITH_BIAS = tuple(
    getattr(aten, name).default for name in ("linear", "conv1d", "conv2d", "conv3d")
)


def op_signature(op: Op) -> str:
    """`aten.linear(x [8, 16], layer.weight [32, 16])`"""
    name = target_name(op.target).removesuffix(".default")
    return f"{name}({', '.join(f'{v.name} {list(v.shape)}' for v in op.inputs)})"


def divisors(number: int, limit: int) -> str:
    numbers = [str(n) for n in range(1, min(number, limit) + 1) if number % n == 0]
    return ", ".join(numbers)


def mesh_of(
    devices: int, layouts: Iterable[tuple[str, TensorLayout]], nodes: Iterable[int] = ()
) -> DeviceMatrix:
    """The device matrix of prime axes in which all `layouts` can be expressed.

    Args:
        layouts: each with the name of the operator or parameter that it is for.
        nodes: how many neighboring devices each level of links joins, ascending. As many as divide
            `devices` too make up the innermost axes, as far as the layouts allow it, so that these
            cross no node: 24 devices of 8 a node are (3, 2, 2, 2).

    Raises:
        LayoutError: if a layout has another number of devices, or no device matrix can express all.
    """
    named = list(layouts)
    for where, layout in named:
        if sorted(layout.layout.ranks) != list(range(devices)):
            matrix = layout.device_matrix
            raise LayoutError(
                f"{where}: the device matrix {matrix} of the layout {layout} has"
                f" {prod(matrix)} devices (ranks {min(layout.layout.ranks)} to"
                f" {max(layout.layout.ranks)}), but the plan is for {devices} (ranks 0 to"
                f" {devices - 1}); use a device matrix whose product is {devices}"
            )
    plain = {layout.device_matrix: where for where, layout in named if not layout.layout.rank_list}
    matrices = [(devices,), *plain]
    try:
        sizes = common_axes(*matrices)
    except LayoutError as error:
        users = ", ".join(f"{where} {matrix}" for matrix, where in plain.items())
        raise LayoutError(f"{error}; used by {users}") from None
    for node in nodes:
        together = gcd(devices, node)
        with suppress(LayoutError):
            sizes = common_axes(*matrices, (devices // together, together))
            matrices.append((devices // together, together))
    mesh = _mesh(sizes)
    for where, layout in named:
        axes_on_mesh(where, layout, mesh)
    return mesh


def axes_on_mesh(where: str, layout: TensorLayout, mesh: DeviceMatrix) -> tuple[Axes, ...]:
    """The axes of `mesh` that cut each dimension of `layout`.

    Raises:
        LayoutError: if the axes of the layout are not products of axes of `mesh`.
    """
    try:
        return layout.on(mesh).axes
    except LayoutError as error:
        raise LayoutError(f"{where}: cannot use the layout {layout}: {error}") from None


def first_axes(num_shards: int, free: list[int], mesh: DeviceMatrix) -> Axes | None:
    """Removes from `free` the outermost axes whose sizes multiply to `num_shards`.

    Returns:
        The axes in ascending order; None if `free` has no such axes.
    """
    chosen = []
    if mesh.num_devices % num_shards:
        return None
    for prime in prime_factors(num_shards):
        axis = next((a for a in free if mesh.device_matrix[a] == prime), None)
        if axis is None:
            return None
        free.remove(axis)
        chosen.append(axis)
    return tuple(sorted(chosen))


@cache
def _mesh(sizes: tuple[int, ...]) -> DeviceMatrix:
    """Equal device matrices are one object: what is compared very often is the same then."""
    return DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))))
