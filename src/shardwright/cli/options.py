"""Options that several commands have."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright.config import Run

Config = Annotated[Path, typer.Argument(help="The YAML configuration.", show_default=False)]
Devices = Annotated[int, typer.Option(help="Number of devices.", show_default=False)]
MemCoeff = Annotated[
    float | None,
    typer.Option(help="Weight of memory against communication, instead of the configuration's."),
]
LogCosts = Annotated[bool, typer.Option("--log-costs", help="Log what each cut would cost.")]


def run_of(
    config: Path,
    mem_coeff: float | None = None,
    log_costs: bool = False,
    resume: bool = False,
) -> Run:
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
    train = run.config.train.model_copy(update={"resume": resume or run.config.train.resume})
    return Run(run.config.model_copy(update={"parallel": parallel, "train": train}), run.folder)
