"""Divide a model into consecutive pipeline chunks of nearly equal work.

The work of a chunk is the multiply-adds of its main operators plus the elements of its parameters,
or seconds if these are known. Among the divisions whose largest chunk is within a tolerance of the
smallest possible, the one that sends the fewest bytes between chunks is chosen: between two layers
of a transformer one value crosses, within a layer two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby, pairwise
from math import prod

from shardwright.core.cost.flops import forward_flops
from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Graph, Kind, Op
from shardwright.core.graph.split import assign_neighbors
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES, ScheduleSpec
from shardwright.core.rules import rule_of
from shardwright.errors import StrategyError

TOLERANCE = 0.1
"""How much larger the largest chunk may be than necessary, in order to send fewer bytes."""

TOLERANCE_OF_SECONDS = 0.01
"""The tolerance for work in seconds, which is more precise: every micro-batch waits for the slowest
chunk, and sending takes little time beside it."""


def balanced_stages(
    graph: Graph, count: int, work: Sequence[float] | None = None
) -> dict[str, int]:
    """Return for each operator the number of its chunk, for `count` chunks of nearly equal work.

    Args:
        work: seconds of each operator; by default its multiply-adds plus the elements of its
            parameters.

    Raises:
        StrategyError: if fewer than `count` operators have work.
    """
    op_work = list(work) if work is not None else operator_work(graph)
    positions = _chunk_boundaries(graph)
    weights = [sum(op_work[start:end]) for start, end in pairwise(positions)]
    usable = sum(weight > 0 for weight in weights)
    if usable < count:
        raise StrategyError(
            f"cannot divide the model into {count} pipeline chunks: only {usable} of its operators"
            f" have parameters or multiply-adds\nuse at most {usable} stages, or assign modules to"
            " stages with stage_config"
        )
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    tolerance = TOLERANCE if work is None else TOLERANCE_OF_SECONDS
    limit = (1 + tolerance) * _least_largest(total, weights, count)
    crossing = _crossing_bytes(graph)
    ends = _cheapest_ends(total, [crossing[position] for position in positions], count, limit)
    # Operator `index` ends at position `index + 1`, so that the first chunk that ends there or
    # later has it.
    chunk_ends = [positions[end] for end in ends]
    return {op.name: bisect_left(chunk_ends, index + 1) for index, op in enumerate(graph.ops)}


def _chunk_boundaries(graph: Graph) -> list[int]:
    """The positions where a chunk may end; position `i` is in front of operator `i`.

    None between the operators that read a buffer and the one that updates it: other micro-batches
    run between two chunks, and would read the buffer before the update.
    """
    numbers = {op.name: index for index, op in enumerate(graph.ops)}
    joined: set[int] = set()
    for buffer, value in graph.updates:
        producer = graph.producer.get(value)
        if producer is not None:
            readers = (numbers[op.name] for op, _ in graph.consumers[buffer])
            connected = [numbers[producer.name], *readers]
            joined.update(range(min(connected) + 1, max(connected) + 1))
    return [position for position in range(len(graph.ops) + 1) if position not in joined]


def operator_work(graph: Graph) -> list[float]:
    """Return for each operator its multiply-adds plus the elements of parameters it reads first."""
    seen = set()
    work = []
    for op in graph.ops:
        new_parameters = {v for v in op.inputs if v.kind is Kind.PARAMETER and v not in seen}
        seen |= new_parameters
        work.append(float(_multiply_adds(op) + sum(value.numel for value in new_parameters)))
    return work


def _multiply_adds(op: Op) -> int:
    """The product of the sizes of all factors of a main operator, 0 for others.

    A token passes through only some experts, so their work is that of balanced routing.
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
                sizes[factor] = max(sizes.get(factor, 1), size)
    return prod(sizes.values())


def _least_largest(total: Sequence[float], weights: Sequence[float], count: int) -> float:
    """The smallest possible weight of the heaviest of `count` contiguous chunks, to a relative
    precision of 1e-6, by bisection."""
    low, high = max(max(weights), total[-1] / count), total[-1]
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        # Filling each chunk up to the limit needs the fewest chunks for it.
        chunks, filled = 1, 0.0
        for weight in weights:
            if filled + weight > middle:
                chunks, filled = chunks + 1, 0.0
            filled += weight
        low, high = (low, middle) if chunks <= count else (middle, high)
    return high


def _crossing_bytes(graph: Graph) -> list[int]:
    """For each position (`i` is in front of operator `i`) the bytes of the values that are computed
    before it and read after it."""
    numbers = {op.name: index for index, op in enumerate(graph.ops)}
    change = [0] * (len(graph.ops) + 2)
    for index, op in enumerate(graph.ops):
        for value in op.outputs:
            readers = [numbers[reader.name] for reader, _ in graph.consumers[value]]
            if readers:
                change[index + 1] += value.numel * value.itemsize
                change[max(readers) + 1] -= value.numel * value.itemsize
    bytes_at, crossing = [], 0
    for added_bytes in change[: len(graph.ops) + 1]:
        crossing += added_bytes
        bytes_at.append(crossing)
    return bytes_at


def _cheapest_ends(
    total: Sequence[float], crossing: Sequence[int], count: int, limit: float
) -> list[int]:
    """The end of each of `count` chunks with the fewest crossing bytes, by dynamic programming.

    No chunk is heavier than `limit`, and none is without work.
    """
    num_positions = len(total)
    infinity = float("inf")
    best: list[float] = [0.0] + [infinity] * (num_positions - 1)
    starts_of_chunks: list[list[int]] = []
    for chunk in range(count):
        starts = _cheapest_starts(total, best, count - chunk, limit)
        last = chunk == count - 1
        best = [
            infinity if start < 0 else best[start] + (0 if last else crossing[end])
            for end, start in enumerate(starts)
        ]
        starts_of_chunks.append(starts)
    ends = [num_positions - 1]
    for starts in reversed(starts_of_chunks[1:]):
        ends.append(starts[ends[-1]])
    return ends[::-1]


def _cheapest_starts(
    total: Sequence[float], best: Sequence[float], chunks: int, limit: float
) -> list[int]:
    """For each end of a chunk the cheapest valid start, -1 if none; the first of equal ones.

    A minimum over a sliding window: as ends advance, so do the starts within `limit`. The queue
    holds those that may still become the cheapest, in order of cost.

    Args:
        best: for each start the fewest bytes that cross the ends of all chunks before it.
        chunks: the number of chunks from this one on, which must hold the remaining work.
    """
    # Differences of running totals round otherwise than the sums that gave the limit.
    max_weight = limit * (1 + 1e-9)
    waiting: deque[int] = deque()
    starts, start = [], 0
    for weight in total:
        # Strictly less: from a start with an equal total on, the chunk would have no work.
        while total[start] < weight:
            # Starts that leave later chunks more work than they can hold lead nowhere.
            if best[start] < float("inf") and total[-1] - total[start] <= chunks * max_weight:
                # A later start that is cheaper outlives earlier ones in the window. Strictly
                # cheaper, so that the first of equal starts is taken.
                while waiting and best[waiting[-1]] > best[start]:
                    waiting.pop()
                waiting.append(start)
            start += 1
        while waiting and weight - total[waiting[0]] > max_weight:
            waiting.popleft()
        starts.append(waiting[0] if waiting else -1)
    return starts


StageConfig = Mapping[str, int]
"""The number of the stage of each module, by name."""


def named_stages(
    graph: Graph,
    stage_config: StageConfig,
    schedule: str,
    modules: Iterable[str] = (),
) -> tuple[int, int, dict[str, int]]:
    """Return the number of stages, the chunks of each, and for each operator its chunk number.

    The longest configured name that is a prefix of a module's path decides. Operators outside of
    all named modules go to the chunk of their inputs, or else of their readers.

    Args:
        stage_config: stages must ascend in the order of execution. With several chunks per stage
            they repeat (0, 1, 0, 1) or come back (0, 1, 1, 0), as the schedule requires.
        modules: valid names besides those of modules with operators or parameters.

    Raises:
        StrategyError: if a name is not that of a module, a module with parameters is left out, or
            stages are in another order than that of the schedule.
    """
    _check_names(graph, stage_config, modules)
    stages = _stages(stage_config)
    labels = {op.name: _stage_of_module(op.module, stage_config) for op in graph.ops}
    _check_parameters(graph, stage_config)
    ordered = [op for op in graph.ops if labels[op.name] is not None]
    runs = [
        (stage, list(ops)) for stage, ops in groupby(ordered, key=lambda op: labels[op.name] or 0)
    ]
    if SCHEDULES[schedule].chunked:
        anchored, chunks = _chunked(graph, runs, stages, SCHEDULES[schedule])
    else:
        anchored, chunks = {op.name: labels[op.name] or 0 for op in ordered}, 1
    chunk_of = assign_neighbors(graph, anchored)
    _check_ascending(graph, chunk_of, PipelineSpec(stages, 1, schedule, chunks))
    return stages, chunks, chunk_of


def _check_names(graph: Graph, stage_config: StageConfig, modules: Iterable[str]) -> None:
    valid_names = dict.fromkeys(modules)
    owners = (value.name.rpartition(".")[0] for value in graph.parameters)
    for path in (*(op.module for op in graph.ops), *owners):
        words = path.split(".")
        valid_names |= dict.fromkeys(".".join(words[: n + 1]) for n in range(len(words)))
    valid_names.pop("", None)
    unmatched = [name for name in stage_config if name not in valid_names]
    if not unmatched:
        return
    # cutoff=0.0: the nearest names are shown even if none is similar.
    nearest = get_close_matches(unmatched[0], list(valid_names), n=3, cutoff=0.0)
    raise StrategyError(
        f"stage_config: no module is named {_listed(list(map(repr, unmatched)))}\n"
        f"nearest to the first: {', '.join(nearest)}; valid are {_listed(list(valid_names))}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _stages(stage_config: StageConfig) -> int:
    for name, stage in stage_config.items():
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise StrategyError(
                f"stage_config[{name!r}]={stage!r}: a stage must be an integer of at least 0"
            )
    if not stage_config:
        raise StrategyError("stage_config is empty\nname the modules of each stage, or omit it")
    stages = max(stage_config.values()) + 1
    missing = sorted(set(range(stages)) - set(stage_config.values()))
    if missing:
        raise StrategyError(
            f"stage_config has stages up to {stages - 1}, but no module in stage"
            f" {_listed(list(map(str, missing)))}"
        )
    return stages


def _stage_of_module(path: str, stage_config: StageConfig) -> int | None:
    """The stage of the longest configured name that is a prefix of `path`."""
    words = path.split(".")
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in stage_config:
            return stage_config[name]
    return None


def _check_parameters(graph: Graph, stage_config: StageConfig) -> None:
    tied_names: dict[str, list[str]] = {}
    for other, first in graph.tied.items():
        tied_names.setdefault(first, []).append(other)
    omitted = []
    for value in graph.parameters:
        owners = [name.rpartition(".")[0] for name in (value.name, *tied_names.get(value.name, ()))]
        # A tied parameter needs a stage under one of its names only.
        if all(owner and _stage_of_module(owner, stage_config) is None for owner in owners):
            omitted.append(owners[0])
    if omitted:
        raise StrategyError(
            "stage_config leaves out modules with parameters:"
            f" {_listed(list(dict.fromkeys(omitted)))}\nadd them, or a module that contains them"
        )


def _chunked(
    graph: Graph, runs: list[tuple[int, list[Op]]], stages: int, schedule: ScheduleSpec
) -> tuple[dict[str, int], int]:
    """The chunk of each operator in a named module, and the number of chunks of a stage."""
    if schedule.v_shaped:
        runs = _split_last_stage(graph, runs, stages)
    chunks = schedule.max_chunks or max(1, len(runs) // stages)
    required = [schedule.stage_of(chunk, stages) for chunk in range(stages * chunks)]
    order = [stage for stage, _ in runs]
    if order != required:
        raise StrategyError(
            f"stage_config: the modules run through stages {_shown(order)} in the order of"
            f" execution\nwith schedule {schedule.name!r} it must be {_shown(required)}"
        )
    return {op.name: chunk for chunk, (_, ops) in enumerate(runs) for op in ops}, (
        len(runs) // stages
    )


def _shown(order: Sequence[int]) -> str:
    return ", ".join(map(str, order[:16])) + (", …" if len(order) > 16 else "")


def _split_last_stage(
    graph: Graph, runs: list[tuple[int, list[Op]]], stages: int
) -> list[tuple[int, list[Op]]]:
    """Split the operators of the last stage of a V-shaped schedule into its two chunks.

    They follow each other, so names cannot separate them; split between two modules where the work
    is most nearly equal.
    """
    work = dict(zip((op.name for op in graph.ops), operator_work(graph), strict=True))
    result = []
    for stage, ops in runs:
        boundaries = [i for i in range(1, len(ops)) if ops[i].module != ops[i - 1].module]
        if stage != stages - 1 or not boundaries:
            result.append((stage, ops))
            continue
        half = sum(work[op.name] for op in ops) / 2
        boundary = min(boundaries, key=lambda i: abs(sum(work[op.name] for op in ops[:i]) - half))
        result += [(stage, ops[:boundary]), (stage, ops[boundary:])]
    return result


def _schedules_with_chunks() -> str:
    """The remedy for stages that come again: the schedules with several chunks per stage."""
    schedules = []
    for schedule in SCHEDULES.values():
        if schedule.chunked:
            order = [schedule.stage_of(chunk, 2) for chunk in range(4)]
            schedules.append(f"{_shown(order)} with schedule {schedule.name!r}")
    return f"stages may repeat in the order {', or '.join(schedules)}"


def _check_ascending(graph: Graph, chunk_of: Mapping[str, int], pipeline: PipelineSpec) -> None:
    for op in graph.ops:
        for value in op.inputs:
            producer = graph.producer.get(value)
            if producer is None or chunk_of[producer.name] <= chunk_of[op.name]:
                continue
            early = pipeline.stage_of(chunk_of[op.name])
            late = pipeline.stage_of(chunk_of[producer.name])
            raise StrategyError(
                f"stages must ascend in the order of execution: {op.name} is in stage {early}, but"
                f" reads the output of {producer.name} in stage {late}\n{_schedules_with_chunks()}"
            )
