"""Divide a model into consecutive pipeline chunks of nearly equal work.

The work of a chunk is the multiply-adds of its main operators plus the elements of its parameters,
or seconds if these are known. Among the divisions whose largest chunk is within a tolerance of the
smallest possible, the division with the least communication volume between chunks is chosen. In a
transformer, one value crosses a boundary between layers, but two cross a boundary within a layer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby, pairwise
from math import prod

from shardwright.core.cost.flops import forward_flops
from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Graph, Op, Origin
from shardwright.core.graph.split import assign_neighbors, updates_between_micro_batches
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES, ScheduleSpec
from shardwright.core.rules import rule_of
from shardwright.errors import StrategyError

WORK_TOLERANCE = 0.1
"""Fraction by which the work of the largest chunk may exceed its minimum, in order to decrease the
communication volume between chunks."""

SECONDS_TOLERANCE = 0.01
"""Fraction by which the seconds of the slowest chunk may exceed their minimum, in order to decrease
the communication volume between chunks. Smaller than `WORK_TOLERANCE`, as every micro-batch waits
for the slowest chunk and communication between chunks takes comparatively little time."""


def balanced_chunks(
    graph: Graph, count: int, work: Sequence[float] | None = None
) -> dict[str, int]:
    """Return the chunk index of each operator, by name, for `count` chunks of nearly equal work.

    Args:
        work: seconds of each operator; by default its multiply-adds plus the elements of its
            parameters.

    Raises:
        StrategyError: if fewer than `count` operators have work.
    """
    # Without a cluster there are no seconds; multiply-adds and elements of parameters stand for
    # them.
    op_work = list(work) if work is not None else operator_work(graph)
    positions = _valid_chunk_boundaries(graph)
    weights = [sum(op_work[start:end]) for start, end in pairwise(positions)]
    # A chunk without work, such as a view, would occupy a stage for nothing.
    usable = sum(weight > 0 for weight in weights)
    if usable < count:
        raise StrategyError(
            f"cannot divide the model into {count} pipeline chunks: only {usable} of its operators"
            f" have parameters or multiply-adds\nuse at most {usable} stages, or assign modules to"
            " stages with stage_config"
        )
    # Prefix sums: the work of any chunk is a difference of two of them.
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    tolerance = WORK_TOLERANCE if work is None else SECONDS_TOLERANCE
    limit = (1 + tolerance) * _min_work_of_largest_chunk(total, weights, count)
    crossing = _bytes_crossing_positions(graph)
    ends = _cheapest_chunk_ends(total, [crossing[position] for position in positions], count, limit)
    # Operator `index` ends at position `index + 1`, so that the first chunk that ends there or
    # later has it.
    chunk_ends = [positions[end] for end in ends]
    return {op.name: bisect_left(chunk_ends, index + 1) for index, op in enumerate(graph.ops)}


def _valid_chunk_boundaries(graph: Graph) -> list[int]:
    """Return the positions where a chunk may end; position `i` is in front of operator `i`.

    If every micro-batch updates a buffer, no chunk ends between the operators that read the buffer
    and the operator that updates it: otherwise the next micro-batch could read the old value.
    """
    op_index = {op.name: index for index, op in enumerate(graph.ops)}
    joined: set[int] = set()
    for buffer, value in updates_between_micro_batches(graph):
        producer = graph.producer.get(value)
        if producer is not None:
            consumer_indices = (op_index[op.name] for op, _ in graph.consumers[buffer])
            connected = [op_index[producer.name], *consumer_indices]
            # The position in front of the first of these operators stays valid, as does that behind
            # the last.
            joined.update(range(min(connected) + 1, max(connected) + 1))
    return [position for position in range(len(graph.ops) + 1) if position not in joined]


def operator_work(graph: Graph) -> list[float]:
    """Return for each operator its multiply-adds plus the elements of its parameters.

    A parameter that several operators read counts only for the first of these operators.
    """
    counted_parameters = set()
    work = []
    for op in graph.ops:
        new_parameters = {
            v for v in op.inputs if v.origin is Origin.PARAMETER and v not in counted_parameters
        }
        counted_parameters |= new_parameters
        work.append(float(_num_multiply_adds(op) + sum(value.numel for value in new_parameters)))
    return work


def _num_multiply_adds(op: Op) -> int:
    """Return the multiply-adds of a main operator, as the product of its factor sizes; else 0.

    For a mixture of experts, each token counts only for the experts to which it is routed.
    """
    rule = rule_of(op)
    if rule is None or rule.main is None:
        return 0
    if op.target is experts:
        # A multiply-add is two floating-point operations.
        return int(forward_flops(op, rule) / 2)
    sizes: dict[str, int] = {}
    for dims, value in zip((*rule.inputs, *rule.outputs), (*op.inputs, *op.outputs), strict=True):
        for factor, size in zip(dims, value.shape, strict=True):
            if factor is not None and factor not in rule.joined:
                # Dims with one factor may differ in size; the largest counts.
                sizes[factor] = max(sizes.get(factor, 1), size)
    return prod(sizes.values())


def _min_work_of_largest_chunk(
    total: Sequence[float], weights: Sequence[float], count: int
) -> float:
    """Return the minimum, over all divisions into `count` chunks, of the largest chunk's work.

    Bisects to a relative precision of 1e-6.

    Args:
        total: work of the operators before each position where a chunk may end.
        weights: work between each position and the next.
    """
    # No largest chunk is below the heaviest indivisible part, nor below the mean.
    low, high = max(max(weights), total[-1] / count), total[-1]
    # Far below the tolerances by which a chunk may exceed the minimum.
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        # Filling each chunk up to the limit gives the fewest chunks that respect it.
        chunks, filled = 1, 0.0
        for weight in weights:
            if filled + weight > middle:
                chunks, filled = chunks + 1, 0.0
            filled += weight
        low, high = (low, middle) if chunks <= count else (middle, high)
    return high


def _bytes_crossing_positions(graph: Graph) -> list[int]:
    """Return for each position the bytes of values computed before the position and read after it.

    Position `i` is in front of operator `i`.
    """
    op_index = {op.name: index for index, op in enumerate(graph.ops)}
    change_at = [0] * (len(graph.ops) + 2)
    for index, op in enumerate(graph.ops):
        for value in op.outputs:
            consumer_indices = [op_index[consumer.name] for consumer, _ in graph.consumers[value]]
            if consumer_indices:
                # A prefix sum over these changes takes one pass, however long values live.
                change_at[index + 1] += value.numel * value.itemsize
                change_at[max(consumer_indices) + 1] -= value.numel * value.itemsize
    bytes_at, crossing = [], 0
    for added_bytes in change_at[: len(graph.ops) + 1]:
        crossing += added_bytes
        bytes_at.append(crossing)
    return bytes_at


def _cheapest_chunk_ends(
    total: Sequence[float], crossing: Sequence[int], count: int, limit: float
) -> list[int]:
    """Divide a model into `count` pipeline chunks with the fewest bytes sent between chunks.

    Uses dynamic programming over chunk ends. The work of every chunk is above 0 and at most
    `limit`.

    Returns the end position of each chunk. `total` is the work before each position, `crossing` the
    bytes of values computed before and read after it.
    """
    num_positions = len(total)
    infinity = float("inf")
    # Differences of prefix sums round differently from the sums that gave the limit.
    max_weight = limit * (1 + 1e-9)
    # The positions where each chunk may start: the chunks before can take all work before it, and
    # the chunks from it on the work after it.
    windows = [
        range(
            bisect_left(total, total[-1] - (count - chunk) * max_weight),
            bisect_right(total, chunk * max_weight),
        )
        for chunk in range(count)
    ]
    # The last chunk ends at the last position.
    windows.append(range(num_positions - 1, num_positions))
    # By start of the next chunk: the first chunk starts at position 0.
    least_bytes: list[float] = [0.0] + [infinity] * (num_positions - 1)
    starts_of_chunks: list[list[int]] = []
    for chunk, (starts_in, ends_in) in enumerate(pairwise(windows)):
        starts = _cheapest_chunk_starts(total, least_bytes, max_weight, starts_in, ends_in)
        is_last = chunk == count - 1
        next_least_bytes = [infinity] * num_positions
        for end in ends_in:
            if starts[end] >= 0:
                # The last chunk sends nothing on.
                sent_bytes = 0 if is_last else crossing[end]
                next_least_bytes[end] = least_bytes[starts[end]] + sent_bytes
        least_bytes = next_least_bytes
        starts_of_chunks.append(starts)
    # Backwards: each chunk starts where the one before it ends.
    ends = [num_positions - 1]
    for starts in reversed(starts_of_chunks[1:]):
        ends.append(starts[ends[-1]])
    return ends[::-1]


def _cheapest_chunk_starts(
    total: Sequence[float],
    least_bytes: Sequence[float],
    max_weight: float,
    starts_in: range,
    ends_in: range,
) -> list[int]:
    """Return for each chunk end the start with the fewest `least_bytes`, among valid starts.

    A start is valid if the chunk has work, at most `max_weight`. Ties go to the first start.

    Args:
        total: work before each position.
        least_bytes: for each start the fewest bytes that cross the ends of all earlier chunks.
        max_weight: maximum work of a chunk.
        starts_in, ends_in: positions where the chunk may start and end.

    Returns:
        One position per end; -1 for an end without a valid start.
    """
    candidates: deque[int] = deque()
    starts, start = [-1] * len(total), starts_in.start
    for end in ends_in:
        weight = total[end]
        # Strictly less: from a start with an equal total on, the chunk would have no work.
        while start < starts_in.stop and total[start] < weight:
            if least_bytes[start] < float("inf"):
                # A later start that is cheaper outlives earlier ones in the window. Strictly
                # cheaper, so that the first of equal starts is taken.
                while candidates and least_bytes[candidates[-1]] > least_bytes[start]:
                    candidates.pop()
                candidates.append(start)
            start += 1
        while candidates and weight - total[candidates[0]] > max_weight:
            candidates.popleft()
        if candidates:
            starts[end] = candidates[0]
    return starts


StageConfig = Mapping[str, int]
"""Stage index of each module, by module name."""


def configured_stages(
    graph: Graph,
    stage_config: StageConfig,
    schedule: str,
    modules: Iterable[str] = (),
) -> tuple[int, int, dict[str, int]]:
    """Return the number of stages, the number of chunks per stage, and each operator's chunk index.

    A module gets the stage of the longest configured name that is a prefix of its path. Operators
    outside of all named modules go to the chunk of their inputs, or else of their consumers.

    Args:
        stage_config: stage index of each module. Stages must ascend in the order of execution. With
            several chunks per stage they repeat (0, 1, 0, 1) or return (0, 1, 1, 0), as the
            schedule requires.
        modules: names of modules that `stage_config` may also contain, although they have neither
            operators nor parameters.

    Raises:
        StrategyError: if a name is not the name of a module, a module with parameters is left out,
            or stages are not in the order that the schedule requires.
    """
    _check_module_names(graph, stage_config, modules)
    stages = _num_configured_stages(stage_config)
    stage_of_op = {op.name: _find_stage_of_module(op.module, stage_config) for op in graph.ops}
    # Operators without parameters may be left out: they follow their neighbors.
    _check_all_parameters_have_stage(graph, stage_config)
    # Operators without a stage do not interrupt a run of operators of one stage.
    named_ops = [op for op in graph.ops if stage_of_op[op.name] is not None]
    runs = [
        (stage, list(ops))
        for stage, ops in groupby(named_ops, key=lambda op: stage_of_op[op.name] or 0)
    ]
    if SCHEDULES[schedule].allows_several_chunks:
        chunk_of_named, chunks = _assign_ops_to_chunks(graph, runs, stages, SCHEDULES[schedule])
    else:
        chunk_of_named, chunks = {op.name: stage_of_op[op.name] or 0 for op in named_ops}, 1
    # Operators such as a residual addition belong to a module outside of the named ones; they
    # follow their neighbors, so that no value crosses more often than necessary.
    chunk_of = assign_neighbors(graph, chunk_of_named)
    _check_chunks_ascend(graph, chunk_of, PipelineSpec(stages, 1, schedule, chunks))
    return stages, chunks, chunk_of


def _check_module_names(graph: Graph, stage_config: StageConfig, modules: Iterable[str]) -> None:
    valid_names = dict.fromkeys(modules)
    owners = (value.name.rpartition(".")[0] for value in graph.parameters)
    for path in (*(op.module for op in graph.ops), *owners):
        words = path.split(".")
        valid_names |= dict.fromkeys(".".join(words[: n + 1]) for n in range(len(words)))
    # The model itself, whose module path is empty, cannot be assigned to one stage.
    valid_names.pop("", None)
    unmatched = [name for name in stage_config if name not in valid_names]
    if not unmatched:
        return
    # cutoff=0.0: the nearest names are shown even if none is similar.
    nearest = get_close_matches(unmatched[0], list(valid_names), n=3, cutoff=0.0)
    raise StrategyError(
        f"stage_config: no module is named {_abbreviate_names(list(map(repr, unmatched)))}\n"
        f"use names such as {', '.join(nearest)}; the modules of the model are"
        f" {_abbreviate_names(list(valid_names))}"
    )


def _abbreviate_names(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _num_configured_stages(stage_config: StageConfig) -> int:
    for name, stage in stage_config.items():
        # Booleans are integers in Python, and would name stages 0 and 1.
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise StrategyError(
                f"stage_config[{name!r}]={stage!r}: a stage must be an integer of at least 0\n"
                "number the stages from 0, as in stage_config={'encoder': 0, 'decoder': 1}"
            )
    if not stage_config:
        raise StrategyError(
            "stage_config is empty\nomit it, or name the modules of each stage:"
            " {'encoder': 0, 'decoder': 1}"
        )
    stages = max(stage_config.values()) + 1
    missing = sorted(set(range(stages)) - set(stage_config.values()))
    if missing:
        raise StrategyError(
            f"stage_config has stages up to {stages - 1}, but no module in stage"
            f" {_abbreviate_names(list(map(str, missing)))}\n"
            "number the stages from 0 without gaps"
        )
    return stages


def _find_stage_of_module(path: str, stage_config: StageConfig) -> int | None:
    """Return the stage index of the longest key of `stage_config` that is a prefix of the module
    path `path`; None if no key is."""
    words = path.split(".")
    # Longest first: a module may be in another stage than the module that contains it.
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in stage_config:
            return stage_config[name]
    return None


def _check_all_parameters_have_stage(graph: Graph, stage_config: StageConfig) -> None:
    tied_names: dict[str, list[str]] = {}
    for alias, first_name in graph.tied.items():
        tied_names.setdefault(first_name, []).append(alias)
    omitted = []
    for value in graph.parameters:
        owners = [name.rpartition(".")[0] for name in (value.name, *tied_names.get(value.name, ()))]
        # A tied parameter needs a stage under one of its names only.
        if all(owner and _find_stage_of_module(owner, stage_config) is None for owner in owners):
            omitted.append(owners[0])
    if omitted:
        raise StrategyError(
            "stage_config leaves out modules with parameters:"
            f" {_abbreviate_names(list(dict.fromkeys(omitted)))}\n"
            "add them, or a module that contains them"
        )


def _assign_ops_to_chunks(
    graph: Graph, runs: list[tuple[int, list[Op]]], stages: int, schedule: ScheduleSpec
) -> tuple[dict[str, int], int]:
    """Return the chunk index of each operator in `runs`, by name, and the chunks per stage.

    Args:
        runs: runs of consecutive operators of one stage, as (stage index, operators), in the order
            of execution.
    """
    if schedule.v_shaped:
        runs = _split_last_stage_into_chunks(graph, runs, stages)
    # V-shaped schedules have a fixed number of chunks; for others the runs of modules tell it.
    chunks = schedule.max_chunks or max(1, len(runs) // stages)
    required = [schedule.stage_of(chunk, stages) for chunk in range(stages * chunks)]
    order = [stage for stage, _ in runs]
    if order != required:
        raise StrategyError(
            f"stage_config: the modules run through stages {_format_stage_order(order)} in the"
            f" order of execution\nassign stages that schedule {schedule.name!r} runs in the order"
            f" {_format_stage_order(required)}"
        )
    return {op.name: chunk for chunk, (_, ops) in enumerate(runs) for op in ops}, (
        len(runs) // stages
    )


def _format_stage_order(order: Sequence[int]) -> str:
    return ", ".join(map(str, order[:16])) + (", …" if len(order) > 16 else "")


def _split_last_stage_into_chunks(
    graph: Graph, runs: list[tuple[int, list[Op]]], stages: int
) -> list[tuple[int, list[Op]]]:
    """Split the operators of the last stage of a V-shaped schedule into its two chunks.

    The two chunks follow each other, so `stage_config` cannot say where the second begins. The
    split is at the module boundary that divides the work most nearly in half.
    """
    work = dict(zip((op.name for op in graph.ops), operator_work(graph), strict=True))
    result = []
    for stage, ops in runs:
        # Between modules only, as fewer values cross there than inside a module.
        boundaries = [i for i in range(1, len(ops)) if ops[i].module != ops[i - 1].module]
        if stage != stages - 1 or not boundaries:
            result.append((stage, ops))
            continue
        half = sum(work[op.name] for op in ops) / 2
        boundary = min(boundaries, key=lambda i: abs(sum(work[op.name] for op in ops[:i]) - half))
        result += [(stage, ops[:boundary]), (stage, ops[boundary:])]
    return result


def _repeated_stages_hint() -> str:
    """Return an error line that lists the schedules in which stages repeat, with their orders."""
    schedules = []
    for schedule in SCHEDULES.values():
        if schedule.allows_several_chunks:
            order = [schedule.stage_of(chunk, 2) for chunk in range(4)]
            schedules.append(f"{_format_stage_order(order)} with schedule {schedule.name!r}")
    return f"stages may repeat in the order {', or '.join(schedules)}"


def _check_chunks_ascend(graph: Graph, chunk_of: Mapping[str, int], pipeline: PipelineSpec) -> None:
    for op in graph.ops:
        for value in op.inputs:
            producer = graph.producer.get(value)
            # A value without a producer, such as a parameter or an input, is there in every chunk.
            if producer is None or chunk_of[producer.name] <= chunk_of[op.name]:
                continue
            early = pipeline.stage_of(chunk_of[op.name])
            late = pipeline.stage_of(chunk_of[producer.name])
            raise StrategyError(
                f"stages must ascend in the order of execution: {op.name!r} is in stage {early},"
                f" but reads the output of {producer.name!r} in stage {late}\n"
                f"{_repeated_stages_hint()}"
            )
