"""The options that the planner tries in turn under a memory limit, and the error if no plan
fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.core.cost.memory import Memory, StageMemory, bytes_text
from shardwright.core.cost.pipeline_actions import check_pipelining
from shardwright.core.partition.decisions import ZERO_LEVELS, OptimizerParallel
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.planner.options import AUTO_RECOMPUTE, PlanOptions
from shardwright.errors import MemoryLimitError, PlanError

MEM_COEFF_FACTOR, MAX_MEM_COEFF = 8.0, 1e4
"""Factor between the `mem_coeff` of consecutive attempts, and its maximum."""


@dataclass(frozen=True)
class Attempt:
    """Planner options for one attempt to meet the memory limit.

    Args:
        options: options with which the planner searches.
        recompute: whether the planner may recompute operators that the user did not mark.
    """

    options: PlanOptions
    recompute: bool

    def __str__(self) -> str:
        return self.options.describe(self.recompute)


AttemptGroups = Sequence[Sequence[Attempt]]
"""Attempts of one search phase, grouped by `mem_coeff` in ascending order: plans with a larger
`mem_coeff` are rarely faster."""


def attempt_phases(options: PlanOptions) -> list[AttemptGroups]:
    """Return the options to try under the memory limit, in phases.

    A phase is searched only if no plan of an earlier phase fits. On a cluster all options are in
    one phase, and the predicted step time decides. Without a cluster no step times are predicted,
    so each change of `options` is a separate phase, the least intrusive first: ZeRO levels,
    recomputation, a larger `mem_coeff`, more stages.
    """
    if options.limit is None:
        # Without a limit every plan fits, so nothing is changed to save memory.
        return [[[Attempt(options, False)]]]
    recompute_first = options.recompute == AUTO_RECOMPUTE
    phases: list[AttemptGroups] = []
    # Ascending: the smallest `mem_coeff` that fits favors data parallelism most.
    if options.has_auto_mem_coeff:
        coefficients, limit = options.mem_coeffs, options.limit
        fixed = [replace(options, mem_coeff=value, memory_limit=limit) for value in coefficients]
        # Further changes start from the smallest value, which costs the least step time.
        phases, options = [[[Attempt(each, recompute_first)]] for each in fixed], fixed[0]
    if options.cluster is not None:
        larger = (options, *_options_with_larger_mem_coeffs(options))
        return [
            *phases,
            # Every attempt may recompute: the queue compares their predicted step times.
            [[Attempt(each, True) for each in _options_at_hsdp_levels(base)] for base in larger],
        ]
    levels = _options_at_hsdp_levels(options)
    phases += [[[Attempt(each, recompute_first)]] for each in levels]
    # The highest level needs the least memory, so all further changes start from it.
    for staged in (levels[-1], *_options_with_more_stages(levels[-1])):
        phases += [
            [[Attempt(each, True)]] for each in (staged, *_options_with_larger_mem_coeffs(staged))
        ]
    return phases


def _options_at_hsdp_levels(options: PlanOptions) -> tuple[PlanOptions, ...]:
    """Return `options` with the requested ZeRO level and with each higher level."""
    return (options, *_options_at_higher_hsdp_levels(options))


def _options_at_higher_hsdp_levels(options: PlanOptions) -> Iterator[PlanOptions]:
    sharding = options.sharding
    next_level = ZERO_LEVELS.index(sharding.level) + 1 if sharding is not None else 0
    for level in ZERO_LEVELS[next_level:]:
        # `level2` differs from `level1` only in reducing gradients after each micro-batch instead
        # of once per step.
        if level == "level2" and options.num_micro_batches == 1:
            continue
        yield replace(options, hsdp=replace(sharding or OptimizerParallel(), level=level))


def _options_with_larger_mem_coeffs(options: PlanOptions) -> Iterator[PlanOptions]:
    # Modes that do not weigh memory would find the same plan with every value.
    if "mem_coeff" not in options.search_options:
        return
    coefficient = options.fixed_mem_coeff * MEM_COEFF_FACTOR
    while coefficient <= MAX_MEM_COEFF:
        yield replace(options, mem_coeff=coefficient)
        coefficient *= MEM_COEFF_FACTOR


def _options_with_more_stages(options: PlanOptions) -> Iterator[PlanOptions]:
    """Yield `options` with every larger number of stages that divides the number of devices and
    that the schedule can run with the requested micro-batches.

    Yields nothing if `stage_config` fixes the stages.
    """
    if options.stage_config is not None or not isinstance(options.stages, int):
        return
    for stages in range(options.stages + 1, options.devices + 1):
        # Every stage has an equal share of the devices.
        if options.devices % stages == 0:
            try:
                check_pipelining(PipelineSpec(stages, options.num_micro_batches, options.schedule))
            except PlanError:
                # The schedule cannot run this number of stages.
                continue
            yield replace(options, stages=stages)


def memory_limit_error(attempt: Attempt, limit: int, memory: Memory) -> MemoryLimitError:
    """Return the error that no plan of a model fits into `limit` bytes per device.

    Args:
        attempt: attempt whose plan needs the least memory.
        memory: memory of the plan of `attempt`.
    """
    stage, options = memory.largest_stage, attempt.options
    on_stage = f" on stage {stage.stage}" if len(memory.stages) > 1 else ""
    count = options.num_micro_batches
    with_count = f"{count} micro-batches, " if count > 1 else ""
    # The measured peak, as the user can set it as the limit and gets this plan.
    message = (
        f"no plan for {options.devices} devices fits into memory_limit="
        f"{bytes_text(limit)}; the smallest one needs {bytes_text(memory.peak)}"
        f" ({memory.peak:,} bytes){on_stage}, with {with_count}{attempt}:"
        f" {_describe_memory_breakdown(stage)}\n"
        f"set memory_limit={memory.peak}{_describe_other_remedies(options, limit, stage)}"
    )
    return MemoryLimitError(message, memory.peak)


MAX_DOUBLINGS = 10
"""Maximum number of doublings of the devices or micro-batches that an error message suggests."""


def _describe_other_remedies(options: PlanOptions, limit: int, stage: StageMemory) -> str:
    """Return the end of an error message: more devices, stages or micro-batches with which a plan
    would fit, each with an estimate of the memory.

    Args:
        limit: memory limit in bytes per device.
        stage: memory of the largest stage in the plan that needs the least memory.
    """
    # The inputs of all micro-batches are on the device throughout the step.
    micro_batch_bytes = stage.activations + stage.temporary
    fixed_bytes, remedies = stage.peak - micro_batch_bytes, ""
    # An estimate: twice as many devices halve everything that a device stores.
    devices, needed = _double_until_memory_fits(options.devices, 0, stage.peak, limit)
    if needed <= limit:
        remedies += f", or use {devices} devices (about {bytes_text(needed)} each)"
    # `stages='auto'` compares predicted step times, and tries at most as many stages as there are
    # micro-batches.
    if options.cluster is not None and options.stages == 1 < options.num_micro_batches:
        remedies += ", or try stages='auto'"
    micro_batches, needed = _double_until_memory_fits(
        options.num_micro_batches, fixed_bytes, micro_batch_bytes, limit
    )
    if needed <= limit:
        return remedies + f", or use {micro_batches} micro-batches (about {bytes_text(needed)})"
    return (
        f"{remedies}; more micro-batches are not enough, as parameters, gradients, optimizer"
        f" state and inputs need {bytes_text(fixed_bytes)}"
    )


def _double_until_memory_fits(
    count: int, fixed_bytes: int, halved_bytes: int, limit: int
) -> tuple[int, int]:
    """Double a number of devices or micro-batches until memory fits, at most `MAX_DOUBLINGS` times.

    Args:
        count: the number of devices or micro-batches.
        fixed_bytes: bytes per device that do not depend on `count`.
        halved_bytes: bytes per device that each doubling halves.
        limit: memory limit in bytes per device.

    Returns:
        (doubled count, estimated bytes per device).
    """
    for doublings in range(1, MAX_DOUBLINGS + 1):
        needed = fixed_bytes + (halved_bytes >> doublings)
        if needed <= limit:
            break
    # The last doubling may not fit either, which the caller sees by `needed`.
    return count << doublings, needed


def _describe_memory_breakdown(stage: StageMemory) -> str:
    sizes = ((name, getattr(stage, name)) for name in StageMemory.NAMES)
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes if size)
