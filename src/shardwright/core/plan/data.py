"""`PlanData`: the decisions of a plan, and the memory, costs and table rows derived from them.

Summaries, tables, files and report pages of plans are made from this data."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from math import prod
from typing import Any

import torch

from shardwright.core.constraints import OperatorStrategy
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.dry_run import DryRunCache
from shardwright.core.cost.memory import Memory, memory
from shardwright.core.cost.pipeline_timeline import ChunkSeconds, Timeline
from shardwright.core.cost.predict import predicted_timeline
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Shape
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.decisions import (
    BUCKET_BYTES,
    CutAxes,
    Decisions,
    OptimizerParallel,
    Recompute,
)
from shardwright.core.partition.fold_axes import fold_axes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import ONE_STAGE, PipelineSpec
from shardwright.core.plan.analysis import PlanAnalysis
from shardwright.core.plan.rows import (
    CrossingRow,
    OperatorRow,
    RedistributionRow,
    StepRow,
    Strategy,
)
from shardwright.core.search.choices import AxisChoice
from shardwright.core.search.request import DEFAULT_MEM_COEFF, TimedStep
from shardwright.core.torch_internals.operators import OpOverload
from shardwright.errors import PlanError
from shardwright.progress import OnProgress


@dataclass(frozen=True)
class PlanData:
    """The sharding of one model on a number of devices.

    Args:
        mesh: the device matrix of one pipeline stage, outermost axis first.
        mode: the search mode.
        options: the options of the search mode, by name.
        cuts: the sharded factors of each sharded operator with their mesh axes, by operator.
        storage: the mesh axes that shard each dimension of the stored parameter, by parameter.
        outputs: pinned output layouts, by operator: for each output the mesh axes that shard each
            dimension, or None if that output is not pinned.
        arrivals: the mesh axes that shard each dimension of an input of which each rank passes
            only its shard, by input.
        sharding: ZeRO / FSDP sharding of parameters, gradients and optimizer state; None if not
            requested.
        bucket_bytes: maximum bytes of a bucket of parameters.
        recompute: activation checkpointing segments of the operators to recompute in the backward
            pass, by operator.
        compute_dtype: name of the dtype to which float32 parameters and inputs are cast before
            use; None for no cast. `parameters` and `inputs` have the dtypes in which they are
            stored and passed.
        pipeline: stages and micro-batches; shapes are given for one micro-batch.
        pins: the strategies that the user fixed, by operator.
        parameters: shape and dtype of each parameter, by name.
        inputs: leaves of the model's arguments: a dictionary of name, shape and dtype for a tensor,
            the value itself for any other leaf.
        structure: the nesting of the arguments, as a serialized `TreeSpec`.
        fingerprint: fingerprint of the graph that the plan was made for.
        operators: one row per operator, in the order of the graph.
        returned: redistributions of the model's outputs and of its updated buffers.
        crossings: the values sent between stages.
        step: predicted step time; None without a cluster.
        chunk_seconds: with several stages, the time of each chunk: seconds on the cluster or,
            without a cluster, 10⁹ FLOPs of matrix products.
        saved_memory: memory predicted when the plan was saved; None for plans not from a file.
        saved_gap: optimality gap computed when the plan was saved; None if unknown.
        saved_choices: alternative cuts computed when the plan was saved; empty if unknown.
        memory_limit: bytes that a step may use on each device: the requested limit, else the memory
            of the cluster's devices; None if neither is known.
        optimizer: name or instance of the optimizer whose state `memory` counts.
        forward_bytes, backward_bytes: communication volume of one device of the busiest stage in a
            step, over all micro-batches.
        search_seconds, capture_seconds: durations of the search and of the capture, in seconds.
        graph: the captured model; None for a plan from a file until `parallelize` captures the
            model.
        dry_runs: cached dry runs of the chunks.
        timed_step: cluster and step for which a time-based search minimized seconds; None for other
            searches.
    """

    mesh: DeviceMatrix
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
    returned: tuple[RedistributionRow, ...]
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
    chunk_seconds: tuple[ChunkSeconds, ...] = ()
    # Not compared: a saved plan equals the plan that it was saved from.
    saved_memory: Memory | None = field(default=None, compare=False, repr=False)
    saved_choices: tuple[AxisChoice, ...] = field(default=(), compare=False, repr=False)
    saved_gap: float | None = field(default=None, compare=False, repr=False)
    memory_limit: int | None = None
    search_seconds: float = 0.0
    capture_seconds: float = 0.0
    optimizer: str | torch.optim.Optimizer = field(default="adamw", compare=False, repr=False)
    graph: Graph | None = field(default=None, compare=False, repr=False)
    dry_runs: DryRunCache = field(default_factory=DryRunCache, compare=False, repr=False)
    timed_step: TimedStep | None = field(default=None, compare=False, repr=False)

    @property
    def devices(self) -> int:
        """Total number of devices, over all pipeline stages."""
        return self.mesh.num_devices * self.pipeline.stages

    @property
    def decisions(self) -> Decisions:
        """The sharding decisions from which the model is partitioned and lowered."""
        return Decisions(
            cuts=self.cuts,
            storage=self.storage,
            outputs=self.outputs,
            arrivals=self.arrivals,
            sharding=self.sharding,
            bucket_bytes=self.bucket_bytes,
            recompute=self.recompute,
        )

    # A cached property also on a frozen dataclass: it stores its value in the `__dict__`.
    @cached_property
    def analysis(self) -> PlanAnalysis:
        """Memory, alternative cuts and optimality gap, each computed once from the captured graph.

        Raises:
            PlanError: if the plan comes from a file, and so has no graph.
        """
        if self.graph is None:
            raise PlanError(
                "a plan from a file has no graph, which a dry run needs\nplan the model with"
                " `sw.plan`"
            )
        return PlanAnalysis(
            Partitioned(self.graph, self.mesh, self.decisions, self.pipeline),
            self.optimizer,
            self.dry_runs,
            self.timed_step,
            # Modes that do not weigh memory record no `mem_coeff`.
            self.options.get("mem_coeff", DEFAULT_MEM_COEFF),
        )

    @property
    def partitioned(self) -> Partitioned:
        """The captured model, partitioned as planned into chunks with their communication.

        Raises:
            PlanError: if the plan comes from a file, and so has no graph.
        """
        return self.analysis.partitioned

    def partition(self, graph: Graph) -> Partitioned:
        """Return `graph` partitioned as planned, on the device matrix with the fewest axes, for
        execution.

        Axes that always shard together are merged, so that each collective runs on one group.
        """
        # The chunks and the communication of the planned graph have been derived already.
        if graph is self.graph:
            return fold_axes(self.partitioned)
        return fold_axes(Partitioned(graph, self.mesh, self.decisions, self.pipeline))

    @property
    def computed_in(self) -> torch.dtype | None:
        """`compute_dtype` as a `torch.dtype`; None for no cast."""
        return None if self.compute_dtype is None else getattr(torch, self.compute_dtype)

    @property
    def options_text(self) -> str:
        """The options of the search mode as text: `mem_coeff=0.1, order=weight`."""
        return ", ".join(f"{key}={value}" for key, value in self.options.items())

    @property
    def bytes(self) -> int:
        """Communication volume of a training step in bytes, of one device of the busiest stage."""
        return self.forward_bytes + self.backward_bytes

    @property
    def step_time(self) -> float | None:
        """Predicted time of a training step in seconds; None if no cluster was named."""
        return None if self.step is None else self.step.seconds

    @property
    def global_batch(self) -> int | None:
        """Samples per step over all micro-batches, from the first input tensor with a batch
        dimension; None if no input has one."""
        # Empty for dimension 0 of all inputs; None for an input without samples.
        dims = self.pipeline.batch_dims or (0,) * len(self.inputs)
        samples = (
            leaf["shape"][dim]
            for leaf, dim in zip(self.inputs, dims, strict=True)
            # Only tensors are dictionaries; other leaves are the values themselves.
            if isinstance(leaf, dict) and leaf["shape"] and dim is not None
        )
        of_micro_batch = next(samples, None)
        return None if of_micro_batch is None else of_micro_batch * self.pipeline.micro_batches

    @property
    def sequence(self) -> int | None:
        """Tokens per sample, from dimension 1 of the (batch, sequence) input of an embedding.

        None if no embedding reads a two-dimensional input.
        """
        for row in self.operators:
            for _, shape, origin in row.inputs:
                # Token ids of shape (batch, sequence).
                if row.operator == "aten.embedding" and origin == "input" and len(shape) == 2:
                    return shape[1]
        return None

    @property
    def unused_axes(self) -> tuple[int, ...]:
        """Indices of the mesh axes over which all operators are replicated."""
        # Storage does not count: an axis that only shards parameters repeats all computation.
        used = {a for factors in self.cuts.values() for axes in factors.values() for a in axes}
        return tuple(a for a in range(len(self.mesh.device_matrix)) if a not in used)

    @property
    def strategies(self) -> dict[str, Strategy]:
        """Number of shards of each dimension of each input, by operator.

        Dimensions are in PyTorch's order: a linear layer's weight is (out_features, in_features).
        """
        return {row.name: row.strategy for row in self.operators}

    @property
    def without_rule(self) -> tuple[str, ...]:
        """Names of the operators that are replicated because they have no sharding rule."""
        return tuple(row.name for row in self.operators if row.rule is None)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameter shards that one device stores; the maximum over stages."""
        # By stage. Sets of names: operators of one stage may read one parameter, as with tied
        # embeddings.
        stages: dict[int, set[str]] = {}
        for row in self.operators:
            names = (name for name, _, origin in row.inputs if origin == "parameter")
            stages.setdefault(row.stage, set()).update(names)
        return max(
            (sum(map(self._compute_local_parameter_bytes, names)) for names in stages.values()),
            default=0,
        )

    def _compute_local_parameter_bytes(self, name: str) -> int:
        shape, dtype = self.parameters[name]
        shard = TensorLayout(self.mesh, self.storage[name]).shard_shape(shape)
        # In the dtype in which it is stored, not in `compute_dtype`.
        return prod(shard) * int(getattr(torch, dtype).itemsize)

    @property
    def memory(self) -> Memory:
        """Peak bytes per device of each stage in a training step with the plan's optimizer.

        Predicted by a dry run of the program on the meta device; `memory_with` takes other
        optimizers.

        Raises:
            PlanError: if the plan comes from a file, and so has no graph.
        """
        return self.analysis.memory

    @property
    def known_memory(self) -> Memory | None:
        """Predicted memory per device; None if unknown.

        A plan without a graph returns the memory saved in its file.
        """
        # Memory is that of a training step, which a plan for evaluation does not run.
        return self.memory if self.graph is not None and self.training else self.saved_memory

    @property
    def over_limit(self) -> bool:
        """Whether a device exceeds the memory limit; False without a limit or predicted memory."""
        memory, limit = self.known_memory, self.memory_limit
        return memory is not None and limit is not None and memory.peak > limit

    @property
    def choices(self) -> tuple[AxisChoice, ...]:
        """Alternative cuts of the operators whose cuts the search chose by cost.

        A plan without a graph returns the alternatives saved in its file.
        """
        # Costs in seconds need the cluster of the search, which plan files do not contain.
        timed = self.options.get("cost_model") == "time"
        if self.graph is None or (timed and self.timed_step is None):
            return self.saved_choices
        return self.analysis.choices

    @property
    def gap(self) -> float | None:
        """Optimality gap: 0.02 means that the plan costs at most 2 % more than the best plan with
        the same device matrix, stages and micro-batches.

        Compares the cost of the time-based search with a proven lower bound. None without a cluster
        or a lower bound; a plan without a graph returns the gap saved in its file.
        """
        if self.graph is None or self.timed_step is None:
            return self.saved_gap
        return self.analysis.gap

    def derive(self, on_progress: OnProgress) -> None:
        """Compute and cache `memory` and `gap`, the slowest properties, with progress reports.

        Args:
            on_progress: callback that receives the completed fraction of each property.
        """
        # A plan from a file has both from the file.
        if self.graph is None:
            return
        with self.analysis.reporting(on_progress):
            # The analysis caches both.
            _ = self.known_memory, self.gap

    @cached_property
    def choices_of(self) -> dict[str, list[AxisChoice]]:
        """Alternative cuts by operator name, one entry per mesh axis."""
        by_name: dict[str, list[AxisChoice]] = {}
        for choice in self.choices:
            for name in choice.operators:
                by_name.setdefault(name, []).append(choice)
        return by_name

    @cached_property
    def neighbors(self) -> tuple[dict[str, OperatorRow], dict[str, list[tuple[int, OperatorRow]]]]:
        """A dict from operator name to row, and a dict from value name to the operators that read
        the value.

        Each reader is (index of the value among the operator's inputs, row of the operator).
        """
        consumers: dict[str, list[tuple[int, OperatorRow]]] = {}
        for row in self.operators:
            for input_index, (name, _, _) in enumerate(row.inputs):
                consumers.setdefault(name, []).append((input_index, row))
        return {row.name: row for row in self.operators}, consumers

    def memory_with(self, optimizer: str | torch.optim.Optimizer) -> Memory:
        """Predict the peak bytes per device of each stage in a training step with an optimizer.

        Args:
            optimizer: `sgd`, `momentum`, `adam`, `adamw`, `muon`, or an instance.

        Raises:
            PlanError: if the optimizer is unknown, or the plan has no graph.
        """
        return memory(self.partitioned, optimizer, self.dry_runs)

    def timeline(self, cluster: Cluster | None = None) -> Timeline:
        """Return the timeline of a step, with the bubbles of each pipeline stage; `print` draws it.

        Args:
            cluster: the cluster whose devices and links determine the time of a chunk; without a
                cluster, time is proportional to the FLOPs of the chunk's matrix products.

        Raises:
            PlanError: if the plan comes from a file, and so has no graph.
        """
        return predicted_timeline(self.partitioned, cluster)

    def row(self, name: str) -> OperatorRow:
        """Return the row of the operator `name`.

        Raises:
            PlanError: if the plan has no operator of that name; suggests similar names.
        """
        rows, _ = self.neighbors
        if name not in rows:
            similar = get_close_matches(name, rows, n=3, cutoff=0.3)
            hint = f"a similar name: {', '.join(similar)}" if similar else "a name of `plan.dump()`"
            raise PlanError(f"the plan has no operator {name!r}\nuse {hint}")
        return rows[name]


def target_text(op: Op) -> str:
    """Return the name of an operator's target, without `.default`: `aten.linear`."""
    # Functions of this package, and calls of `local_map`, have Python names.
    target = str(op.target) if isinstance(op.target, OpOverload) else op.target.__name__
    return target.removesuffix(".default")


def dtype_name(value: Value) -> str:
    """Return the name of the dtype in which a value is stored or passed: `float32`."""
    return str(value.stored_dtype).removeprefix("torch.")
