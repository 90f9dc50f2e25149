"""The commands `launch`, `calibrate` and `models`, which need no plan."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from shardwright.cli.app import app, echo
from shardwright.cli.options import (
    LOG_DIR,
    LogDirOption,
    ProgressOption,
    check_output,
    require_existing,
)
from shardwright.core.api.show_progress import show_progress
from shardwright.core.checkpoint.folder_lock import lock_folders
from shardwright.core.cost.cluster_file import cluster_file_text, cluster_to_yaml
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.local_cluster import cache_file
from shardwright.core.plan.text_columns import PrintableConsole
from shardwright.errors import ConfigError
from shardwright.models import MODELS, build
from shardwright.run.launch.launch import launch
from shardwright.run.launch.log_folder import LogFolder
from shardwright.text_files import write_text
from shardwright.tools.compare.fit_cluster import fit_cluster
from shardwright.tools.compare.measure_processes import calibrate
from shardwright.tools.compare.published_config import planned_runs

TABLE_WIDTH = 140
MAX_PROCESSES = 1024
"""Maximum number of processes on one machine, to catch typos."""

TITLES_BY_FIELD = {
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "num_heads": "heads",
    "num_kv_heads": "KV heads",
    "intermediate_size": "FFN size",
    "vocab_size": "vocabulary",
    "seq_length": "max. sequence",
    "positions": "positions",
}
"""Column titles of the command `models`, by field of `Dimensions`."""


# Everything after SCRIPT belongs to the script, options included.
@app.command(
    "launch", context_settings={"allow_extra_args": True, "allow_interspersed_args": False}
)
def launch_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script.", exists=True, dir_okay=False)],
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_PROCESSES,
            help="Number of devices; required, before SCRIPT.",
            show_default=False,
        ),
    ] = None,
    log_dir: LogDirOption = LOG_DIR,
) -> None:
    """Run a script as local processes, one per device.

    Sets the environment variables that torchrun sets. Rank N writes to LOG_DIR/1/rank.N/stdout and
    stderr. Arguments after SCRIPT are passed to it.
    """
    # Not a required option: an option after the script would only be reported as missing.
    if devices is None:
        # In the form `--devices 8` or `--devices=8`.
        is_after = any(each.split("=")[0] == "--devices" for each in context.args)
        # Options after the script belong to the script, so Click leaves them in `args`.
        reason = (
            "--devices after the script is passed to the script" if is_after else "no --devices"
        )
        raise typer.BadParameter(f"{reason}\nwrite `shardwright launch --devices 8 {script}`")
    logs = LogFolder(log_dir)
    with lock_folders(logs.root) as locks:
        # Under the lock only, as another run may still write to these files.
        logs.clear(num_ranks=devices)
        launch([str(script), *context.args], devices, logs, locks=locks)


@app.command("calibrate")
def calibrate_command(
    devices: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=MAX_PROCESSES,
            help="Processes between which the links are measured; by default 2.",
            show_default=False,
        ),
    ] = None,
    runs_file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Fit a cluster to the published training runs in this JSON file.",
            callback=require_existing(ConfigError),
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="With --from: name or YAML file of a cluster with the peak rates and bandwidths;"
            " by default the cluster of all runs."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --from: the cluster file to write.")
    ] = None,
    progress: ProgressOption = None,
) -> None:
    """Measure this machine for the cluster `local`.

    Measures the CPU and the links between processes, and saves the result in the user's cache. With
    --from, fits another cluster to published training runs.
    """
    if runs_file is None:
        if cluster is not None or out is not None:
            raise typer.BadParameter("--cluster and --out need --from\nadd --from RUNS.json")
        with show_progress(progress) as on_progress:
            # The option has no default, which would hide whether --from is combined with it.
            measured = calibrate(devices or 2, on_progress)
        echo(cluster_to_yaml(measured).rstrip())
        echo(f"# saved in {cache_file()}")
        return
    if out is None or devices is not None:
        raise typer.BadParameter(
            "--from needs --out, and cannot be combined with --devices\n"
            "example: shardwright calibrate --from runs.json --out cluster.yaml"
        )
    check_output(out, (".yaml", ".yml"), runs_file, cluster)
    base = None if cluster is None else load_cluster(cluster)
    planned, left_out = planned_runs(runs_file, base)
    # One cluster is fitted, so that all runs must have its hardware.
    names = sorted({each.run.hardware for each in planned})
    if len(names) > 1:
        raise typer.BadParameter(
            f"{runs_file} has runs on several clusters\n"
            f"use --cluster with one of {', '.join(names)}"
        )
    # Without --cluster, the one cluster of all runs.
    base = base or load_cluster(names[0])
    for why in left_out.values():
        echo(f"left out: {why}")
    with show_progress(progress) as on_progress:
        fitted = fit_cluster(planned, base, on_progress)
    # Runs may share a source.
    sources = sorted({f"#   {each.run.source}" for each in planned})
    # Comments of the cluster file, which say where its figures are from.
    header = f"# Efficiencies, overhead, latencies and slowdown fitted to {len(planned)} runs of"
    content = "\n".join([header, *sources, cluster_file_text(fitted.cluster)])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, content)
    off = f"predicted {fitted.error:.1%} off in the median"
    echo(f"{len(planned)} runs on {base.name}, {off}")
    for name, ratio in fitted.unexplained.items():
        echo(f"not explained: {name}, predicted time is {ratio:.2f} of the measured time")
    echo(f"written to {out}")


@app.command("models")
def models_command(
    tiny: Annotated[bool, typer.Option("--tiny", help="List the tiny variants for tests.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the built-in language models with their sizes."""
    names = [name for name in MODELS if name.endswith("_tiny") == tiny]
    counts = {name: parameter_count(name) for name in names}
    if json:
        entries = [
            {"name": name, "parameters": counts[name], **asdict(MODELS[name])} for name in names
        ]
        echo(dumps(entries, indent=1))
        return
    table = Table()
    table.add_column("model.name")
    for title in ("parameters", *TITLES_BY_FIELD.values()):
        table.add_column(title, justify="right")
    for name in names:
        sizes = (str(getattr(MODELS[name], key)) for key in TITLES_BY_FIELD)
        table.add_row(name, f"{counts[name]:,}", *sizes)
    PrintableConsole(width=TABLE_WIDTH, highlight=False).print(table)
    if not tiny:
        echo("each model has a tiny variant for tests, NAME_tiny: see --tiny")


def parameter_count(name: str) -> int:
    """Count the parameters of a built-in model, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name).parameters())
