"""Decides how a model is split."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shardwright.api.pipeline import Asked
from shardwright.communication import as_used
from shardwright.decided import Decided
from shardwright.errors import StrategyError
from shardwright.graph.capture import capture
from shardwright.graph.graph import Graph
from shardwright.pins import pins_of
from shardwright.plan import Plan, make_plan
from shardwright.recompute import recompute_of
from shardwright.rules.rule import Cuts
from shardwright.search.named_stages import StageConfig
from shardwright.search.presets import data_parallel, semi_auto, stand_alone
from shardwright.search.propagation import propagate
from shardwright.search.recursive import search
from shardwright.strategy import (
    DatasetStrategy,
    Fixed,
    OperatorStrategy,
    arrivals,
    check_dataset_strategy,
    fix,
    input_entries,
    storage_as_said,
)

Search = Callable[[Graph, Fixed, dict[str, Any]], Mapping[str, Cuts]]

MODES: dict[str, Search] = {
    "recursive_programming": lambda graph, fixed, options: search(
        graph, fixed.mesh, pinned=fixed.cuts, **options
    ),
    "sharding_propagation": lambda graph, fixed, options: propagate(
        graph, fixed.mesh, fixed.cuts, fixed.outputs
    ),
    "semi_auto": lambda graph, fixed, options: semi_auto(graph, fixed.mesh, fixed.cuts),
    "data_parallel": lambda graph, fixed, options: data_parallel(graph, fixed.mesh),
    "stand_alone": lambda graph, fixed, options: stand_alone(graph, fixed.mesh),
}
WITHOUT_PINS = ("data_parallel", "stand_alone")
"""Modes that decide every operator themselves."""


def plan(
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    devices: int,
    mode: str = "recursive_programming",
    mem_coeff: float = 0.1,
    cost_model: str = "symbolic",
    order: str = "weight",
    log_costs: bool = False,
    dataset_strategy: DatasetStrategy = "full_batch",
    stages: int = 1,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    stage_config: StageConfig | None = None,
) -> Plan:
    """Decides how every operator of `net` is split over `devices` devices.

    Needs no process group and touches no device; a model on the meta device will do.

    Args:
        net: a model, or a graph that was captured before.
        args, kwargs: an example of its call, with the whole batch; only shapes and dtypes matter.
        mode: `recursive_programming` (the double recursive search), `sharding_propagation` (from
            the operators that `shard` has pinned outwards, with the least redistribution),
            `semi_auto` (operators that `shard` has pinned as pinned, all others along the batch),
            `data_parallel` (everything follows the batch) or `stand_alone` (nothing is cut).
        mem_coeff: small values favour data parallel, large ones model parallel.
        cost_model: `symbolic`, the relative costs of the published search.
        order: in which the search takes operators, by `weight` or `topology`.
        log_costs: log every decision at level INFO of the logger `shardwright.search`.
        dataset_strategy: `full_batch` (every device is given the whole batch and keeps its part),
            `data_parallel` (every device of a stage is given its own equal part of the batch), or a
            tuple with an entry (counts, a layout, or None) for each tensor input.
        stages: into how many groups of equal size the devices are divided; each runs a part of the
            model, cut where parts are nearly equal in work.
        micro_batches: pieces of the batch that follow each other; at least as many as stages. A
            graph that is given is that of one micro-batch.
        schedule: in which order stages work on micro-batches: `1f1b`, `gpipe`, `interleaved_1f1b`
            (several chunks of the model a stage), `zero_bubble_v`.
        stage_config: names of modules, each with the number of its stage, in place of `stages`.

    Raises:
        StrategyError: if an option is not valid, nothing can be cut, an operator cannot be cut
            as it is pinned, or stages cannot be as asked.
        PlanError: if the batch cannot be cut into so many micro-batches.
        LayoutError: if pinned layouts are not of this number of devices, or do not fit together.
        CaptureError: if the model cannot be captured.
    """
    _check_options(devices, mode, mem_coeff, cost_model, order)
    check_dataset_strategy(dataset_strategy)
    net, asked = Asked(stages, micro_batches, schedule, stage_config).of(net)
    graph = net if isinstance(net, Graph) else capture(net, *asked.example(args, kwargs))
    modules = () if isinstance(net, Graph) else dict(net.named_modules())
    pipeline = asked.pipelining(graph, devices, modules)
    pins = pins_of(graph)
    _check_takes_pins(mode, pins.strategies)
    entries = input_entries(graph, dataset_strategy)
    devices_of_stage = devices // pipeline.stages
    fixed = fix(graph, devices_of_stage, pins.strategies, {**pins.parameters, **entries})
    mesh = fixed.mesh
    started = time.perf_counter()
    options: dict[str, Any] = {}
    if mode == "recursive_programming":
        options = {"mem_coeff": mem_coeff, "order": order, "log_costs": log_costs}
    cuts = MODES[mode](graph, fixed, options)
    seconds = time.perf_counter() - started
    options.pop("log_costs", None)
    if mode == "recursive_programming":
        options["cost_model"] = cost_model
    return make_plan(
        graph,
        mesh,
        Decided(
            cuts,
            storage_as_said(graph, mesh, pins.parameters, as_used(graph, mesh, cuts)),
            fixed.outputs,
            arrivals(graph, mesh, dataset_strategy),
            recompute=recompute_of(graph),
        ),
        mode=mode,
        options=options,
        search_seconds=seconds,
        training=net.training if isinstance(net, nn.Module) else True,
        pipeline=pipeline,
        pins=pins.strategies,
    )


def _check_takes_pins(mode: str, pinned: Mapping[str, OperatorStrategy]) -> None:
    if pinned and mode in WITHOUT_PINS:
        names = ", ".join(list(pinned)[:5]) + (" …" if len(pinned) > 5 else "")
        valid = ", ".join(name for name in MODES if name not in WITHOUT_PINS)
        raise StrategyError(
            f"mode={mode!r} decides every operator itself, but shard has pinned {names};"
            f" modes that take pins are {valid}"
        )


def _check_options(devices: int, mode: str, mem_coeff: float, cost_model: str, order: str) -> None:
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise StrategyError(f"devices={devices!r}: must be a whole number of at least 1")
    for what, given, valid in (
        ("mode", mode, tuple(MODES)),
        ("cost_model", cost_model, ("symbolic",)),
        ("order", order, ("weight", "topology")),
    ):
        if given not in valid:
            raise StrategyError(f"{what}={given!r}: valid are {', '.join(valid)}")
    if not isinstance(mem_coeff, int | float) or not mem_coeff > 0:
        raise StrategyError(f"mem_coeff={mem_coeff!r}: must be a positive number")
