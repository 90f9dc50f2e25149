"""`shardwright check`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Annotated

import typer

from shardwright.api import Check, check
from shardwright.cli.app import app
from shardwright.cli.options import Config, Devices, MemCoeff, run_of


@app.command("check")
def check_command(
    config: Config,
    devices: Devices,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    mem_coeff: MemCoeff = None,
) -> None:
    """Run the planned program on simulated ranks in this process, and compare it with one device:
    loss, every gradient, and the bytes sent. Exit status 1 where they differ."""
    run = run_of(config, mem_coeff).on(devices)
    result = check(run.model(), run.example_batch(), {}, run.plan(devices))
    typer.echo(dumps(asdict(result), indent=1) if json else _check_text(result, devices))
    if not result.passes():
        raise typer.Exit(1)


def _check_text(result: Check, devices: int) -> str:
    loss = "none" if result.loss is None else f"{result.loss:.9g}"
    counted, planned = result.counted_bytes, result.planned_bytes
    return "\n".join(
        [
            f"{devices} simulated ranks against one device, in double precision",
            f"loss on one device       {loss}",
            f"difference of the loss   {result.loss_difference:.1e}",
            f"of the gradients         {result.gradient_difference:.1e} ({result.worst_parameter})",
            f"between the ranks        {result.replica_difference:.1e}",
            f"bytes a device sends     {sum(counted):,} counted, {sum(planned):,} planned",
            "equal" if result.passes() else "NOT equal",
        ]
    )
