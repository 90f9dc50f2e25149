"""Decides how a model is split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shardwright.constraints import DatasetStrategy
from shardwright.constraints.shard import pins_of
from shardwright.cost.cluster import Cluster
from shardwright.graph.graph import Graph
from shardwright.partition.decisions import BUCKET_BYTES, OptimizerParallel
from shardwright.partition.pipeline_spec import AUTO
from shardwright.plan import Plan
from shardwright.planner.candidate import Candidate, CapturedModel, make_candidate
from shardwright.planner.choose_stages import suggest_stages as suggest
from shardwright.planner.choose_stages import with_best_stages
from shardwright.planner.fit_memory import within_memory
from shardwright.planner.options import MB, PlanOptions
from shardwright.planner.pipeline import PipelineRequest
from shardwright.progress import OnProgress, silent
from shardwright.search.assign_stages import StageConfig


def plan(
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    devices: int,
    mode: str = "recursive_programming",
    mem_coeff: float | Literal["auto"] = 0.1,
    cost_model: str | None = None,
    cluster: Cluster | str | Path | None = None,
    order: str = "weight",
    log_costs: bool = False,
    dataset_strategy: DatasetStrategy = "full_batch",
    stages: int | Literal["auto"] = 1,
    max_stages: int | None = None,
    suggest_stages: bool = False,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    stage_config: StageConfig | None = None,
    hsdp: OptimizerParallel | Mapping[str, Any] | bool | None = None,
    bucket_mb: float = BUCKET_BYTES / MB,
    compute_dtype: str | None = None,
    memory_limit: int | str | None = None,
    recompute: str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    on_progress: OnProgress = silent,
) -> Plan:
    """Decides how every operator of `net` is split over `devices` devices.

    Needs no process group and touches no device; a model on the meta device will do.

    Args:
        net: a model, or a graph that was captured before.
        args, kwargs: an example of its call, with the whole batch; only shapes and dtypes matter.
        mode: `recursive_programming` (the double recursive search), `exact` (all operators and
            axes together, for small models), `sharding_propagation` (from the operators that
            `shard` has pinned outwards, with the least redistribution), `semi_auto` (operators
            that `shard` has pinned as pinned, all others along the batch), `data_parallel`
            (everything follows the batch) or `stand_alone` (nothing is cut).
        mem_coeff: small values favor data parallel, large ones model parallel. `auto` is the
            smallest that fits `memory_limit`, or the memory of the devices of the cluster.
        cost_model: `symbolic`, the relative costs of the published search, or `time`, the seconds
            of a step on a cluster; by default `time` where a cluster is named.
        cluster: `local` (this machine), a built-in one (`h100`, `ascend910b`, …), or a YAML file.
        order: in which the search takes operators, by `weight` or `topology`.
        log_costs: log every decision at level INFO of the logger `shardwright.search`.
        dataset_strategy: `full_batch` (every device is given the whole batch and keeps its part),
            `data_parallel` (every device of a stage is given its own equal part of the batch), or a
            tuple with an entry (counts, a layout, or None) for each tensor input.
        stages: into how many groups of equal size the devices are divided; each runs a part of the
            model, cut where parts are nearly equal in work, or on a cluster in time. `auto` takes
            the number whose step takes the least time, at most `max_stages` and not more than
            micro-batches.
        suggest_stages: log which number `auto` would take where it is another than `stages`, if a
            cluster is named.
        micro_batches: pieces of the batch that follow each other; at least as many as stages. A
            graph that is given is that of one micro-batch.
        schedule: in which order stages work on micro-batches; `docs/pipeline.md` lists them.
        stage_config: names of modules, each with the number of its stage, in place of `stages`.
        hsdp: stores parameters sharded that are used whole (optimizer parallel): True, an
            `OptimizerParallel`, or a mapping with its fields.
        bucket_mb: up to how many MiB collectives of parameters are joined.
        compute_dtype: `bfloat16` computes and sends what is stored in single precision in half of
            it; parameters and optimizer state stay in single precision.
        memory_limit: bytes of a device, or a text like `24GiB`. A plan that needs more in a step is
            changed until it fits: parameters and optimizer state are sharded (`hsdp`), then
            operators are computed again in the backward pass, then `mem_coeff` grows, then there
            are more stages. On a cluster the first three are weighed by time.
        recompute: `auto` computes as much again as the memory limit asks for, before anything else
            is changed; without a limit, that of the devices of the cluster.
        optimizer: for which memory is reckoned: `sgd`, `momentum`, `adam`, `adamw`, or an optimizer
            like the one to be used.
        on_progress: called with each part of the work as it begins.

    Raises:
        StrategyError: if an option is not valid, nothing can be cut, an operator cannot be cut
            as it is pinned, or stages cannot be as asked.
        ConfigError: if there is no such cluster, or it has fewer devices.
        PlanError: if the batch cannot be cut into so many micro-batches.
        MemoryLimitError: if nothing fits into `memory_limit`; says what would.
        LayoutError: if pinned layouts are not of this number of devices, or do not fit together.
        CaptureError: if the model cannot be captured.
    """
    options = PlanOptions(
        devices=devices,
        mode=mode,
        mem_coeff=mem_coeff,
        cost_model=cost_model,
        cluster=cluster,
        order=order,
        log_costs=log_costs,
        dataset_strategy=dataset_strategy,
        asked=PipelineRequest(stages, micro_batches, schedule, stage_config, max_stages=max_stages),
        hsdp=hsdp,
        bucket_mb=bucket_mb,
        compute_dtype=compute_dtype,
        memory_limit=memory_limit,
        recompute=recompute,
        optimizer=optimizer,
        on_progress=on_progress,
    )
    net, asked = options.asked.of(net)
    options = replace(options, asked=asked)
    graph = options.captured(net, args, kwargs)
    model = CapturedModel(
        graph,
        pins_of(graph),
        () if isinstance(net, Graph) else tuple(name for name, _ in net.named_modules()),
        net.training if isinstance(net, nn.Module) else True,
    )

    def drafted(each: PlanOptions) -> Candidate:
        return make_candidate(model, each)

    if asked.stages == AUTO:
        return with_best_stages(options, drafted).plan()
    found = within_memory(options, drafted)
    if suggest_stages:
        suggest(options, found, drafted)
    return found.plan()
