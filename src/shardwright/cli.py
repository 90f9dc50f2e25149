"""The command `shardwright`: each of its commands reads a configuration and calls the library."""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardwright import errors
from shardwright.api import Check, check
from shardwright.config import Run
from shardwright.errors import PlanError, ShardwrightError
from shardwright.plan import Plan
from shardwright.saved_graphs import SavedGraphs
from shardwright.train.follow import Follower
from shardwright.train.launch import LogFolder, RankFailedError, StoppedError, launch
from shardwright.train.process_group import World, launched
from shardwright.train.progress import LiveProgress
from shardwright.train.steps import Step

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

Config = Annotated[Path, typer.Argument(help="The YAML configuration.", show_default=False)]
Devices = Annotated[int, typer.Option(help="Number of devices.", show_default=False)]
MemCoeff = Annotated[
    float | None,
    typer.Option(help="Weight of memory against communication, instead of the configuration's."),
]
LogCosts = Annotated[bool, typer.Option("--log-costs", help="Log what each cut would cost.")]


@app.callback()
def shardwright() -> None:
    """Decide how every operator of a PyTorch model is split over N devices, and train it there."""


@app.command("plan")
def plan_command(
    config: Config,
    devices: Devices,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the plan to this file.")] = None,
    save_graphs: Annotated[
        Path | None,
        typer.Option(help="Save the graph before and after planning, and rank 0's program, here."),
    ] = None,
    mem_coeff: MemCoeff = None,
    log_costs: LogCosts = False,
) -> None:
    """Search a plan and print it. Needs no devices and starts no processes."""
    run = _run(config, mem_coeff, log_costs)
    plan = run.plan(devices, SavedGraphs(save_graphs) if save_graphs is not None else None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        plan.save(out)
    typer.echo(plan.to_json() if json else str(plan))


@app.command()
def explain(
    config: Config,
    name: Annotated[str, typer.Argument(help="An operator, by its module path.")],
    devices: Devices,
    mem_coeff: MemCoeff = None,
) -> None:
    """Say how one operator is cut, and why."""
    typer.echo(_run(config, mem_coeff).plan(devices).explain(name))


@app.command("check")
def check_command(
    config: Config,
    devices: Devices,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    mem_coeff: MemCoeff = None,
) -> None:
    """Run the planned program on simulated ranks in this process, and compare it with one device:
    loss, every gradient, and the bytes sent. Exit status 1 where they differ."""
    run = _run(config, mem_coeff)
    result = check(run.model(), run.example_batch(), {}, run.plan(devices))
    typer.echo(dumps(asdict(result), indent=1) if json else _check_text(result, devices))
    if not result.passes():
        raise typer.Exit(1)


@app.command()
def train(
    config: Config,
    devices: Annotated[
        int | None,
        typer.Option(help="Number of devices; by default the plan's, or torchrun's, or 1."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A saved plan, instead of a search.")] = None,
    log_dir: Annotated[Path, typer.Option(help="Folder of the ranks' logs.")] = Path("log_output"),
    mem_coeff: MemCoeff = None,
) -> None:
    """Train on local processes, one a device; under torchrun, on those that it started."""
    run, logs, world = _run(config, mem_coeff), LogFolder(log_dir), World.from_environment()
    given = Plan.load(plan) if plan is not None else None
    if devices is None:
        devices = given.devices if given else world.size
    if given is not None and given.devices != devices:
        raise PlanError(f"{plan} is for {given.devices} devices, not for {devices}")
    decided = given or run.plan(devices)
    if launched():
        record(_train_one_rank)(run, decided, world, logs)
        return
    logs.clear(num_ranks=devices)
    if devices == 1:
        _train_one_rank(run, decided, world, logs)
        return
    decided.save(logs.plan)
    command = ["-P", "-m", "shardwright", "train", str(config), "--plan", str(logs.plan)]
    with LiveProgress(Console(), run.num_steps) as progress:
        on_line = {
            logs.stdout(0): progress.line,
            logs.steps(0): lambda line: progress.step(Step.from_json(line)),
        }
        with Follower(on_line):
            launch([*command, "--log-dir", str(log_dir)], devices, logs)


def _run(config: Path, mem_coeff: float | None = None, log_costs: bool = False) -> Run:
    """The run of a configuration with the command line's options in place of its own."""
    run = Run.from_file(config)
    changes: dict[str, object] = {}
    if mem_coeff is not None:
        changes["mem_coeff"] = mem_coeff
    if log_costs:
        changes["log_costs"] = True
    parallel = run.config.parallel.model_copy(update=changes)
    if parallel.log_costs:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return Run(run.config.model_copy(update={"parallel": parallel}), run.folder)


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


def _train_one_rank(run: Run, plan: Plan, world: World, logs: LogFolder) -> None:
    """Rank 0 writes each step to its `steps.jsonl`, prints the documented line every `log_every`
    steps, and shows its progress where it has a terminal; the other ranks say nothing."""
    if world.rank != 0:
        run.train(plan, world, on_step=lambda step: None)
        return
    every = run.config.train.log_every
    logs.rank(0).mkdir(parents=True, exist_ok=True)
    with (
        logs.steps(0).open("w", buffering=1) as file,
        LiveProgress(Console(), run.num_steps) as progress,
    ):

        def on_step(step: Step) -> None:
            file.write(step.to_json() + "\n")
            progress.step(step)
            if step.step % every == 0:
                progress.line(step.line)

        try:
            run.train(plan, world, on_step)
        except KeyboardInterrupt:
            raise StoppedError(signal.SIGINT) from None


def main() -> None:
    """The entry point: one line for an error in the input (exit status 2), the failed rank's
    traceback for an error in the model (1), 128 + the signal's number when stopped."""
    # What torch warns of while it captures a model is in the error, if there is one.
    torch._logging.set_logs(all=logging.ERROR)  # type: ignore[attr-defined]
    try:
        app()
    except ShardwrightError as error:
        _fail(str(error), 2)
    except RankFailedError as error:
        # A rank may find a mistake of the input that this process could not see.
        if issubclass(getattr(errors, error.kind, Exception), ShardwrightError):
            _fail(error.text, 2)
        _fail(str(error), 1)
    except StoppedError as error:
        _fail(str(error), 128 + error.number)


def _fail(message: str, status: int) -> None:
    for line in message.splitlines() if status == 2 else [message]:
        typer.echo(f"error: {line}", err=True)
    raise SystemExit(status)
