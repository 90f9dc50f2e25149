"""Compare a planned program on simulated ranks with the user's module on one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.api.float64_module import convert_float64_errors, with_float64_copy
from shardwright.core.api.not_distributed import check_not_planned
from shardwright.core.api.random_operators import find_random_ops, refuse_untagged_random_operators
from shardwright.core.api.trained_steps import (
    TOLERANCE,
    Differences,
    EagerTraining,
    Rounding,
    TrainedSteps,
    interpreted,
    train_program,
)
from shardwright.core.capture.capturable import check_arguments, check_module
from shardwright.core.capture.capture import capture
from shardwright.core.capture.filled_caches import without_new_cached_tensors
from shardwright.core.capture.flex_attention import flex_attention_by_operators
from shardwright.core.deferred import values_of
from shardwright.core.graph.float64 import (
    CastsToFloat64,
    float64_by_default,
    graph_in_float64,
    in_float64,
    paired_operators,
)
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.local_map import is_opaque
from shardwright.core.micro_batches.batch_norms import PER_MICRO_BATCH
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.core.parallel.simulate_pipeline import simulate_stages
from shardwright.core.parallel.simulate_ranks import Outcome, simulate, simulate_step
from shardwright.core.parallel.train_step import check_loss_of_batch, loss_of, loss_weight
from shardwright.core.parallel.whole_batch_values import (
    GlobalBatchValues,
    count_local_batches,
    micro_batches_of_ranks,
    prologue_bytes,
)
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan import Plan
from shardwright.core.planner.pipeline import Pipeline
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.micro_batches import (
    empty_full_batch,
    micro_batch,
)
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError

ROUNDING_FACTOR, MAX_ROUNDING_DIFFERENCE = 100.0, 1e-6
"""Largest difference that counts as rounding: `ROUNDING_FACTOR` times the effect of perturbing the
last digit of every result, but at most `MAX_ROUNDING_DIFFERENCE`. The maximum is far above float64
precision because normalizing nearly equal numbers amplifies rounding a million times."""


@dataclass(frozen=True)
class Check:
    """Comparison of two training steps of a planned program and of the user's module.

    The program runs on simulated ranks. Program and module train by SGD with momentum, on the
    gradients of all outputs or, with micro-batches, of the loss.

    Args:
        loss: the module's loss in the first step; None if the module returns no scalar loss.
        loss_difference: largest difference of any output, relative to the largest element of the
            output if that exceeds 1.
        gradient_difference: largest difference of any parameter's gradient, relative to the
            largest element of the gradient if that exceeds 1; infinite if only the program or only
            the module has a gradient.
        worst_parameter: name of the parameter with `gradient_difference`.
        replica_difference: largest absolute difference between replicas.
        counted_bytes: bytes that one device sent, forward and backward.
        planned_bytes: bytes that the plan predicts, forward and backward.
        state_difference: largest difference of any parameter or buffer after both steps, relative
            to its largest element if that exceeds 1.
        worst_state: name of the parameter or buffer with `state_difference`.
        cause: cause of a difference: `capture` if the captured operators already differ from the
            module on one device, else `split`; empty without a difference.
        opaque_operators: names of `local_map` operators whose gradients and saved tensors are
            unknown when the model is planned. Their planned backward bytes are an upper bound, and
            missing gradients of their parameters count as zeros.
        random_operators: names of operators that draw random numbers; if there are any, values are
            not compared.
        rounding: if there is a difference, the largest difference on one device between runs with
            and without perturbing the last digit of every operator's result.
    """

    loss: float | None
    loss_difference: float
    gradient_difference: float
    worst_parameter: str
    replica_difference: float
    counted_bytes: tuple[int, int]
    planned_bytes: tuple[int, int]
    state_difference: float = 0.0
    worst_state: str = ""
    cause: str = ""
    opaque_operators: tuple[str, ...] = ()
    random_operators: tuple[str, ...] = ()
    rounding: float = 0.0

    def passes(self, tolerance: float = TOLERANCE) -> bool:
        """Whether the program sent the planned bytes, and all differences are at most `tolerance`
        or explained by rounding. For a model with random operators, only replicas are compared."""
        worst = self.replica_difference
        if not self.random_operators:
            values = (self.loss_difference, self.gradient_difference, self.state_difference)
            worst = max(worst, *values)
        # Bytes have no tolerance: predictions and programs read the same list of transfers.
        tolerance = max(tolerance, min(ROUNDING_FACTOR * self.rounding, MAX_ROUNDING_DIFFERENCE))
        return worst <= tolerance and self._has_planned_communication

    def __str__(self) -> str:
        """Return one line per difference, followed by the verdict."""
        loss = "none" if self.loss is None else f"{self.loss:.9g}"
        counted, planned = self.counted_bytes, self.planned_bytes
        return "\n".join(
            [
                f"loss on one device    {loss}",
                f"loss difference       {self.loss_difference:.1e}",
                f"gradient difference   {self.gradient_difference:.1e} ({self.worst_parameter})",
                f"after two steps       {self.state_difference:.1e} ({self.worst_state})",
                f"replica difference    {self.replica_difference:.1e}",
                f"bytes per device      {sum(counted):,} counted, {sum(planned):,} planned",
                self._format_verdict(),
            ]
        )

    @property
    def _has_planned_communication(self) -> bool:
        if not self.opaque_operators:
            return self.counted_bytes == self.planned_bytes
        forward, backward = zip(self.counted_bytes, self.planned_bytes, strict=True)
        # Opaque operators may send less in the backward pass than is planned.
        return forward[0] == forward[1] and backward[0] <= backward[1]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _format_verdict(self) -> str:
        if self.random_operators:
            first, *more = self.random_operators
            drawing = f"{first} and {len(more)} more draw" if more else f"{first} draws"
            equal = "equal on replicas" if self.passes() else "NOT equal"
            return f"{equal}; values not compared, as {drawing} random numbers: set dropout to 0"
        if self.passes():
            return "equal"
        return f"NOT equal, by the {self.cause}" if self.cause else "NOT equal"


def check(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, plan: Plan
) -> Check:
    """Compare the planned program on simulated ranks with the user's module, in float64.

    Runs in this process, and compares outputs, gradients, and parameters and buffers after two
    training steps. Values that depend on random numbers cannot be compared: plan the model in eval
    mode, or set dropout to 0.

    Args:
        net: the model that was planned.
        args, kwargs: arguments of a call with the global batch.
        plan: a plan of `net`.

    Raises:
        CaptureError: if `args` is not a tuple, or `kwargs` not a mapping of names.
        StrategyError: if the loss is not a sum or mean over the plan's micro-batches.
        PlanError: if the plan is for another model, `net` is planned, parameters are uninitialized,
            a process group is running, the module fails in float64, `forward` registers hooks on
            parameters, or an operator draws random numbers without the tag
            `nondeterministic_seeded`.
    """
    check_module(net)
    check_arguments(args, kwargs)
    check_not_planned(net)
    # A `Pipeline` adds no operators to the model.
    net = net.net if isinstance(net, Pipeline) else net
    # A plan that was loaded from a file has no graph.
    captured, means = plan.graph, plan.pipeline.averages_micro_batches
    if captured is None or (means and captured.whole_batch is None):
        captured = _capture_micro_batch(net, args, kwargs, plan, plan.computed_in)
    plan.check_fits(captured)
    if captured.python is not None and captured.python.capture.registers_hooks:
        raise PlanError(
            "`sw.check` cannot compare this model: `forward` registers hooks on parameters, in the"
            " Python code around the program, which simulated ranks do not run\n"
            "to check the model, register them before `plan`, outside of `forward`; training"
            " calls them either way"
        )
    if means:
        check_loss_of_batch(captured, plan.pipeline.micro_batches)
    values, call = _collect_initialized_tensors(net), (args, kwargs)
    # In float32, rounding in reductions over ranks would hide a missing term.
    # Leaves that require a gradient keep it: without parameters, nothing else has a backward pass.
    leaves = [
        in_float64(leaf).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in pytree.tree_leaves((args, kwargs or {}))
    ]
    # The caller's random numbers and cached tensors (tables of positions, masks) must not change.
    with (
        float64_by_default(),
        torch.random.fork_rng(),
        without_new_cached_tensors(),
        flex_attention_by_operators(),
    ):
        state = {name: in_float64(tensor) for name, tensor in values.items()}

        def compare(graph: Graph, module: nn.Module, finds_cause: bool) -> Check:
            partitioned = plan.partition(_drop_effect_outputs(graph))
            return _compare_training(partitioned, module, state, leaves, finds_cause)

        # Most models are the same in float64, so that a second capture is seldom needed.
        # An error may come from a constant of the captured dtype, which the second capture does not
        # have.
        with suppress(PlanError), with_float64_copy(net, values) as module:
            result = compare(graph_in_float64(captured), module, False)
            if result.passes():
                return result
        # A capture in float64 has the constants that depend on the dtype, e.g. `finfo(dtype).eps`.
        with (
            with_float64_copy(net, values) as module,
            convert_float64_errors(plan.pipeline.micro_batches),
            CastsToFloat64(),
        ):
            double_args, double_kwargs = pytree.tree_unflatten(leaves, captured.in_spec)
            double_graph = _capture_micro_batch(
                copy.deepcopy(module), double_args, double_kwargs, plan, None, module
            )
        if not paired_operators(captured, double_graph):
            # The model is in another mode than planned, or was changed after planning.
            plan.check_fits(_capture_micro_batch(net, *call, plan, plan.computed_in))
        with with_float64_copy(net, values) as module:
            return compare(graph_in_float64(captured, double_graph), module, True)


def _drop_effect_outputs(graph: Graph) -> Graph:
    """Return the graph without outputs that are side effects on Python objects."""
    return replace(graph, outputs=graph.outputs[: graph.out_spec.num_leaves])


def _compare_training(
    partitioned: Partitioned,
    module: nn.Module,
    state: dict[str, Tensor],
    leaves: list[Any],
    finds_cause: bool,
) -> Check:
    graph, pipeline = partitioned.graph, partitioned.pipeline
    count = pipeline.micro_batches
    micro_batch_leaves = [
        micro_batch(leaves, number, count, pipeline.batch_dims) for number in range(count)
    ]
    eager = _make_eager_training(partitioned, module, leaves)
    with convert_float64_errors(len(eager.calls)):
        # First, as the run below trains the module itself.
        random_names = find_random_ops(eager)
        eager_steps, output_gradients = eager.run()
    outcomes: list[Outcome] = []

    def run_planned(tensors: Mapping[str, Tensor]) -> Outcome:
        # Without micro-batches the gradients of all outputs are compared; a training step has only
        # the loss.
        if count == 1:
            # The state has parameters and buffers, so it is passed as both.
            outcomes.append(
                simulate(partitioned, tensors, tensors, leaves, output_gradients=output_gradients)
            )
        else:
            run = simulate_stages if pipeline.stages > 1 else simulate_step
            outcomes.append(run(partitioned, tensors, tensors, leaves))
        return outcomes[-1]

    opaque = tuple(op.name for op in graph.ops if is_opaque(op.target))
    differences = Differences.between(
        train_program(run_planned, graph, state),
        eager_steps,
        zeros=_find_parameters_of_inputs(graph, opaque),
    )
    # The bytes of the first step, as all steps run the same program.
    counted, bytes_planned = _select_stage_bytes(partitioned, outcomes[0])
    result = Check(
        loss=_get_first_loss(graph, eager_steps),
        loss_difference=differences.output,
        gradient_difference=differences.gradient,
        worst_parameter=differences.worst_parameter,
        state_difference=differences.state,
        worst_state=differences.worst_state,
        replica_difference=max(outcome.replica_difference for outcome in outcomes),
        counted_bytes=counted,
        planned_bytes=bytes_planned,
        opaque_operators=opaque,
        random_operators=random_names,
    )
    if random_names or differences.largest <= TOLERANCE or not finds_cause:
        return result
    # Finding the cause takes several more training runs, so only differences are investigated.
    refuse_untagged_random_operators(graph, eager)
    # Without cuts every value is replicated, so that the graph runs on one device.
    alone = replace(partitioned, decisions=Decisions(cuts={}, storage={}))
    whole_batch_values = GlobalBatchValues(alone, Devices.of_rank(partitioned.mesh, 0))(
        leaves, state
    )
    one_device = interpreted(
        graph, micro_batch_leaves, whole_batch_values, loss_weight(partitioned), output_gradients
    )
    interpreted_steps = train_program(one_device, graph, state)
    # The same run with perturbed results shows how much rounding alone can change.
    with Rounding():
        perturbed_steps = train_program(one_device, graph, state)
    rounding = Differences.between(perturbed_steps, interpreted_steps).largest
    capture_difference = Differences.between(interpreted_steps, eager_steps).largest
    # If the graph on one device differs from the module nearly as much, sharding is not the cause.
    cause = "capture" if capture_difference > differences.largest / 2 else "split"
    result = replace(result, rounding=rounding)
    # A difference that is explained by rounding has no cause.
    return result if result.passes() else replace(result, cause=cause)


def _make_eager_training(
    partitioned: Partitioned, module: nn.Module, leaves: list[Any]
) -> EagerTraining:
    """Return the reference run: eager training of the user's module on the global batch."""
    graph, pipeline = partitioned.graph, partitioned.pipeline
    trains_loss = pipeline.micro_batches > 1
    # Raises an error unless there is one loss, which micro-batches need.
    if trains_loss:
        loss_of(graph)
    # The reference is the whole batch: micro-batches must not change the loss.
    shards = count_local_batches(partitioned)
    of_ranks = micro_batches_of_ranks(leaves, shards, pipeline)
    splits_batch_norms = pipeline.averages_micro_batches and pipeline.batch_norm == PER_MICRO_BATCH
    return EagerTraining(
        module,
        graph,
        of_ranks if pipeline.loss_reduction == "sum" else [leaves],
        trains_loss=trains_loss,
        batch_norm_calls=of_ranks if splits_batch_norms else (),
        shards=shards,
    )


def _collect_initialized_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, with deferred tensors initialized.

    Raises:
        PlanError: if a tensor is on the meta device without a recorded initialization.
    """
    named: dict[str, Tensor] = dict(net.named_parameters())
    named |= dict(net.named_buffers())
    named |= values_of(named, lambda name, tensor: tensor)
    for name, tensor in named.items():
        if tensor.is_meta:
            raise PlanError(
                f"`sw.check` needs initialized tensors, but {name!r} is on the meta device\n"
                "build the model inside `sw.no_init_parameters()`, or on a real device"
            )
    return named


def _capture_micro_batch(
    net: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    plan: Plan,
    compute_dtype: torch.dtype | None,
    original: nn.Module | None = None,
) -> Graph:
    """Capture the model for one micro-batch, given arguments with the global batch."""
    leaves, spec = pytree.tree_flatten((args, kwargs or {}))

    def captured(leaves: list[Any]) -> Graph:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return capture(net, args, kwargs, compute_dtype, original=original)

    count, dims = plan.pipeline.micro_batches, plan.pipeline.batch_dims
    piece = micro_batch(leaves, 0, count, dims)
    graph = captured(piece)
    if not plan.pipeline.averages_micro_batches:
        return graph
    return with_whole_batch(
        graph,
        count,
        lambda n: captured(empty_full_batch(piece, n, dims)),
        plan.pipeline.batch_norm,
    )


def _find_parameters_of_inputs(graph: Graph, operators: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters on which the inputs of `operators` depend."""
    read = {value for name in operators for value in graph.by_name[name].inputs}
    # Backwards, so that one pass over the operators suffices.
    for op in reversed(graph.ops):
        if not read.isdisjoint(op.outputs):
            read.update(op.inputs)
    return frozenset(value.name for value in graph.parameters if value in read)


def _select_stage_bytes(
    partitioned: Partitioned, outcome: Outcome
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return counted and planned bytes that a device of one stage sends, each (forward, backward).

    Selects a stage in which the two differ; without one, the stage with the most bytes.
    """
    # Simulated stages do not count the inputs that the prologue gathers.
    gathered = prologue_bytes(partitioned, 0) if partitioned.pipeline.stages == 1 else 0
    planned = [(forward + gathered, backward) for forward, backward in partitioned.step_bytes]
    pairs = list(zip(outcome.stage_bytes, planned, strict=True))
    return max(pairs, key=lambda pair: (pair[0] != pair[1], sum(pair[1])))


def _get_first_loss(graph: Graph, steps: TrainedSteps) -> float | None:
    if graph.loss is None:
        return None
    # The first step's loss: the second step trains changed parameters.
    outputs = steps.outputs[0]
    # With micro-batches the only output is the loss of the batch.
    alone = len(outputs) != len(graph.output_values)
    return float(outputs[0 if alone else graph.output_values.index(graph.loss)])
