"""Divides a model into pipeline chunks of nearly equal work, one after the other.

The work of a chunk is the multiply-adds of its main operators and the elements of its parameters.
Of the divisions whose largest chunk is at most a tenth above the least possible (a hundredth, where
the work is known in seconds), the one that sends the fewest bytes between chunks is taken: between
two layers of a transformer one value is sent, within one two.
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
"""By how much the largest chunk may exceed the least possible, so that fewer bytes are sent."""

TOLERANCE_OF_SECONDS = 0.01
"""Likewise where the work is known in seconds: all micro-batches wait for the slowest chunk, and
sending is short beside it."""


def balanced_stages(
    graph: Graph, count: int, work: Sequence[float] | None = None
) -> dict[str, int]:
    """For each operator the number of its chunk, of `count` chunks of nearly equal work.

    Args:
        work: of each operator, in seconds; by default its multiply-adds and the elements of its
            parameters.

    Raises:
        StrategyError: if there are fewer operators with work than chunks.
    """
    of_ops = list(work) if work is not None else operator_work(graph)
    places = _places(graph)
    weights = [sum(of_ops[start:end]) for start, end in pairwise(places)]
    able = sum(weight > 0 for weight in weights)
    if able < count:
        raise StrategyError(
            f"cannot divide the model into {count} pipeline chunks: only {able} of its operators"
            f" have parameters or multiply-adds; use at most {able} stages, or assign modules to"
            " stages with stage_config"
        )
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    tolerance = TOLERANCE if work is None else TOLERANCE_OF_SECONDS
    limit = (1 + tolerance) * _least_largest(total, weights, count)
    crossing = _crossing_bytes(graph)
    ends = _cheapest_ends(total, [crossing[place] for place in places], count, limit)
    after = [places[end] for end in ends]
    return {op.name: bisect_left(after, index + 1) for index, op in enumerate(graph.ops)}


def _places(graph: Graph) -> list[int]:
    """The places between two operators where a chunk may end (place `i` lies before operator `i`):
    not between what reads a buffer and what updates it, as other micro-batches run meanwhile."""
    numbers = {op.name: index for index, op in enumerate(graph.ops)}
    joined: set[int] = set()
    for buffer, value in graph.updates:
        producer = graph.producer.get(value)
        if producer is not None:
            readers = (numbers[op.name] for op, _ in graph.consumers[buffer])
            together = [numbers[producer.name], *readers]
            joined.update(range(min(together) + 1, max(together) + 1))
    return [place for place in range(len(graph.ops) + 1) if place not in joined]


def operator_work(graph: Graph) -> list[float]:
    """Multiply-adds of each main operator, and of any the parameters that it is first to read."""
    seen = set()
    work = []
    for op in graph.ops:
        fresh = {v for v in op.inputs if v.kind is Kind.PARAMETER and v not in seen}
        seen |= fresh
        work.append(float(_multiply_adds(op) + sum(value.numel for value in fresh)))
    return work


def _multiply_adds(op: Op) -> int:
    """The product of the sizes of all dimensions of a main operator, those it sums included; of
    experts, of which each token meets only some, those of balanced routing."""
    rule = rule_of(op)
    if rule is None or rule.main is None:
        return 0
    if op.target is experts:
        return int(forward_flops(op, rule) / 2)
    sizes: dict[str, int] = {}
    for dims, value in zip((*rule.inputs, *rule.outputs), (*op.inputs, *op.outputs), strict=True):
        for factor, size in zip(dims, value.shape, strict=True):
            if factor is not None and factor not in rule.joined:
                sizes[factor] = max(sizes.get(factor, 1), size)
    return prod(sizes.values())


def _least_largest(total: Sequence[float], weights: Sequence[float], count: int) -> float:
    """The least weight of the heaviest of `count` contiguous chunks, to one in a million."""
    low, high = max(max(weights), total[-1] / count), total[-1]
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        chunks, filled = 1, 0.0
        for weight in weights:
            if filled + weight > middle:
                chunks, filled = chunks + 1, 0.0
            filled += weight
        low, high = (low, middle) if chunks <= count else (middle, high)
    return high


def _crossing_bytes(graph: Graph) -> list[int]:
    """For each place between two operators (place `i` lies before operator `i`) the bytes of the
    values that are made before it and read after it."""
    numbers = {op.name: index for index, op in enumerate(graph.ops)}
    change = [0] * (len(graph.ops) + 2)
    for index, op in enumerate(graph.ops):
        for value in op.outputs:
            readers = [numbers[reader.name] for reader, _ in graph.consumers[value]]
            if readers:
                change[index + 1] += value.numel * value.itemsize
                change[max(readers) + 1] -= value.numel * value.itemsize
    bytes_at, here = [], 0
    for step in change[: len(graph.ops) + 1]:
        here += step
        bytes_at.append(here)
    return bytes_at


def _cheapest_ends(
    total: Sequence[float], crossing: Sequence[int], count: int, limit: float
) -> list[int]:
    """Where each of `count` chunks ends, none heavier than `limit` and none without work, so that
    the fewest bytes cross."""
    places = len(total)
    never = float("inf")
    best: list[float] = [0.0] + [never] * (places - 1)
    back: list[list[int]] = []
    for chunk in range(count):
        came = _cheapest_starts(total, best, count - chunk, limit)
        last = chunk == count - 1
        best = [
            never if start < 0 else best[start] + (0 if last else crossing[end])
            for end, start in enumerate(came)
        ]
        back.append(came)
    ends = [places - 1]
    for came in reversed(back[1:]):
        ends.append(came[ends[-1]])
    return ends[::-1]


def _cheapest_starts(
    total: Sequence[float], best: Sequence[float], chunks: int, limit: float
) -> list[int]:
    """For each end of a chunk the start with which what lies before costs least, -1 if there is
    none; the first of those that cost as much. As ends move on, so do the starts that are near
    enough: those that may yet be the cheapest wait in the order of their costs.

    Args:
        chunks: this one and those that follow, into which what remains must fit.
    """
    most = limit * (1 + 1e-9)
    waiting: deque[int] = deque()
    found, start = [], 0
    for weight in total:
        while total[start] < weight:
            if best[start] < float("inf") and total[-1] - total[start] <= chunks * most:
                while waiting and best[waiting[-1]] > best[start]:
                    waiting.pop()
                waiting.append(start)
            start += 1
        while waiting and weight - total[waiting[0]] > most:
            waiting.popleft()
        found.append(waiting[0] if waiting else -1)
    return found


StageConfig = Mapping[str, int]
"""Names of modules, each with the number of its stage."""


def named_stages(
    graph: Graph,
    stage_config: StageConfig,
    schedule: str,
    modules: Iterable[str] = (),
) -> tuple[int, int, dict[str, int]]:
    """The number of stages, the chunks of each, and for each operator the number of its chunk.

    A module's stage is that of the longest name that is its path or leads to it. An operator that
    no name leads to follows what it reads, or else what reads it.

    Args:
        stage_config: stages ascend in the order of execution; in a schedule with several chunks a
            stage they repeat, 0, 1, 0, 1, or come back, 0, 1, 1, 0, as the schedule says.
        modules: names that are valid besides those of modules with operators or parameters.

    Raises:
        StrategyError: for names that no module has, a module with parameters that is left out, or
            stages in another order than the schedule runs them in.
    """
    _check_names(graph, stage_config, modules)
    stages = _stages(stage_config)
    labels = {op.name: _label(op.module, stage_config) for op in graph.ops}
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
    known = dict.fromkeys(modules)
    owners = (value.name.rpartition(".")[0] for value in graph.parameters)
    for path in (*(op.module for op in graph.ops), *owners):
        words = path.split(".")
        known |= dict.fromkeys(".".join(words[: n + 1]) for n in range(len(words)))
    known.pop("", None)
    unmatched = [name for name in stage_config if name not in known]
    if not unmatched:
        return
    near = get_close_matches(unmatched[0], list(known), n=3, cutoff=0.0)
    raise StrategyError(
        f"stage_config names {', '.join(map(repr, unmatched))}, which the model does not have;"
        f" nearest to the first: {', '.join(near)}; valid are {_listed(list(known))}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")


def _stages(stage_config: StageConfig) -> int:
    for name, stage in stage_config.items():
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise StrategyError(
                f"stage_config[{name!r}]={stage!r}: must be an integer of at least 0"
            )
    if not stage_config:
        raise StrategyError("stage_config is empty: name the modules of each stage, or omit it")
    stages = max(stage_config.values()) + 1
    missing = sorted(set(range(stages)) - set(stage_config.values()))
    if missing:
        raise StrategyError(
            f"stage_config has stages up to {stages - 1}, but no module in stage"
            f" {', '.join(map(str, missing))}"
        )
    return stages


def _label(path: str, stage_config: StageConfig) -> int | None:
    """The stage of the longest name that leads to `path`."""
    words = path.split(".")
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        if name in stage_config:
            return stage_config[name]
    return None


def _check_parameters(graph: Graph, stage_config: StageConfig) -> None:
    others: dict[str, list[str]] = {}
    for other, first in graph.tied.items():
        others.setdefault(first, []).append(other)
    left = []
    for value in graph.parameters:
        owners = [name.rpartition(".")[0] for name in (value.name, *others.get(value.name, ()))]
        if all(owner and _label(owner, stage_config) is None for owner in owners):
            left.append(owners[0])
    if left:
        raise StrategyError(
            "stage_config leaves out modules with parameters:"
            f" {_listed(list(dict.fromkeys(left)))}; add them, or a module that contains them"
        )


def _chunked(
    graph: Graph, runs: list[tuple[int, list[Op]]], stages: int, schedule: ScheduleSpec
) -> tuple[dict[str, int], int]:
    """The chunk of each operator that a name leads to, and the number of chunks of a stage."""
    if schedule.v_shaped:
        runs = _with_turn(graph, runs, stages)
    chunks = schedule.max_chunks or max(1, len(runs) // stages)
    wanted = [schedule.stage_of(chunk, stages) for chunk in range(stages * chunks)]
    order = [stage for stage, _ in runs]
    if order != wanted:
        raise StrategyError(
            f"stage_config runs through stages {_shown(order)}; with {schedule.name} it must be"
            f" {_shown(wanted)}"
        )
    return {op.name: chunk for chunk, (_, ops) in enumerate(runs) for op in ops}, (
        len(runs) // stages
    )


def _shown(order: Sequence[int]) -> str:
    return ", ".join(map(str, order[:16])) + (", …" if len(order) > 16 else "")


def _with_turn(
    graph: Graph, runs: list[tuple[int, list[Op]]], stages: int
) -> list[tuple[int, list[Op]]]:
    """The last stage's two chunks follow each other, divided where their work is nearest to equal,
    between two modules."""
    work = dict(zip((op.name for op in graph.ops), operator_work(graph), strict=True))
    result = []
    for stage, ops in runs:
        places = [i for i in range(1, len(ops)) if ops[i].module != ops[i - 1].module]
        if stage != stages - 1 or not places:
            result.append((stage, ops))
            continue
        half = sum(work[op.name] for op in ops) / 2
        place = min(places, key=lambda i: abs(sum(work[op.name] for op in ops[:i]) - half))
        result += [(stage, ops[:place]), (stage, ops[place:])]
    return result


def _orders_with_chunks() -> str:
    """Which schedules let a stage have operators in several places."""
    orders = []
    for schedule in SCHEDULES.values():
        if schedule.chunked:
            order = [schedule.stage_of(chunk, 2) for chunk in range(4)]
            orders.append(f"{_shown(order)} with schedule {schedule.name!r}")
    return f"stages may come again in the order {', or '.join(orders)}"


def _check_ascending(graph: Graph, chunk_of: Mapping[str, int], pipeline: PipelineSpec) -> None:
    for op in graph.ops:
        for value in op.inputs:
            maker = graph.producer.get(value)
            if maker is None or chunk_of[maker.name] <= chunk_of[op.name]:
                continue
            early = pipeline.stage_of(chunk_of[op.name])
            late = pipeline.stage_of(chunk_of[maker.name])
            raise StrategyError(
                f"stages must ascend in the order of execution: {op.name} is in stage {early}, but"
                f" reads the output of {maker.name} in stage {late}; {_orders_with_chunks()}"
            )
