"""Stages as users name them: each module with its number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby

from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph, Op
from shardwright.graph.neighbours import with_neighbours
from shardwright.pipelining import CHUNKED, Pipelining
from shardwright.search.stages import operator_work

StageConfig = Mapping[str, int]
"""Names of modules, each with the number of its stage."""


def named(
    graph: Graph,
    stage_config: StageConfig,
    schedule: str,
    modules: Iterable[str] = (),
) -> tuple[int, int, dict[str, int]]:
    """The number of stages, the chunks of each, and for each operator the number of its part.

    A module's stage is that of the longest name that is its path or leads to it. An operator that
    no name leads to follows what it reads, or else what reads it.

    Args:
        stage_config: stages ascend in the order of execution; with `interleaved_1f1b` they may
            repeat, 0, 1, 0, 1, with `zero_bubble_v` they come back, 0, 1, 1, 0.
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
    if schedule in CHUNKED:
        anchored, chunks = _chunked(graph, runs, stages, schedule)
    else:
        anchored, chunks = {op.name: labels[op.name] or 0 for op in ordered}, 1
    part_of = with_neighbours(graph, anchored)
    _check_ascending(graph, part_of, Pipelining(stages, 1, schedule, chunks))
    return stages, chunks, part_of


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
                f"stage_config[{name!r}]={stage!r}: must be a whole number from 0 on"
            )
    if not stage_config:
        raise StrategyError("stage_config is empty: name the modules of each stage, or leave it")
    stages = max(stage_config.values()) + 1
    missing = sorted(set(range(stages)) - set(stage_config.values()))
    if missing:
        raise StrategyError(
            f"stage_config names stages up to {stages - 1}, but no module in stage"
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
            f" {_listed(list(dict.fromkeys(left)))}; name them, or a module that contains them"
        )


def _chunked(
    graph: Graph, runs: list[tuple[int, list[Op]]], stages: int, schedule: str
) -> tuple[dict[str, int], int]:
    """The part of each operator that a name leads to, and the number of chunks."""
    if schedule == "zero_bubble_v":
        runs = _with_turn(graph, runs, stages)
        wanted = [*range(stages), *reversed(range(stages))]
    else:
        wanted = list(range(stages)) * max(1, len(runs) // stages)
    order = [stage for stage, _ in runs]
    if order != wanted:
        raise StrategyError(
            f"stage_config runs through stages {_shown(order)}; with {schedule} it must be"
            f" {_shown(wanted)}"
        )
    return {op.name: part for part, (_, ops) in enumerate(runs) for op in ops}, (
        len(runs) // stages
    )


def _shown(order: Sequence[int]) -> str:
    return ", ".join(map(str, order[:16])) + (", …" if len(order) > 16 else "")


def _with_turn(
    graph: Graph, runs: list[tuple[int, list[Op]]], stages: int
) -> list[tuple[int, list[Op]]]:
    """The last stage's two parts follow each other: cut where their work is nearest to equal,
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


def _check_ascending(graph: Graph, part_of: Mapping[str, int], pipeline: Pipelining) -> None:
    for op in graph.ops:
        for value in op.inputs:
            maker = graph.producer.get(value)
            if maker is None or part_of[maker.name] <= part_of[op.name]:
                continue
            early = pipeline.stage_of(part_of[op.name])
            late = pipeline.stage_of(part_of[maker.name])
            raise StrategyError(
                f"stages must ascend in the order of execution: {op.name} is in stage {early}, but"
                f" reads what {maker.name} makes in stage {late}; with schedule"
                " 'interleaved_1f1b' stages may repeat (0, 1, 0, 1), with 'zero_bubble_v' they come"
                " back (0, 1, 1, 0)"
            )
