"""The command `compare`, which compares automatic plans with expert configurations."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Literal

import typer
from rich.table import Table

from shardwright.cli.app import app, echo
from shardwright.cli.options import LOG_DIR, LogDirOption, ProgressOption, require_existing
from shardwright.core.api.show_progress import show_progress
from shardwright.core.checkpoint.folder_lock import lock_folders
from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.text_columns import PrintableConsole
from shardwright.errors import ConfigError
from shardwright.progress import nested_progress
from shardwright.run.launch.log_folder import LogFolder
from shardwright.tools.compare import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    GRID,
    TENSOR_PARALLEL,
    Alternative,
    Comparison,
    MeasuredComparison,
    alternative_name,
    compare_measured,
    compare_predicted,
)

TABLE_WIDTH = 140
DEFAULT_CLUSTER, DEFAULT_PROCESSES, DEFAULT_ROUNDS = "ascend910b", 8, 12


@app.command("compare")
def compare_command(
    configs: Annotated[
        list[Path],
        typer.Argument(
            help="Expert configurations, such as configs/*_expert.yaml.",
            callback=require_existing(ConfigError),
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            help=f"The cluster: a name or a YAML file. By default {DEFAULT_CLUSTER}; with --run"
            " this machine, which is calibrated first."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Number of devices. By default that of the configuration; with --run"
            f" {DEFAULT_PROCESSES} processes."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    progress: ProgressOption = None,
    run: Annotated[
        Literal["tiny"] | None,
        typer.Option(help="Measure training steps of tiny variants on local processes."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="With --run: measured steps of each alternative.")
    ] = DEFAULT_ROUNDS,
    log_dir: LogDirOption = LOG_DIR,
) -> None:
    """Compare the automatic plan with expert configurations.

    Also compares with every combination of data, tensor and pipeline parallelism, by predicted step
    time. Exit status 1 if an alternative that fits into memory is faster.
    """
    if run is not None:
        logs = LogFolder(log_dir)
        processes = DEFAULT_PROCESSES if devices is None else devices
        # Another run in this folder would overwrite the logs.
        with lock_folders(logs.root), show_progress(progress) as on_progress:
            measured = compare_measured(
                configs,
                logs,
                devices=processes,
                rounds=rounds,
                cluster=cluster,
                on_progress=on_progress,
            )
        _print_measured_comparisons(measured, json)
        return
    with show_progress(progress) as on_progress:
        comparisons = [
            compare_predicted(
                config,
                # Not the default of the option: with --run it is this machine.
                cluster or DEFAULT_CLUSTER,
                devices,
                nested_progress(on_progress, config.stem, index, len(configs)),
            )
            for index, config in enumerate(configs)
        ]
    if json:
        # The JSON calls alternatives "ways": a published key.
        data = [{**asdict(each), "speed_up": each.speed_up} for each in comparisons]
        for each in data:
            each["ways"] = each.pop("alternatives")
        echo(dumps(data, indent=1))
    else:
        console = PrintableConsole(width=TABLE_WIDTH)
        console.print(comparison_table(comparisons))
        for comparison in comparisons:
            if comparison.too_large:
                console.print(too_large_text(comparison), highlight=False, soft_wrap=True)
    if not all(comparison.auto_is_fastest for comparison in comparisons):
        raise typer.Exit(1)


def _print_measured_comparisons(comparisons: list[MeasuredComparison], json: bool) -> None:
    if json:
        data = [{**asdict(each), "spearman": each.correlation} for each in comparisons]
        for run in (run for each in data for run in each["runs"]):
            # The published key, as for predictions.
            run["ways"] = run.pop("names")
        echo(dumps(data, indent=1))
        return
    console = PrintableConsole(width=TABLE_WIDTH)
    for comparison in comparisons:
        console.print(measured_table(comparison))


def measured_table(comparison: MeasuredComparison) -> Table:
    """Return a table with a row for each measured alternative."""
    table = Table(
        title=f"{comparison.model}: {comparison.batch} x {comparison.seq_length} tokens per step on"
        f" {comparison.processes} processes; Spearman's ρ of predicted and measured"
        f" {comparison.correlation:.2f}",
        title_justify="left",
    )
    table.add_column("data · tensor · pipeline parallel", overflow="fold")
    for name in ("predicted, ms", "measured, ms (quartiles)", "ratio", "speedup (quartiles)"):
        table.add_column(name, justify="right")
    for run in comparison.runs:
        # There are at least two rounds, which `compare_measured` checks.
        low, _, high = quantiles(run.seconds, n=4)
        slower, middle, faster = comparison.speed_ups(run)
        table.add_row(
            # Alternatives with equal plans are measured once, and share a row.
            "\n".join(run.names),
            f"{1e3 * run.predicted:.1f}",
            f"{1e3 * run.median:.1f} ({1e3 * low:.1f}–{1e3 * high:.1f})",
            f"{run.ratio:.2f}",
            f"{middle:.0%} ({slower:.0%}–{faster:.0%})",
        )
    return table


TITLE = "Thousand tokens/s, peak memory per device, and bytes a device sends per step"
# Kinds of plans that have a column in the table, from left to right.
COLUMN_KINDS = (EXPERT, DATA_PARALLEL, TENSOR_PARALLEL, GRID, AUTO)


def comparison_table(comparisons: list[Comparison]) -> Table:
    """Return a table with a row for each model and a column for each type of plan.

    The last columns are the automatic plan's optimality gap, and its speedup over the expert's.
    """
    table = Table(title=TITLE, title_justify="left")
    table.add_column("model")
    table.add_column("devices", justify="right")
    table.add_column("batch", justify="right")
    for column_kind in COLUMN_KINDS:
        table.add_column(column_kind, justify="right")
    table.add_column("gap", justify="right")
    table.add_column("speedup", justify="right")
    for comparison in comparisons:
        table.add_row(
            comparison.model,
            str(comparison.devices),
            str(comparison.global_batch),
            *(_format_alternative(comparison.of_kind(column_kind)) for column_kind in COLUMN_KINDS),
            _format_optimality_gap(comparison.of_kind(AUTO)),
            f"{comparison.speed_up:.1%}",
        )
    return table


def _format_optimality_gap(auto: Alternative | None) -> str:
    return "-" if auto is None or auto.gap is None else f"{auto.gap:.1%}"


def too_large_text(comparison: Comparison) -> str:
    """Return a line that lists the alternatives over the memory limit, with their peak memory."""
    assert comparison.limit is not None
    excluded = ", ".join(
        f"{alternative_name(each.kind, each.parts)} ({bytes_text(each.memory)})"
        for each in comparison.too_large
    )
    limit = bytes_text(comparison.limit)
    return f"{comparison.model}: excluded, over the memory limit of {limit}: {excluded}"


def _format_alternative(alternative: Alternative | None) -> str:
    if alternative is None:
        return "-"
    degrees = alternative.parts
    grid = "" if degrees is None else f" {'·'.join(map(str, degrees))}"
    over = "" if alternative.fits else " over limit"
    speed = f"{alternative.tokens_per_second / 1e3:.1f}{grid}"
    return f"{speed}\n{bytes_text(alternative.memory)}{over}\nsends {bytes_text(alternative.bytes)}"
