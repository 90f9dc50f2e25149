"""The command `rehearse`, which trains single ranks of a plan in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table

from shardwright.cli.app import app, echo
from shardwright.cli.options import (
    ClusterOption,
    ConfigArgument,
    DevicesOption,
    MemCoeffOption,
    MemoryLimitOption,
    load_run,
    print_batch_formula,
    require_existing,
)
from shardwright.core.api.rehearsal import RankRehearsal, Rehearsal
from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan import Plan
from shardwright.core.plan.text_columns import render_lines
from shardwright.errors import PlanError
from shardwright.run.config.rehearse import rehearse_run

TABLE_WIDTH = 140


@app.command("rehearse")
def rehearse_command(
    config: ConfigArgument,
    devices: DevicesOption,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            help="A rank to rehearse; by default the first and last of each stage. May be repeated."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Use a saved plan, without a search.", callback=require_existing(PlanError)
        ),
    ] = None,
    device: Annotated[
        Literal["meta", "cpu"],
        typer.Option(
            help="meta: allocates no tensors, any model fits; cpu: computes, and writes a"
            " checkpoint."
        ),
    ] = "meta",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    mem_coeff: MemCoeffOption = None,
    cluster: ClusterOption = None,
    memory_limit: MemoryLimitOption = None,
) -> None:
    """Train three steps as single ranks of the plan, without starting the other ranks.

    Runs in this process and needs no devices. Exit status 1 if the communication volume of a rank
    differs from the plan's.
    """
    run = load_run(config, mem_coeff, cluster=cluster, memory_limit=memory_limit).for_devices(
        devices
    )
    # Loaded before anything is printed or searched, to refuse a plan for other devices.
    saved_plan = Plan.load(plan) if plan is not None else None
    if saved_plan is not None and saved_plan.devices != devices:
        raise PlanError(
            f"{plan} is a plan for {saved_plan.devices} devices, not for {devices}\n"
            f"use --devices {saved_plan.devices}, or leave out --plan to search for a new plan"
        )
    print_batch_formula(run, config, devices)
    used_plan = saved_plan or run.plan(devices)
    result = rehearse_run(run, used_plan, rank or (), torch.device(device))
    echo(dumps(asdict(result), indent=1) if json else rehearsal_text(result))
    if not result.passes():
        raise typer.Exit(1)


def rehearsal_text(result: Rehearsal) -> str:
    """Format each rank's table of phases, and its memory and communication volume."""
    lines: list[str] = []
    for rank in result.ranks:
        lines += render_lines(
            TABLE_WIDTH, _make_rank_table(rank, result.devices), *_format_rank_lines(rank)
        )
    return "\n".join(lines)


def _make_rank_table(rank: RankRehearsal, devices: int) -> Table:
    title = f"Rank {rank.rank} of {devices}, stage {rank.stage}, tensors on {rank.device}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("phase")
    table.add_column("CPU seconds", justify="right")
    table.add_column("of these")
    for phase in rank.phases:
        components = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phase.parts.items())
        table.add_row(phase.name, f"{phase.seconds:.2f}", components)
    return table


def _format_rank_lines(rank: RankRehearsal) -> Iterator[str]:
    yield f"process groups        {rank.groups:,} created"
    parameters, state = bytes_text(rank.parameter_bytes), bytes_text(rank.optimizer_bytes)
    yield f"memory between steps  {parameters} of parameters, {state} of optimizer state"
    counted, planned = bytes_text(rank.peak_bytes), bytes_text(rank.planned_peak)
    yield f"peak memory           {counted} counted, {planned} planned"
    if rank.checkpoint_bytes is None:
        yield "checkpoint            none, as meta tensors have no values: use --device cpu"
    else:
        yield f"checkpoint            {bytes_text(rank.checkpoint_bytes)} written and read"
    for collective, traffic in sorted(rank.traffic.items()):
        yield f"{collective:21} {traffic.calls:,} calls, {traffic.bytes:,} bytes in a step"
    verdict = "as planned" if rank.as_planned else "NOT as planned"
    # The bytes of the last step: in the first, PyTorch's pipeline stages may also exchange shapes.
    yield (
        f"bytes sent            {rank.sent_bytes[-1]:,} counted, {rank.planned_bytes:,} planned:"
        f" {verdict}"
    )
