"""Options that several commands share, and the loading of a run with these options."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from shardwright.cli.app import echo
from shardwright.core.planner.options import NO_LIMIT
from shardwright.core.planner.requirement import parse_bytes
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.progress import OnProgress, ignore_progress
from shardwright.run.config import Run
from shardwright.run.launch.process_group import is_launched
from shardwright.text_files import check_exists

Paths = TypeVar("Paths", Path, Path | None, list[Path])

LOG_DIR = Path("log_output")


def require_existing(error_type: type[ShardwrightError]) -> Callable[[Paths], Paths]:
    """Return an argument callback that raises `error_type` if a file does not exist."""

    # A callback, because it runs while arguments are parsed: a missing file is then reported before
    # a missing option.
    def check(paths: Paths) -> Paths:
        # An option may be missing, or given several times.
        for path in [paths] if isinstance(paths, Path) else paths or ():
            check_exists(path, error_type)
        return paths

    return check


def check_output(out: Path | None, suffixes: Sequence[str], *inputs: str | Path | None) -> None:
    """Check that the option --out overwrites no input of the command, and no file of another kind.

    Args:
        out: the file to write; None without the option.
        suffixes: suffixes of the files that the command writes, the usual one first.
        inputs: files that the command reads; other texts, such as names of clusters, are ignored.

    Raises:
        ConfigError: if `out` exists, and is an input or has another suffix.
    """
    if out is None or not out.is_file():
        return
    if any(out.samefile(each) for each in inputs if each is not None and Path(each).exists()):
        raise ConfigError(
            f"--out {out} would overwrite a file that the command reads\nchoose another file"
        )
    # A file without a suffix may be of any kind.
    if out.suffix.lower() not in ("", *suffixes):
        raise ConfigError(
            f"--out {out} already exists and is not a {suffixes[0]} file\n"
            f"choose another file, such as {out.with_suffix(suffixes[0])}"
        )


ConfigArgument = Annotated[
    Path,
    typer.Argument(
        help="A YAML configuration.", show_default=False, callback=require_existing(ConfigError)
    ),
]
LogDirOption = Annotated[Path, typer.Option(help="Folder for the ranks' logs.")]
DevicesOption = Annotated[int, typer.Option(help="Number of devices.", show_default=False)]


def _parse_mem_coeff_option(text: str | None) -> str | None:
    """Return `text`; raise `typer.BadParameter` unless it is a positive number or `auto`."""
    error = typer.BadParameter(f"{text!r} is neither a positive number nor auto")
    try:
        # NaN fails both comparisons.
        valid = text is None or text == "auto" or 0 < float(text) < inf
    except ValueError:
        raise error from None
    if not valid:
        raise error
    return text


MemCoeffOption = Annotated[
    str | None,
    typer.Option(
        help="Weight of memory relative to communication; overrides the configuration. auto: the"
        " smallest weight whose plan fits into memory.",
        metavar="NUMBER|auto",
        callback=_parse_mem_coeff_option,
    ),
]


def _parse_memory_limit_option(text: str | None) -> str | None:
    """Return `text`; raise `typer.BadParameter` unless it is a size in bytes or `none`."""
    if text is not None and text != NO_LIMIT and parse_bytes(text) is None:
        raise typer.BadParameter(
            f"{text!r} is not a memory limit\nuse a size such as 24GiB, or {NO_LIMIT}"
        )
    return text


MemoryLimitOption = Annotated[
    str | None,
    typer.Option(
        help="Memory limit per device, such as 24GiB; overrides the configuration. Parameters are"
        " sharded and activations recomputed until the plan fits. By default the memory of the"
        " cluster's devices, if --cluster or the configuration names one; none: no limit.",
        metavar="SIZE|none",
        callback=_parse_memory_limit_option,
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        help="Minimize the predicted step time on this cluster: `local`, `h100`, …, or a YAML file."
    ),
]
LogCostsOption = Annotated[
    bool, typer.Option("--log-costs", help="Log the cost of each choice of the search.")
]


def load_run(
    config: Path,
    mem_coeff: str | None = None,
    log_costs: bool = False,
    resume: bool = False,
    cluster: str | None = None,
    memory_limit: str | None = None,
    save_graphs: Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Run:
    """Load a configuration file, and override its keys by options of the command line.

    Args:
        on_progress: called before each phase of planning.

    Raises:
        ConfigError: if the file does not exist or is invalid.
    """
    run = Run.from_file(config)
    _print_ignored_keys(run, config)
    changes: dict[str, object] = {}
    if mem_coeff is not None:
        changes["mem_coeff"] = mem_coeff if mem_coeff == "auto" else float(mem_coeff)
    if log_costs:
        changes["log_costs"] = True
    if memory_limit is not None:
        changes["memory_limit"] = memory_limit
    if save_graphs is not None:
        # A path on the command line is relative to the working directory.
        changes["save_graphs"] = save_graphs.absolute()
    if cluster is not None:
        path = Path(cluster)
        # A file of this name wins over a cluster of this name.
        changes["cluster"] = str(path.absolute()) if path.is_file() else cluster
    # `model_copy` checks nothing; the callbacks of the options have.
    parallel = run.config.parallel.model_copy(update=changes)
    # The search reports its choices as log messages of level INFO.
    if parallel.log_costs or "auto" in (parallel.stages, parallel.schedule):
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    train = run.config.train.model_copy(update={"resume": resume or run.config.train.resume})
    changed = run.config.model_copy(update={"parallel": parallel, "train": train})
    return replace(run, config=changed, on_progress=on_progress)


def _print_ignored_keys(run: Run, config: Path) -> None:
    """Print keys of another framework's file that are ignored or interpreted differently."""
    # Not on launched ranks: the launcher has printed them already.
    if run.foreign is None or is_launched():
        return
    for note in run.foreign.notes:
        echo(f"{config}: {note}", err=True)
    if run.foreign.unused:
        count, names = len(run.foreign.unused), ", ".join(run.foreign.unused)
        keys = "key is" if count == 1 else "keys are"
        echo(f"{config}: {count} {keys} ignored: {names}", err=True)


def print_batch_formula(run: Run, config: Path, devices: int) -> None:
    """Print the global batch size and its formula to stderr, for another framework's file."""
    if run.foreign is not None and not is_launched():
        echo(f"{config}: {run.foreign.batch_formula(devices)}", err=True)


ProgressOption = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Report progress on stderr; by default on a terminal, elsewhere one line per minute.",
        show_default=False,
    ),
]
