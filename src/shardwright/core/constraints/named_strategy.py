"""Strategies that refer to mesh axes and to arguments by name.

`{"dp": 0, "tp": -1}` as the entry of a tensor shards dimension 0 over the axis `dp` and the last
dimension over the axis `tp`. The option `axes` of `plan` gives the sizes: `{"dp": 2, "tp": 4}`.
Axes that it does not list are skipped, so that one description of a model serves all sizes. If
several axes shard a dimension, the first in `axes` is the most significant, as in a `DeviceMesh`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from shardwright.core.capture.annotations import OperatorArguments
from shardwright.core.constraints.parse import OPS_WITH_BIAS
from shardwright.core.constraints.strategy import (
    Entry,
    OperatorStrategy,
    check_entries,
    check_entry,
    entries_text,
    entry_text,
)
from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.errors import StrategyError

AxisPlacements = Mapping[str, int | Shard | Replicate]
"""The tensor dimension that each mesh axis shards, by axis name."""

UserEntry = Entry | AxisPlacements
"""Sharding of one tensor as users write it: shard counts, a layout, None if it follows from other
tensors, or the dimension that each mesh axis shards."""


@dataclass(frozen=True)
class AxisDims:
    """The mesh axes that shard a tensor, by name.

    Args:
        dims: (axis, dimension) pairs; a negative dimension counts from the last, None replicates
            the tensor over the axis.
    """

    dims: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        return f"{{{', '.join(f'{axis}: {dim}' for axis, dim in self.dims)}}}"

    def layout(self, where: str, matrix: DeviceMatrix, ndim: int) -> TensorLayout:
        """Return the layout of a tensor with `ndim` dimensions; axes that `matrix` lacks are
        skipped.

        Raises:
            StrategyError: if a dimension is out of range; the message begins with `where`.
        """
        dim_of_axis = dict(self.dims)
        axes_of_dim: list[list[int]] = [[] for _ in range(ndim)]
        for dim in dim_of_axis.values():
            if dim is not None and not -ndim <= dim < ndim:
                valid = f"from {-ndim} to {ndim - 1}" if ndim else "none, as it is a scalar"
                raise StrategyError(
                    f"{where}: {self} shards dimension {dim} of a tensor with {ndim}"
                    f" dimension{'s' if ndim != 1 else ''}\nvalid dimensions are {valid}"
                )
        # In the order of the matrix, in which the first axis is the most significant.
        for index, axis in enumerate(matrix.alias_names):
            sharded = dim_of_axis.get(axis)
            if sharded is not None:
                axes_of_dim[sharded].append(index)
        return TensorLayout(matrix, tuple(map(tuple, axes_of_dim)))


RequestedEntry = Entry | AxisDims
"""Sharding of one tensor, as `requested_entry` returns it after validation: shard counts, a layout,
named axes (`AxisDims`), or None if it follows from other tensors."""


@dataclass(frozen=True)
class NamedStrategy:
    """The requested sharding of an operator, or of the tensors that enter and leave a module, with
    names of axes or of arguments.

    Args:
        inputs: one entry per tensor input in the order of the operator's arguments, or entries by
            the names of arguments, parameters and buffers; missing names are left to the search.
        outputs: one entry per output; None for the sharding in which the operator computes them.
    """

    inputs: tuple[RequestedEntry, ...] | Mapping[str, RequestedEntry]
    outputs: tuple[RequestedEntry, ...] | None = None

    def __str__(self) -> str:
        if isinstance(self.inputs, Mapping):
            named = (f"{name}: {entry_text(entry)}" for name, entry in self.inputs.items())
            inputs = f"{{{', '.join(named)}}}"
        else:
            inputs = entries_text(self.inputs)
        return inputs if self.outputs is None else f"{inputs} → {entries_text(self.outputs)}"

    def operator_strategy(
        self, op: Op, graph: Graph, matrix: DeviceMatrix | None
    ) -> OperatorStrategy:
        """Return the strategy of `op` by position, with layouts on `matrix`.

        Raises:
            StrategyError: if an argument is unknown, or an entry shards a dimension that the tensor
                lacks.
        """
        inputs = self.inputs
        if isinstance(inputs, Mapping):
            inputs = _order_entries_by_position(op, graph, inputs)
        where = f"{op.name}: {self}"
        return OperatorStrategy(
            tuple(_convert_entries_to_layouts(where, op, inputs, op.inputs, matrix)),
            None
            if self.outputs is None
            else tuple(_convert_entries_to_layouts(where, op, self.outputs, op.outputs, matrix)),
        )


PinnedStrategy = OperatorStrategy | NamedStrategy
"""Sharding that a user requests for an operator, with one entry per tensor, by position or name."""


def requested_strategy(inputs: Any, outputs: Any = None) -> PinnedStrategy:
    """Return the strategy of validated user entries.

    Args:
        inputs: a tuple with one `UserEntry` per tensor, or a mapping from argument names.
        outputs: a tuple with one `UserEntry` per output, or None.

    Raises:
        StrategyError: if an entry is not valid.
    """
    if isinstance(inputs, Mapping):
        entries: Any = {}
        for name, entry in inputs.items():
            # `{'dp': 0}` maps axes to dimensions, and a mapping of argument names is expected here.
            if not isinstance(name, str) or isinstance(entry, int | Shard | Replicate):
                raise StrategyError(
                    f"in_strategy {dict(inputs)!r}: {entry!r} is not a valid entry for an argument"
                    f" {name!r}\nuse an entry for each argument by name, such as"
                    " {'input': {'dp': 0}}; for a single tensor write"
                    f" ({dict(inputs)!r},)"
                )
            entries[name] = requested_entry(f"in_strategy of {name!r}", entry)
    else:
        entries = requested_entries("in_strategy", inputs)
    if outputs is not None:
        outputs = requested_entries("out_strategy", outputs)
    # Only `plan` gets the sizes of axes, so names become layouts and positions there.
    by_name = isinstance(entries, Mapping)
    if by_name or any(isinstance(each, AxisDims) for each in (*entries, *(outputs or ()))):
        return NamedStrategy(entries, outputs)
    return OperatorStrategy(entries, outputs)


def requested_entries(option: str, entries: Any) -> tuple[RequestedEntry, ...]:
    """Validate a tuple of entries, each as `requested_entry` does."""
    if not isinstance(entries, tuple):
        # Raises an error: without a tuple it is unclear to which tensor an entry belongs.
        check_entries(option, entries)
    # `check_entries` accepts no mappings; `requested_entry` validates them below.
    plain = tuple(None if isinstance(entry, Mapping | AxisDims) else entry for entry in entries)
    check_entries(option, plain)
    return tuple(requested_entry(option, entry) for entry in entries)


def requested_entry(option: str, entry: Any) -> RequestedEntry:
    """Validate the entry of one tensor.

    Args:
        option: name of the option that has the entry, for errors.
        entry: the `UserEntry` to validate.

    Returns:
        The entry, with a mapping converted to `AxisDims`.

    Raises:
        StrategyError: if the entry is not valid.
    """
    if isinstance(entry, AxisDims):
        return entry
    if not isinstance(entry, Mapping):
        check_entry(option, entry)
        return entry  # type: ignore[no-any-return]
    dims: list[tuple[str, int | None]] = []
    for axis, placement in entry.items():
        # `True` is an instance of `int`.
        is_dim = isinstance(placement, int) and not isinstance(placement, bool)
        # Exact types: a subclass of `Shard` may order its shards in another way.
        if not isinstance(axis, str) or not (is_dim or type(placement) in (Shard, Replicate)):
            raise StrategyError(
                f"{option}: {dict(entry)!r} contains {axis!r}: {placement!r}\n"
                "use names of axes with the dimension that each shards, such as"
                " {'dp': 0, 'tp': -1}, or with Shard(0) or Replicate()"
            )
        dim = placement.dim if isinstance(placement, Shard) else placement
        dims.append((axis, dim if isinstance(dim, int) else None))
    return AxisDims(tuple(dims))


def entry_with_layout(
    where: str, entry: RequestedEntry, ndim: int, matrix: DeviceMatrix | None
) -> Entry:
    """Convert an entry that names axes to a layout on `matrix`; return other entries unchanged.

    Raises:
        StrategyError: if the entry shards a dimension that a tensor with `ndim` dimensions lacks;
            the message begins with `where`.
    """
    if not isinstance(entry, AxisDims):
        return entry
    assert matrix is not None, "`check_axis_names` has found the axis names"
    return entry.layout(where, matrix, ndim)


def axis_names_of(entries: Iterable[object]) -> Iterator[str]:
    """Yield the mesh axes that strategies or strategy entries name."""
    for entry in entries:
        if isinstance(entry, AxisDims):
            yield from (axis for axis, _ in entry.dims)
        elif isinstance(entry, NamedStrategy):
            inputs = entry.inputs.values() if isinstance(entry.inputs, Mapping) else entry.inputs
            yield from axis_names_of((*inputs, *(entry.outputs or ())))


def check_axis_names(names: Iterable[str], matrix: DeviceMatrix | None) -> None:
    """Check the axis names in strategies against `matrix`, the axes whose sizes the user gave.

    Strategies may name axes that `matrix` lacks: these axes are skipped.

    Raises:
        StrategyError: if only the strategies, or only `matrix`, have axes; or if a strategy names
            an axis that `matrix` lacks while an axis of `matrix` is never named, which is likely a
            misspelling.
    """
    named = list(dict.fromkeys(names))
    if matrix is None:
        if named:
            sizes = ", ".join(f"{axis!r}: …" for axis in named)
            raise StrategyError(
                f"strategies name the axes {_format_quoted_names(named)}, whose sizes are unknown\n"
                f"pass the sizes to `plan`: axes={{{sizes}}}"
            )
        return
    if not named:
        raise StrategyError(
            f"`plan` got axes ({matrix.sizes}), but no strategy names an axis\n"
            "remove `axes`, or pin modules with entries such as {'dp': 0}"
        )
    absent = [axis for axis in named if axis not in matrix.alias_names]
    # A size of 1 shards nothing, so its axis may be named or not.
    sizes_of_axes = zip(matrix.alias_names, matrix.device_matrix, strict=True)
    unnamed = [axis for axis, size in sizes_of_axes if size > 1 and axis not in named]
    # Axes that `axes` lacks are skipped; together with an axis that no strategy names they are
    # likely to be misspelled.
    if absent and unnamed:
        raise StrategyError(
            f"strategies name the axes {_format_quoted_names(absent)}, which are not in axes"
            f" ({matrix.sizes}), but no strategy names {_format_quoted_names(unnamed)}\ncorrect the"
            f" names, or add {', '.join(f'{axis!r}: 1' for axis in absent)} to `axes` if there are"
            " no such axes"
        )


def _format_quoted_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; for a PyTorch built-in, the signature of its operator.

    Raises:
        StrategyError: if the names of the arguments are unknown.
    """
    try:
        return inspect.signature(function)
    except ValueError:
        # `inspect` finds no signature of functions that PyTorch implements in C++.
        name = getattr(function, "__name__", "")
        overload = getattr(getattr(torch.ops.aten, name, None), "default", None)
        if not isinstance(overload, OpOverload):
            raise StrategyError(
                f"the names of the arguments of {function!r} are unknown\n"
                "give a tuple with one entry per tensor argument"
            ) from None
    parameter_kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # In Python, PyTorch calls `self` in the schema of an operator `input`.
    names = ["input" if a.name == "self" else a.name for a in schema_of(overload).arguments]
    # With defaults, since a call may leave out any optional argument of the operator.
    return inspect.Signature([inspect.Parameter(n, parameter_kind, default=None) for n in names])


def check_argument_names(
    target: Callable[..., Any], function: Callable[..., Any], strategy: PinnedStrategy
) -> None:
    """Check that a module or function has the arguments that its strategy names.

    Args:
        target: the module or function, for errors and parameters.
        function: the function that has the arguments.
        strategy: the strategy of the pin.

    Raises:
        StrategyError: if an argument is unknown.
    """
    if not isinstance(strategy, NamedStrategy) or not isinstance(strategy.inputs, Mapping):
        return
    parameters = signature_of(function).parameters.values()
    valid = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if isinstance(target, nn.Module) and not any(target.children()):
        # Only a module without submodules can be the single operator that reads its parameters.
        valid += [name for name, _ in (*target.named_parameters(), *target.named_buffers())]
    accepts_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in strategy.inputs:
        if name not in valid and not accepts_any_keyword:
            target_name = type(target).__name__ if isinstance(target, nn.Module) else "the function"
            raise StrategyError(
                f"in_strategy: {target_name} has no argument {name!r}\nuse"
                f" {', '.join(valid) or 'a tuple with one entry per tensor argument'}"
            )


def argument_names(call: inspect.BoundArguments) -> tuple[str, ...]:
    """Return the argument name of each tensor that a call passes, in the order of the arguments."""
    names: list[str] = []
    for name, value in call.arguments.items():
        # Arguments that the function collects in `**kwargs` keep the names of the call.
        is_var_keyword = call.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        for argument, content in value.items() if is_var_keyword else ((name, value),):
            tensors = [x for x in pytree.tree_leaves(content) if isinstance(x, Tensor)]
            # An argument with several tensors, such as a list, gives its entry to each of them.
            names += [argument] * len(tensors)
    return tuple(names)


def _order_entries_by_position(
    op: Op, graph: Graph, entries: Mapping[str, RequestedEntry]
) -> tuple[RequestedEntry, ...]:
    """Return one entry per input of `op`, None by default, from entries by the name of an argument,
    parameter or buffer."""
    positions = _find_argument_positions(op)
    for index, value in enumerate(op.inputs):
        prefix = f"{op.module}." if op.module else ""
        # A tied parameter has its first name in the graph, but another one in this module.
        names = [value.name, *(name for name, first in graph.tied.items() if first == value.name)]
        for name in names:
            # Names of arguments take precedence over names of parameters.
            positions.setdefault(name.removeprefix(prefix), index)
    by_position: list[RequestedEntry] = [None] * len(op.inputs)
    for name, entry in entries.items():
        # None requests nothing, so its argument need not be an input of the operator.
        if entry is None:
            continue
        if name not in positions:
            raise StrategyError(
                f"{op.name}: in_strategy has an entry for {name!r}, but the operator"
                f" {op.short_name} does not read {name!r} directly\npass a tuple with one entry per"
                " input of the operator, without a bias that a separate operator adds"
            )
        by_position[positions[name]] = entry
    return tuple(by_position)


def _find_argument_positions(op: Op) -> dict[str, int]:
    """Return the input index of each named argument of the pinned operator, by argument name.

    Returns:
        {} if capture dropped or added inputs, so that the indices are unknown.
    """
    tag = next((tag for tag in op.tags if isinstance(tag, OperatorArguments)), None)
    # Capture may drop the last argument, a bias, but where others are dropped positions differ.
    if tag is None or len(op.inputs) > len(tag.names):
        return {}
    if len(op.inputs) < len(tag.names) and op.target not in OPS_WITH_BIAS:
        return {}
    return {name: index for index, name in enumerate(tag.names) if name is not None}


def _convert_entries_to_layouts(
    where: str,
    op: Op,
    entries: tuple[RequestedEntry, ...],
    values: tuple[Value, ...],
    matrix: DeviceMatrix | None,
) -> Iterator[Entry]:
    for index, entry in enumerate(entries):
        # The number of entries is checked with the shapes, when the strategy is parsed.
        value = values[index] if index < len(values) else None
        ndim = 0 if value is None else len(value.shape)
        if value is not None and value.origin in (Origin.ACTIVATION, Origin.INPUT):
            # The user's code sees the leading dimensions flattened.
            ndim -= op.flattened - 1
        yield None if value is None else entry_with_layout(where, entry, ndim, matrix)
