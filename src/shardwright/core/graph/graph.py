"""The captured model as data: a graph of operators and the values between them.

Operators are named by module paths: `layers.0.mlp.down_proj` is the main operator of that module;
its other operators are `layers.0.mlp.mul`, `layers.0.mlp.mul_1`, …
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from html import escape
from math import prod
from typing import Any, Literal

import torch

from shardwright.core.graph.python_call import PythonCall
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, operator_name, schema_of


class Origin(Enum):
    """Source of a tensor of a graph: the call, the module, capture, or an operator."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    ACTIVATION = "activation"


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor in the graph, compared by identity.

    Args:
        name: unique in its graph: the `state_dict()` name of a parameter or buffer, the path of an
            input in the call, the operator name of an activation.
        shape: global shape; in a pipeline with micro-batches, the shape of one micro-batch.
        dtype: the dtype in which the model computes with the tensor.
        origin: where the tensor comes from.
        requires_grad: whether the backward pass from `Graph.trained` computes a gradient of the
            tensor. Search and cost model count only these gradients.
        requires_other_grad: whether the user may call `backward` on another output that has a
            gradient with respect to the tensor.
        outer_dtype: dtype in which a parameter is stored or an input is passed; None if it is
            `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: Origin = Origin.ACTIVATION
    requires_grad: bool = False
    requires_other_grad: bool = False
    outer_dtype: torch.dtype | None = None

    @property
    def differentiable(self) -> bool:
        """Whether programs compute the gradient of the value, for the loss or for any other
        output."""
        return self.requires_grad or self.requires_other_grad

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which a parameter is stored, or an input is passed."""
        return self.outer_dtype or self.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element of the tensor."""
        return self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}"


OpTarget = Callable[..., Any]


def target_name(target: OpTarget) -> str:
    """Return the name of an ATen operator, `aten.linear.default`, or a function's qualified
    name."""
    if isinstance(target, OpOverload):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def _make_hashable_structure(argument: Any) -> Any:
    if isinstance(argument, Value):
        return argument.shape, argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple([_make_hashable_structure(item) for item in argument])
    if isinstance(argument, dict):
        return tuple([(key, _make_hashable_structure(item)) for key, item in argument.items()])
    return argument


# Compared by identity: `kwargs` has no hash, and caches use operators as keys.
@dataclass(frozen=True, eq=False)
class Op:
    """One operator: `target(*args, **kwargs)`, with a `Value` in place of every tensor.

    Args:
        name: unique in its graph, a module path.
        target: an ATen operator (`torch.ops.aten.linear.default`), a function of `custom_ops`, or a
            `LocalCall`.
        args, kwargs: the arguments; lists and tuples may contain values.
        outputs: the tensors that the operator returns; one per element if it returns a list.
        module: path of the module in which the operator was called, `""` for the root.
        source: the line in the user's code, `file.py:12`, or `""`.
        tags: the user's annotations of the enclosing function calls.
        calls: the enclosing module calls, the outermost first; the second call of a module is
            `path@2`.
        flattened: number of leading dimensions of the operator's activations that the user's code
            flattens into one (`x.view(-1, k)`). Capture undoes the flattening, so that the
            dimensions can be sharded separately.
    """

    name: str
    target: OpTarget
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Value, ...]
    module: str = ""
    source: str = ""
    tags: tuple[Any, ...] = ()
    calls: tuple[str, ...] = ()
    flattened: int = 1

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """Tensor arguments, first from `args`, then from `kwargs`."""
        # Rules and communication refer to an input by its index in this tuple.
        flat = pytree.tree_leaves((self.args, self.kwargs))
        return tuple(leaf for leaf in flat if isinstance(leaf, Value))

    @cached_property
    def cache(self) -> dict[str, Any]:
        """Results of functions of this operator in other rooms, such as its sharding rule, by the
        name of the function.

        A search makes millions of look-ups, which take longer in a `WeakKeyDictionary`.
        """
        return {}

    @cached_property
    def structure(self) -> Any:
        """Hashable form of `args` and `kwargs`, with shape and dtype in place of each tensor."""
        return _make_hashable_structure(self.args), _make_hashable_structure(self.kwargs)

    @property
    def short_name(self) -> str:
        """Name of the function, or of the ATen operator without namespace and overload: `mean` for
        `aten.mean.dim`."""
        if isinstance(self.target, OpOverload):
            return operator_name(self.target)
        return self.target.__name__

    @property
    def takes_device(self) -> bool:
        """Whether the operator has a `device` argument and no tensor inputs, as `aten.zeros`."""
        # With a tensor input the result is on the device of that tensor.
        if self.inputs or not isinstance(self.target, OpOverload):
            return False
        return any(argument.name == "device" for argument in schema_of(self.target).arguments)

    @property
    def output(self) -> Value:
        return self.outputs[0]

    def arguments(self, tensors: Callable[[Value], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `args` and `kwargs` with every value replaced by `tensors(value)`."""
        if self._has_nested_values:
            return pytree.tree_map_only(Value, tensors, (self.args, self.kwargs))  # type: ignore[no-any-return]
        # `pytree` takes longer than a small operator runs.
        args = tuple(tensors(each) if isinstance(each, Value) else each for each in self.args)
        kwargs = self.kwargs.items()
        return args, {n: tensors(v) if isinstance(v, Value) else v for n, v in kwargs}

    @cached_property
    def _has_nested_values(self) -> bool:
        """Whether a list or tuple among the arguments contains values."""
        direct = (*self.args, *self.kwargs.values())
        # `inputs` also has the values inside of lists and tuples.
        return sum(isinstance(each, Value) for each in direct) < len(self.inputs)

    def __repr__(self) -> str:
        return f"{self.name}: {target_name(self.target)}"


FIRST: Literal["first"] = "first"
"""Value of `PassedDim`: the first micro-batch reads the output of the prologue, the others
zeros."""

PassedDim = int | Literal["first"] | None
"""How micro-batches read an output of the prologue: split along a dimension, in full (None), or
`FIRST`."""

SampleReduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class WholeBatch:
    """How a step computes the loss of the global batch from the graph of a micro-batch.

    Args:
        reduction: whether the loss of the batch is the mean or the sum of the micro-batches'
            losses.
        prologue: a graph of the global batch whose outputs depend on no parameter, such as the
            number of valid targets; run once per step, before the first micro-batch.
        values: for each output of the prologue, the name of the buffer in which micro-batches read
            it, and the dimension that is split into micro-batches: None if each micro-batch reads
            the full tensor, `FIRST` if only the first one does.
        outputs: (name, reduction) of each output that is a mean or sum over samples, and (name,
            batch dimension) of each output with a batch dimension. Other outputs are equal in all
            micro-batches.
        mixed: names of outputs that mix samples, so that outputs of micro-batches do not determine
            those of the global batch.
        updates: (name, reduction) of each buffer that is updated once per step: every micro-batch
            computes a new value from the old value, and the step stores their mean or sum; None if
            they are equal. Other buffers are updated by every micro-batch.
        rewritten: whether the operators of the captured micro-batch were changed, so that the graph
            computes a term of the loss of the global batch.
    """

    reduction: SampleReduction = "mean"
    prologue: Graph | None = None
    values: tuple[tuple[str, PassedDim], ...] = ()
    outputs: tuple[tuple[str, SampleReduction | int], ...] = ()
    mixed: tuple[str, ...] = ()
    updates: tuple[tuple[str, SampleReduction | None], ...] = ()
    rewritten: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.values)

    def updates_once(self, buffer: Value) -> bool:
        """Whether `buffer` is updated once per step: until then all micro-batches read its old
        value."""
        return any(name == buffer.name for name, _ in self.updates)


# Compared by identity, as caches use graphs as keys.
@dataclass(frozen=True, eq=False)
class Graph:
    """A captured model, for fixed input shapes.

    Args:
        ops: the operators in execution order.
        inputs: the leaves of the call's `(args, kwargs)`: a `Value` for a tensor, otherwise the
            constant that was passed.
        in_spec: the pytree structure of `(args, kwargs)`.
        outputs: the leaves of the model's result: a `Value` for a tensor, otherwise a constant;
            then the tensors that the call stores in Python objects.
        out_spec: the pytree structure of the result.
        parameters, buffers: the parameters and buffers that the graph reads or updates; tied
            tensors are listed once.
        constants: tensors that the model's code created during capture, with their values.
        updates: pairs of a buffer, or of a parameter changed under `no_grad`, and its value after
            the forward pass.
        tied: maps the other names of a tied parameter or buffer to the name of its value.
        loss: the differentiable scalar that a training step minimizes; None if there is no such
            output.
        other_losses: other differentiable scalar outputs, for which the caller may run a backward
            pass.
        frozen: names of the parameters that require no gradient.
        capture_seconds: duration of the capture.
        module_tags: the user's annotations of modules, by path.
        call_tags: the user's annotations of function calls, each with the line of the call,
            including calls without an operator in the graph.
        compute_dtype: dtype to which single-precision parameters and inputs are cast before use;
            None for no cast.
        attributes: (module path, name, `repr`) of each plain attribute that `forward` reads; the
            `repr` is `""` unless the attribute consists of numbers and strings.
        filled: fingerprint of each value that the call stores in an attribute that was missing or
            None, or in a new cache entry, by description of the attribute or entry.
        autocast_on: the device type of the captured autocast regions; None without regions.
        whole_batch: for the graph of a micro-batch, its relation to the loss of the global batch. A
            string is the reason why micro-batches cannot compute that loss; None if the graph has
            not been analyzed.
        python: the captured Python that runs around the graph; None if a call only returns a result
            and updates buffers.
    """

    ops: tuple[Op, ...]
    inputs: tuple[Any, ...]
    in_spec: pytree.TreeSpec
    outputs: tuple[Any, ...]
    out_spec: pytree.TreeSpec
    parameters: tuple[Value, ...] = ()
    buffers: tuple[Value, ...] = ()
    constants: dict[Value, torch.Tensor] = field(default_factory=dict)
    updates: tuple[tuple[Value, Value], ...] = ()
    tied: dict[str, str] = field(default_factory=dict)
    loss: Value | None = None
    other_losses: tuple[Value, ...] = ()
    frozen: tuple[str, ...] = ()
    capture_seconds: float = 0.0
    module_tags: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    call_tags: tuple[tuple[Any, str], ...] = ()
    compute_dtype: torch.dtype | None = None
    attributes: tuple[tuple[str, str, str], ...] = ()
    filled: dict[str, str] = field(default_factory=dict)
    autocast_on: str | None = None
    whole_batch: WholeBatch | str | None = None
    python: PythonCall | None = None

    def result(self, outputs: Sequence[Any]) -> Any:
        """Return the model's result: `outputs` in the pytree structure `out_spec`."""
        # Behind the leaves of the result are the tensors that the call stores in Python objects.
        return pytree.tree_unflatten(list(outputs[: self.out_spec.num_leaves]), self.out_spec)

    def _repr_html_(self) -> str:
        """Return an HTML table of the operators, which notebooks display."""
        rows = (
            (op.name, target_name(op.target), *(" ".join(map(repr, v)) for v in values))
            for op in self.ops
            for values in [(op.inputs, op.outputs)]
        )
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        head = "<tr><th>operator</th><th>target</th><th>reads</th><th>makes</th></tr>"
        return f"<table>{head}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> dict[Value, Op]:
        """The operator that computes each activation."""
        return {value: op for op in self.ops for value in op.outputs}

    @cached_property
    def consumers(self) -> dict[Value, tuple[tuple[Op, int], ...]]:
        """The reads of each value, as (operator, index among the operator's inputs)."""
        # An entry for each value, also if nothing reads it.
        consumers: dict[Value, list[tuple[Op, int]]] = {value: [] for value in self.values()}
        for op in self.ops:
            for index, value in enumerate(op.inputs):
                consumers[value].append((op, index))
        return {value: tuple(uses) for value, uses in consumers.items()}

    @property
    def input_values(self) -> tuple[Value, ...]:
        return tuple(leaf for leaf in self.inputs if isinstance(leaf, Value))

    @property
    def output_values(self) -> tuple[Value, ...]:
        return tuple(leaf for leaf in self.outputs if isinstance(leaf, Value))

    @property
    def is_term_of_batch(self) -> bool:
        """Whether the graph computes a micro-batch's term of the loss of the global batch.

        Otherwise it computes the loss of a call with only the micro-batch.
        """
        return isinstance(self.whole_batch, WholeBatch) and self.whole_batch.rewritten

    @property
    def module_buffers(self) -> tuple[Value, ...]:
        """Buffers of the module, without those that pass outputs of the prologue to
        micro-batches."""
        if not isinstance(self.whole_batch, WholeBatch):
            return self.buffers
        computed = self.whole_batch.names
        return tuple(value for value in self.buffers if value.name not in computed)

    @property
    def trained(self) -> tuple[Value, ...]:
        """Outputs from which the backward pass starts in the cost model: the losses or, without a
        loss, all outputs."""
        return (self.loss, *self.other_losses) if self.loss is not None else self.output_values

    def values(self) -> Iterator[Value]:
        """Yield every value of the graph once: inputs, parameters, buffers, constants, then
        activations in execution order."""
        yield from self.input_values
        yield from self.parameters
        yield from self.buffers
        yield from self.constants
        for op in self.ops:
            yield from op.outputs

    @cached_property
    def fingerprint(self) -> str:
        """Hash of operators, shapes, dtypes and names, in hexadecimal; equal for equal models."""
        digest = hashlib.sha256()
        for value in (*self.input_values, *self.parameters, *self.buffers):
            digest.update(f"{value.name}{value.shape}{value.dtype}\n".encode())
        for op in self.ops:
            call = f"{op.name} {target_name(op.target)} {op.args} {op.kwargs}"
            # The `repr` of a value has its name and shape, but not its dtype.
            outputs = [(value, value.dtype) for value in op.outputs]
            digest.update(f"{call} {outputs}\n".encode())
        digest.update(f"{self.inputs} {self.outputs} {self.updates}".encode())
        # 64 bits are enough to tell models apart.
        return digest.hexdigest()[:16]


def ops_from_inputs(graph: Graph, values: Iterable[Value]) -> list[Op] | None:
    """Return the operators that compute `values` from the model's inputs, in execution order.

    Returns None if `values` depend on parameters or buffers.
    """
    needed, ops = set(values), list[Op]()
    # Backwards, so that one pass finds the producers of all needed values.
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            ops.append(op)
            needed.update(op.inputs)
    # `needed` also has the leaves from which the operators start.
    if any(value.origin in (Origin.PARAMETER, Origin.BUFFER) for value in needed):
        return None
    return ops[::-1]
