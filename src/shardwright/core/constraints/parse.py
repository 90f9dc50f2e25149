"""Parse an operator's strategy into the mesh axes of each factor, and check it against shapes.

Shard counts take the axes of the device matrix from the outermost inwards, in the order in which
the factors first appear: on 8 = 2·2·2 devices `((2, 4), (1, 4))` of a linear layer shards factor b
over axis a, and factor k over axes b and c. The computation is replicated over the remaining axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

import torch

from shardwright.core.constraints.corrections import strategies_with_equal_counts
from shardwright.core.constraints.device_matrix import axes_on_mesh, take_outer_axes
from shardwright.core.constraints.strategy import Entry, OperatorStrategy, entry_text
from shardwright.core.graph.custom_ops import padded_convolution
from shardwright.core.graph.graph import Op, target_name
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.rules import ShardingRule, rule_of
from shardwright.errors import StrategyError

aten = torch.ops.aten


@dataclass(frozen=True)
class _DimRequest:
    """Requested sharding of one dimension of a tensor, and hence of the dimension's factor.

    Args:
        input: index of the input; None for an output.
        dim: index of the dimension.
        num_shards: requested number of shards.
        axes: requested mesh axes; None if the entry is not a layout.
    """

    input: int | None
    dim: int
    num_shards: int
    axes: Axes | None

    @property
    def location(self) -> str:
        tensor = "the output" if self.input is None else f"input {self.input}"
        return f"dimension {self.dim} of {tensor}"


# Has no message of its own: the message proposes a valid strategy, and the search for one parses
# strategies whose conflicts must not search in turn.
class _ConflictError(Exception):
    """Raised if two dimensions request different shardings of one factor.

    The exception's arguments are the factor and the two `_DimRequest`s.
    """


@dataclass(frozen=True)
class StrategyParser:
    """Parser of the strategy of one operator on one device matrix."""

    op: Op
    strategy: OperatorStrategy
    mesh: DeviceMatrix

    def error(self, reason: str) -> StrategyError:
        """Return an error with the operator, its shapes, the strategy and a reason."""
        return StrategyError(
            f"{self.op.name}: strategy {self.strategy} for {op_signature(self.op)}: {reason}"
        )

    @property
    def rule(self) -> ShardingRule:
        rule = rule_of(self.op)
        if rule is None:
            raise self.error(
                "the operator has no sharding rule, so it is replicated\n"
                "remove the strategy, or register a rule with `sw.rules.register`"
            )
        return rule

    def cuts(self) -> dict[str, Axes]:
        """Return the mesh axes that shard each factor; replicated factors are missing.

        Raises:
            StrategyError: if the operator cannot be sharded as requested; the message has the valid
                values.
        """
        try:
            return self._assign_axes_to_factors(self._merge_requests_by_factor())
        except _ConflictError as conflict:
            raise self._make_conflict_error(*conflict.args) from None

    def _merge_requests_by_factor(self) -> dict[str, _DimRequest]:
        """Combine the requests of all tensor dimensions with the same factor; return one request
        per factor.

        Raises:
            _ConflictError: if two dimensions with the same factor request different shardings.
            StrategyError: if a single entry, or the total number of shards, is invalid.
        """
        requests: dict[str, _DimRequest] = {}
        for request, factor in self._iterate_dim_requests():
            first = requests.setdefault(factor, request)
            if not _are_compatible_requests(first, request):
                raise _ConflictError(factor, first, request)
            # A layout gives the axes that a shard count of the same factor leaves open.
            if first.axes is None:
                requests[factor] = replace(first, axes=request.axes)
        # Split first: a joint request counts the shards of both factors, which the total counts
        # once.
        requests = self._split_joined_requests(requests)
        self._check_total_shards(requests)
        return requests

    def _split_joined_requests(self, requests: Mapping[str, _DimRequest]) -> dict[str, _DimRequest]:
        """Return `requests` with each request for a dimension of two joined factors split into one
        request per factor.

        In attention, `ring` shards the keys and the queries, and `s` shards the queries further: 8
        shards of the queries and 4 of the keys mean 4 shards of `ring` and 2 of `s`.

        Raises:
            _ConflictError: if the shards of the joint dimension do not subdivide the shards of the
                outer factor.
        """
        split = dict(requests)
        for outer, inner in self.rule.joined.items():
            outer_request, joint_request = split.get(outer), split.get(inner)
            if outer_request is not None and joint_request is not None:
                split_requests = self._split_joint_request(outer_request, joint_request)
                if split_requests is None:
                    raise _ConflictError(outer, joint_request, outer_request)
                split[outer], split[inner] = split_requests
        return split

    def _split_joint_request(
        self, outer: _DimRequest, joint: _DimRequest
    ) -> tuple[_DimRequest, _DimRequest] | None:
        """Split the request for a dimension that two joined factors shard into one request per
        factor.

        Args:
            outer: request for a dimension that only the outer factor shards.
            joint: request for the dimension that both factors shard.

        Returns:
            (request for the outer factor, request for the inner factor); None if shard counts or
            axes conflict.
        """
        if joint.num_shards % outer.num_shards:
            return None
        inner = replace(joint, num_shards=joint.num_shards // outer.num_shards)
        if joint.axes is None:
            return outer, inner
        lengths = range(len(joint.axes) + 1)
        # The axes of the outer factor come first in the layout of a joint dimension.
        count = next((n for n in lengths if self.mesh.size(joint.axes[:n]) == outer.num_shards), 0)
        outer_axes, inner_axes = joint.axes[:count], joint.axes[count:]
        # No prefix of the axes may have the outer shard count, although it divides the joint one.
        if self.mesh.size(outer_axes) != outer.num_shards or outer.axes not in (None, outer_axes):
            return None
        return replace(outer, axes=outer_axes), replace(inner, axes=inner_axes)

    def user_axis_names(self, axes: Iterable[int]) -> str:
        """Return the names that the strategy's layouts give to `axes`, such as `dp·mp`; empty if no
        entry is a layout."""
        names: dict[int, str] = {}
        for matrix in (layout.layout for layout in self.strategy.layouts):
            single_axes = tuple((axis,) for axis in range(len(matrix.device_matrix)))
            pieces = axes_on_mesh(self.op.name, TensorLayout(matrix, single_axes), self.mesh)
            for name, piece in zip(matrix.alias_names, pieces, strict=True):
                # An axis keeps the name that the first layout gives it.
                names = dict.fromkeys(piece, name) | names
        return "·".join(dict.fromkeys(names[axis] for axis in axes if axis in names))

    def _iterate_dim_requests(self) -> Iterator[tuple[_DimRequest, str]]:
        """Yield (request, factor) for each dimension, inputs before outputs."""
        op, inputs = self.op, self.strategy.inputs
        dims_of = self.rule.inputs
        if isinstance(op.target, LocalCall):
            # The parameters and buffers of a `local_map` are replicated where they are used.
            inputs = (*inputs, *(None,) * len(op.inputs[len(op.target.declaration.inputs) :]))
        if len(inputs) > len(op.inputs):
            # Capture turns tensors without dimensions that no argument determines into numbers.
            inputs = tuple(entry for entry in inputs if entry != ())
        if len(inputs) != len(op.inputs):
            # Capture adds the bias in a separate operator: it must be added after a partial sum.
            hint = "use one entry per tensor input"
            if op.target in OPS_WITH_BIAS:
                hint = "give no entry for the bias: a separate operator adds it, sharded to match"
            raise self.error(
                f"the strategy has {len(inputs)} entries for {len(op.inputs)} tensor inputs\n{hint}"
            )
        for index, (entry, value) in enumerate(zip(inputs, op.inputs, strict=True)):
            if entry is None:
                continue
            counts, axes = self._parse_entry(f"input {index}", entry, value.shape)
            for dim, factor in enumerate(dims_of[index]):
                request = _DimRequest(index, dim, counts[dim], None if axes is None else axes[dim])
                self._check_dimension(request, factor)
                if factor is not None and factor in self.rule.factors:
                    yield request, factor
        yield from self._iterate_output_requests()

    def _iterate_output_requests(self) -> Iterator[tuple[_DimRequest, str]]:
        """Yield (request, factor) for each output dimension whose factor no input has, such as the
        new dimensions of `expand`."""
        input_factors = {factor for dims in self.rule.inputs for factor in dims}
        entries, values = self.strategy.outputs or (), self.op.outputs
        # Not strict: `requested_outputs` checks the number of entries.
        for index, (entry, value) in enumerate(zip(entries, values, strict=False)):
            dims = self.rule.outputs[index]
            # The entries of the inputs already shard such an output.
            if entry is None or input_factors.issuperset(dims):
                continue
            counts, axes = self._parse_entry(f"output {index}", entry, value.shape)
            for dim, factor in enumerate(dims):
                if (
                    factor is not None
                    and factor in self.rule.factors
                    and factor not in input_factors
                ):
                    request = _DimRequest(
                        None, dim, counts[dim], None if axes is None else axes[dim]
                    )
                    self._check_dimension(request, factor)
                    yield request, factor

    def _parse_entry(
        self, tensor: str, entry: tuple[int, ...] | TensorLayout, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[Axes, ...] | None]:
        """Return (shard count of each dimension, mesh axes of each dimension); the axes are None
        unless the entry is a layout.

        Args:
            tensor: name of the tensor in errors, such as `input 0`.
        """
        axes = None
        if isinstance(entry, TensorLayout):
            axes = axes_on_mesh(self.op.name, entry, self.mesh)
        counts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
        if len(counts) != len(shape):
            raise self.error(
                f"{tensor} {list(shape)} has {len(shape)} dimensions, but {entry_text(entry)} has"
                f" {len(counts)}\nuse an entry with {len(shape)} dimensions"
            )
        for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
            if size % count:
                raise self.error(
                    f"dimension {dim} of {tensor} has size {size}, which is not divisible into"
                    f" {count} shards\n"
                    f"valid numbers of shards are {divisors_text(size, self.mesh.num_devices)}"
                )
        return counts, axes

    def _check_dimension(self, request: _DimRequest, factor: str | None) -> None:
        # A dimension without a factor may be named in an entry, with one shard.
        if request.num_shards == 1:
            return
        location = request.location
        if factor is None or factor not in self.rule.factors:
            raise self.error(
                f"{location} cannot be sharded (sharding rule: `{self.rule}`)\nuse 1, the only"
                " valid number of shards"
            )
        capacity = self.rule.capacity[factor]
        # Stricter than the size, which is checked already, where a view splits or merges the
        # dimension.
        if capacity % request.num_shards:
            raise self.error(
                f"the number of shards of {location} must divide {capacity}: the operator splits "
                "or merges this dimension, or a window would reach beyond the adjacent shard\n"
                f"valid numbers of shards are {divisors_text(capacity, self.mesh.num_devices)}"
            )

    def _make_conflict_error(
        self, factor: str, first: _DimRequest, second: _DimRequest
    ) -> StrategyError:
        """Return the error for two conflicting requests, with a valid strategy if one is found."""

        def describe(request: _DimRequest) -> str:
            over = ""
            # With equal numbers of shards the conflict is one of axes.
            if request.axes and first.num_shards == second.num_shards:
                over = f" over {self.user_axis_names(request.axes)}"
            return f"{request.location} has {_format_shard_count(request.num_shards)}{over}"

        hint = ""
        if self.op.target is aten.linear.default:
            hint = "; the weight of nn.Linear is stored as (out_features, in_features)"
        # The first candidate that parses; the generator parses no others.
        valid = next(
            (f"\na valid strategy is {s}" for s in self._iterate_valid_strategies(first, second)),
            "",
        )
        return self.error(
            f"conflicting shard counts for factor {factor!r} of `{self.rule}`: {describe(first)},"
            f" {describe(second)}{hint}{valid}"
        )

    def _iterate_valid_strategies(
        self, first: _DimRequest, second: _DimRequest
    ) -> Iterator[OperatorStrategy]:
        """Yield valid strategies without the conflict between two requests; strategies that change
        only one entry come first."""
        equal = strategies_with_equal_counts(self.rule, self.strategy.inputs, self.mesh.num_devices)
        candidates = chain(self._replace_one_shard_count(first, second), equal)
        return (strategy for strategy in candidates if self._is_valid_strategy(strategy))

    def _replace_one_shard_count(
        self, first: _DimRequest, second: _DimRequest
    ) -> Iterator[OperatorStrategy]:
        """Yield strategies with one of two conflicting shard counts replaced by the other."""
        inputs = self.strategy.inputs
        candidates: list[tuple[int, Entry]] = []
        weight = inputs[-1]
        # The most frequent mistake: the weight of nn.Linear given as (in_features, out_features).
        if self.op.target is aten.linear.default and isinstance(weight, tuple):
            candidates.append((len(inputs) - 1, weight[::-1]))
        for request, num_shards in ((second, first.num_shards), (first, second.num_shards)):
            entry = None if request.input is None else inputs[request.input]
            if isinstance(entry, tuple) and request.input is not None:
                changed = (*entry[: request.dim], num_shards, *entry[request.dim + 1 :])
                candidates.append((request.input, changed))
        for index, entry in candidates:
            yield OperatorStrategy((*inputs[:index], entry, *inputs[index + 1 :]))

    def _is_valid_strategy(self, strategy: OperatorStrategy) -> bool:
        try:
            StrategyParser(self.op, strategy, self.mesh)._merge_requests_by_factor()
        except (_ConflictError, StrategyError):
            return False
        return True

    def _check_total_shards(self, requests: Mapping[str, _DimRequest]) -> None:
        """Raise StrategyError unless the product of shard counts divides the number of devices."""
        devices = self.mesh.num_devices
        # Each factor has axes of its own, so the shard counts of factors multiply.
        total = prod(request.num_shards for request in requests.values())
        counts = {f: r.num_shards for f, r in requests.items() if r.num_shards > 1}
        product = " · ".join(f"{factor} {count}" for factor, count in counts.items())
        if total > devices:
            raise self.error(
                f"the operator would have {total} shards ({product}), but there are only {devices}"
                f" devices\nuse shard counts whose product divides {devices}"
            )
        # The axes of the device matrix have the prime factors of the devices as sizes, and only
        # products of axes are numbers of shards.
        if devices % total:
            raise self.error(
                f"the total number of shards, {total} ({product}), does not divide the {devices}"
                f" devices\nvalid total numbers of shards are {divisors_text(devices, devices)}"
            )

    def _assign_axes_to_factors(self, requests: Mapping[str, _DimRequest]) -> dict[str, Axes]:
        """Assign mesh axes to each factor; replicated factors are missing from the result."""
        used: dict[int, str] = {}
        for factor, request in requests.items():
            for axis in request.axes or ():
                if axis in used:
                    raise self.error(
                        f"axis {self.user_axis_names([axis])!r} shards both factor {used[axis]!r}"
                        f" and factor {factor!r} of `{self.rule}`\nuse another axis for one of the"
                        " two factors: an axis can shard only one"
                    )
                used[axis] = factor
        # Layouts have fixed axes; shard counts take the remaining axes, the outermost first.
        free = [a for a in range(len(self.mesh.device_matrix)) if a not in used]
        cuts = {}
        for factor, request in requests.items():
            axes = request.axes
            if axes is None:
                axes = take_outer_axes(request.num_shards, free, self.mesh)
            assert axes is not None, "the product of all shard counts divides the devices"
            if axes:
                cuts[factor] = axes
        return cuts


def _are_compatible_requests(first: _DimRequest, second: _DimRequest) -> bool:
    # Without two layouts only the numbers of shards can be compared; they do not name axes.
    if first.axes is not None and second.axes is not None:
        return first.axes == second.axes
    return first.num_shards == second.num_shards


def _format_shard_count(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"


OPS_WITH_BIAS = (
    *(getattr(aten, name).default for name in ("linear", "conv1d", "conv2d", "conv3d")),
    padded_convolution,
)
"""Operators whose bias captured graphs add in a separate operator."""


def op_signature(op: Op) -> str:
    """Format an operator and its inputs: `aten.linear(x [8, 16], layer.weight [32, 16])`."""
    name = target_name(op.target).removesuffix(".default")
    return f"{name}({', '.join(f'{v.name} {list(v.shape)}' for v in op.inputs)})"


def divisors_text(number: int, limit: int) -> str:
    """Return the divisors of `number` up to `limit` as text: `1, 2, 4`."""
    numbers = [str(n) for n in range(1, min(number, limit) + 1) if number % n == 0]
    return ", ".join(numbers)
