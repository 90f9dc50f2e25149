"""`shardwright train`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardwright.cli.app import app
from shardwright.cli.options import Config, MemCoeff, run_of
from shardwright.config import Run
from shardwright.errors import PlanError
from shardwright.plan import Plan
from shardwright.train.follow import Follower
from shardwright.train.launch import LogFolder, StoppedError, launch
from shardwright.train.process_group import World, launched
from shardwright.train.progress import LiveProgress
from shardwright.train.steps import Step


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
    run, logs, world = run_of(config, mem_coeff), LogFolder(log_dir), World.from_environment()
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
