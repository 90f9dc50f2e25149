"""The captured model as data: operators and the values that flow between them.

Names are module paths: `layers.0.mlp.down_proj` is the main operator of that module, further
operators of a module are `layers.0.mlp.mul`, `layers.0.mlp.mul_1`, …
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any

import torch

from shardwright.torch_internals import pytree
from shardwright.torch_internals.operators import OpOverload, schema_of


class Kind(Enum):
    """Where a value comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    ACTIVATION = "activation"


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor in the graph; two values are equal only if they are the same object.

    Args:
        name: unique in its graph. Of a parameter or a buffer the name in `state_dict()`, of an
            input its path in the call, of an activation the name of its operator.
        requires_grad: whether a gradient of the loss flows into it (false for values that no
            differentiable path joins with a parameter *and* with the loss).
        given_dtype: of parameters and inputs, if they are stored or given in another dtype than
            the one they are computed in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind = Kind.ACTIVATION
    requires_grad: bool = False
    given_dtype: torch.dtype | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which a parameter is stored, or an input given."""
        return self.given_dtype or self.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}"


OpTarget = Callable[..., Any]


def target_name(target: OpTarget) -> str:
    """`aten.linear.default`, or the qualified name of a Python function."""
    if isinstance(target, OpOverload):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


@dataclass(frozen=True, eq=False)
class Op:
    """One operator: `target(*args, **kwargs)`, with a `Value` wherever a tensor goes in.

    Args:
        name: unique in its graph, a module path.
        target: an ATen operator (`torch.ops.aten.linear.default`).
        outputs: the tensors it returns; an operator that returns a list has one for each.
        module: path of the module it was called in, `""` for the root.
        source: the user's line, `file.py:12`, or `""`.
        tags: what the user attached to the calls of functions that made the operator.
        calls: the calls of modules that it was made in, the outermost first; the second call of a
            module is `path@2`.
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

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The tensors it reads, in the order in which they stand in `args`, then `kwargs`."""
        flat = pytree.tree_leaves((self.args, self.kwargs))
        return tuple(leaf for leaf in flat if isinstance(leaf, Value))

    @property
    def takes_device(self) -> bool:
        """Whether it makes a tensor of numbers alone, so that it must be told on which device."""
        if self.inputs or not isinstance(self.target, OpOverload):
            return False
        return any(argument.name == "device" for argument in schema_of(self.target).arguments)

    @property
    def output(self) -> Value:
        return self.outputs[0]

    def arguments(self, tensors: Callable[[Value], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`args` and `kwargs` with every value replaced by `tensors(value)`."""
        return pytree.tree_map_only(Value, tensors, (self.args, self.kwargs))  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"{self.name}: {target_name(self.target)}"


@dataclass(frozen=True, eq=False)
class Graph:
    """A model for one shape of its inputs.

    Args:
        ops: in an order in which they can run.
        inputs: the leaves of `(args, kwargs)` of the call: a `Value` for a tensor, else the
            constant that was given.
        parameters, buffers: the distinct ones that the graph reads or updates.
        constants: tensors that the model's code made while it was captured.
        outputs: the leaves of what the model returns: a `Value` for a tensor, else a constant.
        updates: buffers with the value that each holds after the forward pass.
        tied: other names of a parameter or buffer → the name of its value.
        loss: the output from which gradients start; None if it is not one scalar.
        module_tags: what the user attached to modules, by path.
        call_tags: what the user attached to calls of functions, each with the user's line; also
            where no operator of the call is left.
        compute_dtype: in which parameters and inputs in single precision are read, if in another.
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
    capture_seconds: float = 0.0
    module_tags: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    call_tags: tuple[tuple[Any, str], ...] = ()
    compute_dtype: torch.dtype | None = None

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> dict[Value, Op]:
        """The operator that makes each activation."""
        return {value: op for op in self.ops for value in op.outputs}

    @cached_property
    def consumers(self) -> dict[Value, tuple[tuple[Op, int], ...]]:
        """For each value the operators that read it, each with the index of the input."""
        found: dict[Value, list[tuple[Op, int]]] = {value: [] for value in self.values()}
        for op in self.ops:
            for index, value in enumerate(op.inputs):
                found[value].append((op, index))
        return {value: tuple(uses) for value, uses in found.items()}

    @property
    def input_values(self) -> tuple[Value, ...]:
        return tuple(leaf for leaf in self.inputs if isinstance(leaf, Value))

    @property
    def output_values(self) -> tuple[Value, ...]:
        return tuple(leaf for leaf in self.outputs if isinstance(leaf, Value))

    def values(self) -> Iterator[Value]:
        """Every value once: inputs, parameters, buffers, constants, then activations."""
        yield from self.input_values
        yield from self.parameters
        yield from self.buffers
        yield from self.constants
        for op in self.ops:
            yield from op.outputs

    @cached_property
    def fingerprint(self) -> str:
        """A hash of operators, shapes, dtypes and names: equal for equal models."""
        digest = hashlib.sha256()
        for value in (*self.input_values, *self.parameters, *self.buffers):
            digest.update(f"{value.name}{value.shape}{value.dtype}\n".encode())
        for op in self.ops:
            described = f"{op.name} {target_name(op.target)} {op.args} {op.kwargs}"
            outputs = [(value, value.dtype) for value in op.outputs]
            digest.update(f"{described} {outputs}\n".encode())
        digest.update(f"{self.inputs} {self.outputs} {self.updates}".encode())
        return digest.hexdigest()[:16]


def made_of_inputs(graph: Graph, values: Iterable[Value]) -> list[Op] | None:
    """The operators that make `values` of the model's inputs; None if they depend on parameters or
    buffers."""
    needed, found = set(values), list[Op]()
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            found.append(op)
            needed.update(op.inputs)
    if any(value.kind in (Kind.PARAMETER, Kind.BUFFER) for value in needed):
        return None
    return found[::-1]
