"""What was decided, as data, and what follows from it; what renders a plan needs no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from math import prod
from typing import Any

import torch

from shardwright.constraints import OperatorStrategy
from shardwright.cost.cluster import Cluster
from shardwright.cost.dry_run import DryRunCache
from shardwright.cost.memory import Memory, memory
from shardwright.cost.pipeline_timeline import Timeline
from shardwright.cost.predict import planned_timeline
from shardwright.errors import PlanError
from shardwright.graph.graph import Graph, Op, Value
from shardwright.layout.axes import Shape
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.partition.decisions import (
    BUCKET_BYTES,
    CutAxes,
    Decisions,
    OptimizerParallel,
    Recompute,
)
from shardwright.partition.pipeline_spec import ONE_STAGE, PipelineSpec
from shardwright.plan.rows import ConversionRow, CrossingRow, OperatorRow, StepRow, Strategy


@dataclass(frozen=True)
class PlanData:
    """Everything decided for one model on a number of devices.

    Args:
        mesh: the device matrix of one pipeline stage, outermost axis first.
        mode, options: how it was found.
        cuts: for each cut operator its factors with the axes that cut them.
        storage: for each parameter the axes that cut each dimension of what a device keeps.
        outputs: for operators that are told how to leave their outputs, the axes of each dimension.
        arrivals: how inputs arrive that are not given whole to every device, by name.
        sharding: of parameters and optimizer state, if asked for.
        bucket_bytes: up to which collectives of parameters are joined.
        recompute: the operators that are computed again in the backward pass.
        compute_dtype: in which parameters and inputs in single precision are read, if in another;
            `parameters` and `inputs` say how they are stored and given.
        pipeline: stages and micro-batches; shapes are those of one micro-batch.
        pins: what users said of operators, by name.
        parameters: shape and dtype of each, by name.
        inputs: name, shape and dtype of each input tensor; other leaves as they are.
        structure: how the inputs nest, as PyTorch's pytrees write it.
        fingerprint: of the graph that it was made for.
        operators: one row each, in order.
        returned: conversions of the model's outputs, and of new values of its buffers.
        crossings: what goes from stage to stage.
        step: what a step takes on the cluster that was named.
        memory_limit: bytes that a device has for a step: as it was asked, else those of the
            devices of the cluster; None where neither is known.
        optimizer: for which memory is reckoned, as `memory_with` takes it.
        forward_bytes, backward_bytes: that one device of the busiest stage sends in one step, with
            all its micro-batches.
        search_seconds, capture_seconds: what planning took.
        graph: the captured model; a plan from a file has none until `parallelize` captures it.
        rehearsals: of its parts.
    """

    mesh: Layout
    mode: str
    options: dict[str, Any]
    cuts: dict[str, dict[str, tuple[int, ...]]]
    storage: dict[str, tuple[tuple[int, ...], ...]]
    outputs: dict[str, tuple[tuple[tuple[int, ...], ...] | None, ...]]
    parameters: dict[str, tuple[Shape, str]]
    inputs: tuple[Any, ...]
    structure: str
    fingerprint: str
    operators: tuple[OperatorRow, ...]
    returned: tuple[ConversionRow, ...]
    forward_bytes: int
    backward_bytes: int
    training: bool = True
    arrivals: dict[str, CutAxes] = field(default_factory=dict)
    sharding: OptimizerParallel | None = None
    bucket_bytes: int = BUCKET_BYTES
    recompute: dict[str, Recompute] = field(default_factory=dict)
    compute_dtype: str | None = None
    pipeline: PipelineSpec = ONE_STAGE
    crossings: tuple[CrossingRow, ...] = ()
    step: StepRow | None = None
    pins: dict[str, OperatorStrategy] = field(default_factory=dict)
    memory_limit: int | None = None
    search_seconds: float = 0.0
    capture_seconds: float = 0.0
    optimizer: str | torch.optim.Optimizer = field(default="adamw", compare=False, repr=False)
    graph: Graph | None = field(default=None, compare=False, repr=False)
    dry_runs: DryRunCache = field(default_factory=DryRunCache, compare=False, repr=False)

    @property
    def devices(self) -> int:
        """All devices of all pipeline stages."""
        return self.mesh.num_devices * self.pipeline.stages

    @property
    def decisions(self) -> Decisions:
        """What lowering needs of it."""
        return Decisions(
            cuts=self.cuts,
            storage=self.storage,
            outputs=self.outputs,
            arrivals=self.arrivals,
            sharding=self.sharding,
            bucket_bytes=self.bucket_bytes,
            recompute=self.recompute,
        )

    @property
    def computed_in(self) -> torch.dtype | None:
        """`compute_dtype` as PyTorch's."""
        return None if self.compute_dtype is None else getattr(torch, self.compute_dtype)

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in one training step."""
        return self.forward_bytes + self.backward_bytes

    @property
    def step_time(self) -> float | None:
        """Predicted seconds of a training step; None if no cluster was named."""
        return None if self.step is None else self.step.seconds

    @property
    def global_batch(self) -> int | None:
        """Samples of a step: those of the first input tensor, in all micro-batches; None if there
        is no such input."""
        shapes = (leaf["shape"] for leaf in self.inputs if isinstance(leaf, dict))
        samples = next((shape[0] for shape in shapes if shape), None)
        return None if samples is None else samples * self.pipeline.micro_batches

    @property
    def sequence(self) -> int | None:
        """Tokens of a sample, where an embedding looks them up; None where samples are no
        sequences."""
        for row in self.operators:
            for _, shape, kind in row.inputs:
                if row.operator == "aten.embedding" and kind == "input" and len(shape) == 2:
                    return shape[1]
        return None

    @property
    def strategies(self) -> dict[str, Strategy]:
        """For each operator in how many parts each dimension of each input is cut, as torch stores
        them: a linear layer's weight is (out_features, in_features)."""
        return {row.name: row.strategy for row in self.operators}

    @property
    def without_rule(self) -> tuple[str, ...]:
        """Operators that have no sharding rule; each device computes them whole."""
        return tuple(row.name for row in self.operators if row.rule is None)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters that one device keeps, of the stage that keeps most."""
        kept: dict[int, set[str]] = {}
        for row in self.operators:
            names = (name for name, _, kind in row.inputs if kind == "parameter")
            kept.setdefault(row.stage, set()).update(names)
        return max((sum(map(self._stored_bytes, names)) for names in kept.values()), default=0)

    def _stored_bytes(self, name: str) -> int:
        shape, dtype = self.parameters[name]
        return prod(TensorLayout(self.mesh, self.storage[name]).shard_shape(shape)) * _itemsize(
            dtype
        )

    @cached_property
    def memory(self) -> Memory:
        """What each device needs at most in a training step with the optimizer that was planned
        for, found without devices by rehearsing the program; `memory_with` takes others.

        Raises:
            PlanError: if the plan comes from a file, and so has no graph.
        """
        return self.memory_with(self.optimizer)

    def memory_with(self, optimizer: str | torch.optim.Optimizer) -> Memory:
        """What each device needs at most in a training step with an optimizer.

        Args:
            optimizer: `sgd`, `momentum`, `adam`, `adamw`, or an optimizer like the one to be used.

        Raises:
            PlanError: if there is no such optimizer, or the plan has no graph.
        """
        graph, found = self._graph(), self.dry_runs
        return memory(graph, self.mesh, self.decisions, self.pipeline, optimizer, found)

    def timeline(self, cluster: Cluster | None = None) -> Timeline:
        """When each pipeline stage does what in a step, and when it waits; `print` shows it.

        Args:
            cluster: whose devices and links say how long parts take; without one, as long as they
                have operations in their matrix products.

        Raises:
            PlanError: if the plan comes from a file, and so has no graph.
        """
        return planned_timeline(self._graph(), self.mesh, self.decisions, self.pipeline, cluster)

    def _graph(self) -> Graph:
        if self.graph is None:
            raise PlanError(
                "a plan from a file has no graph to rehearse: plan the model again with its options"
            )
        return self.graph

    def row(self, name: str) -> OperatorRow:
        """What was decided about the operator `name`.

        Raises:
            PlanError: if there is none of that name; lists the nearest.
        """
        for row in self.operators:
            if row.name == name:
                return row
        raise PlanError(_unknown(name, [row.name for row in self.operators]))


def target_text(op: Op) -> str:
    target = str(op.target) if hasattr(op.target, "_schema") else op.target.__name__
    return target.removesuffix(".default")


def dtype_name(value: Value) -> str:
    """Of a parameter the dtype in which it is stored, of an input that in which it is given."""
    return str(value.stored_dtype).removeprefix("torch.")


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.3)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"the plan has no operator {name!r}{hint}"
