"""Stages that the user configures, by the modules that each stage runs (`stage_config`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby

from shardwright.core.graph.graph import Graph, Op
from shardwright.core.graph.split import assign_neighbors
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES, ScheduleSpec
from shardwright.core.search.assign_stages import operator_work
from shardwright.errors import StrategyError

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
