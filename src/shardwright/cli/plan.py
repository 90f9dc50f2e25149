"""The commands `plan`, `explain`, `check`, `report` and `diff`."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from itertools import zip_longest
from json import dumps
from pathlib import Path
from signal import SIGINT
from textwrap import wrap
from typing import Annotated

import typer
from rich.text import Text

from shardwright.cli.app import app, echo
from shardwright.cli.options import (
    ClusterOption,
    ConfigArgument,
    DevicesOption,
    LogCostsOption,
    MemCoeffOption,
    MemoryLimitOption,
    ProgressOption,
    check_output,
    load_run,
    print_batch_formula,
    require_existing,
)
from shardwright.core.api import check
from shardwright.core.api.show_progress import show_progress
from shardwright.core.plan import Plan
from shardwright.core.plan.diff import Difference, differences
from shardwright.core.plan.measured import Measured
from shardwright.core.plan.table import plan_text
from shardwright.core.plan.text_columns import (
    GAP,
    MIN_WIDTH,
    PrintableConsole,
    split_at_dots,
    text_width,
)
from shardwright.errors import ConfigError, PlanError, PlanInterrupted
from shardwright.progress import OnProgress
from shardwright.run.config.other_plans import AlternativePlanner

PRESETS = "presets"
MAX_LISTED_NAMES = 4
"""Maximum number of operators or parameters that `diff` lists for each difference."""

AXIS_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")

EveryOption = Annotated[
    bool, typer.Option("--every", help="Include operators that follow their neighbors' layouts.")
]
PlanOrConfigArgument = Annotated[
    Path,
    typer.Argument(
        help="A YAML configuration, or a saved plan (.json).",
        show_default=False,
        callback=require_existing(ConfigError),
    ),
]
DevicesOfConfigOption = Annotated[
    int | None, typer.Option(help="Number of devices, for a configuration.", show_default=False)
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Print a row for each operator instead of a summary.")
]


@app.command("plan")
def plan_command(
    config: ConfigArgument,
    devices: DevicesOption,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the plan to this file.")] = None,
    save_graphs: Annotated[
        Path | None,
        typer.Option(
            help="Save the graph before and after planning, and rank 0's program, to this folder."
        ),
    ] = None,
    mem_coeff: MemCoeffOption = None,
    log_costs: LogCostsOption = False,
    cluster: ClusterOption = None,
    memory_limit: MemoryLimitOption = None,
    full: FullOption = False,
    every: EveryOption = False,
    top: Annotated[
        int | None,
        typer.Option(
            help="Instead, print the fastest plan of each of TOP kinds (stages, storage,"
            " recomputation, micro-batches), and why plans of other kinds do not fit.",
            show_default=False,
            min=1,
        ),
    ] = None,
    progress: ProgressOption = None,
) -> None:
    """Search for a plan and print its summary.

    Needs no devices and starts no processes.
    """
    if top is not None and (full or every or out is not None or save_graphs is not None):
        raise typer.BadParameter(
            "--top compares plans without saving them\nremove --full, --every, --out and"
            " --save-graphs, or remove --top"
        )
    check_output(out, (".json",), config, cluster)
    with show_progress(progress) as on_progress:
        run = load_run(
            config,
            mem_coeff,
            log_costs,
            cluster=cluster,
            memory_limit=memory_limit,
            save_graphs=save_graphs,
            on_progress=on_progress,
        )
        if top is not None:
            ranked = run.best_plans(devices, top)
            on_progress("table")
            echo(ranked.to_json() if json else str(ranked))
            return
        interrupted = False
        try:
            plan = run.plan(devices)
        except PlanInterrupted as stopped:
            echo("stopped: this is the fastest plan found so far that fits", err=True)
            plan, interrupted = stopped.plan(), True
        # Here, with progress, what printing would otherwise compute without it.
        plan.derive(on_progress)
        on_progress("table")
        # Printed below, after the display of the progress has ended.
        output = plan.to_json(memory=True) if json else plan_text(plan, full, every)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        plan.save(out)
    # On stderr, so that stdout has the plan only.
    print_batch_formula(run, config, devices)
    # Colors only on a terminal: a pipe or file gets plain text.
    if json or not sys.stdout.isatty():
        echo(output)
    else:
        console = PrintableConsole(width=text_width(), highlight=False)
        console.print(_color_axes(output, plan), soft_wrap=True)
    # The plan is printed, but the status tells that Ctrl-C has ended the search.
    if interrupted:
        raise typer.Exit(128 + SIGINT)


def _color_axes(text: str, plan: Plan) -> Text:
    """Return `text`, a printed table, with each axis name of `plan` in its own color."""
    colored = Text(text)
    # Only after "over ", or as an axis of a factor (k/tp·dp): module paths may contain axis names.
    for axis, name in enumerate(plan.mesh.alias_names):
        color = AXIS_COLORS[axis % len(AXIS_COLORS)]
        colored.highlight_regex(rf"(?:(?<=over )|(?<=[/·])){re.escape(name)}\b", color)
    return colored


@app.command("explain")
def explain_command(
    config: PlanOrConfigArgument,
    name: Annotated[str, typer.Argument(help="An operator of the plan, by its module path.")],
    devices: DevicesOfConfigOption = None,
    mem_coeff: MemCoeffOption = None,
    log_costs: LogCostsOption = False,
    cluster: ClusterOption = None,
    memory_limit: MemoryLimitOption = None,
) -> None:
    """Explain how one operator is sharded, and why.

    Prints the costs of other choices and the changes that would make them cheaper, the producers of
    the inputs, and the redistributions.
    """
    # A flag that is not given is False instead of None.
    _check_planning_options(config, devices, (mem_coeff, log_costs or None, cluster, memory_limit))
    if devices is None:
        plan = Plan.load(config)
    else:
        run = load_run(config, mem_coeff, log_costs, cluster=cluster, memory_limit=memory_limit)
        plan = run.plan(devices)
    echo(plan.explain(name))


def _check_planning_options(
    source: Path, devices: int | None, planning_options: Sequence[object]
) -> None:
    """Raise `typer.BadParameter` for a saved plan with planning options, or without --devices.

    Args:
        source: a saved plan (`.json`), or a configuration, which needs `devices`.
        planning_options: values of further options, such as `--cluster`; None where not given.
    """
    if source.suffix == ".json":
        if any(each is not None for each in (devices, *planning_options)):
            raise typer.BadParameter(
                f"{source} is a saved plan, which takes no --devices or other planning options\n"
                "remove these options, or pass the YAML configuration"
            )
    elif devices is None:
        raise typer.BadParameter("a configuration needs --devices\nexample: --devices 8")


@app.command("check")
def check_command(
    config: ConfigArgument,
    devices: DevicesOption,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    mem_coeff: MemCoeffOption = None,
) -> None:
    """Compare the planned model with the same model on one device.

    Trains two steps on simulated ranks in one process, and compares outputs, gradients, parameters
    and communication volume. Exit status 1 if they differ.
    """
    run = load_run(config, mem_coeff).for_devices(devices)
    # The batch, too, is that of `devices` devices.
    result = check(run.model(), run.example_batch(), {}, run.plan(devices))
    summary = f"{devices} simulated ranks vs. one device, float64\n{result}"
    echo(dumps(asdict(result), indent=1) if json else summary)
    if not result.passes():
        raise typer.Exit(1)


@app.command("report")
def report_command(
    source: PlanOrConfigArgument,
    devices: DevicesOfConfigOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file; by default next to a plan, or in the working folder for a"
            " configuration.",
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="Compare with plans for half the memory, twice the devices and another batch.",
        ),
    ] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare with a saved plan or another configuration, or with `presets`: data"
            " parallel and fully sharded data parallel. May be repeated.",
            metavar="FILE|presets",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="Compare with the fastest plan of each of TOP kinds, as `plan --top` prints them.",
            show_default=False,
            min=1,
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Show measurements next to the predictions: the log folder of a run with"
            " `train --profile`.",
            metavar="FOLDER",
            show_default=False,
            callback=require_existing(ConfigError),
        ),
    ] = None,
    cluster: ClusterOption = None,
    memory_limit: MemoryLimitOption = None,
    progress: ProgressOption = None,
) -> None:
    """Write an HTML page about a plan: one file that needs no network.

    For a configuration, searches for a plan first.
    """
    _check_planning_options(source, devices, (cluster, memory_limit, what_if or None, top))
    # Read before the search, so that a damaged profile is reported at once.
    measured = None if profile is None else Measured.load(profile)
    files = _list_compared_files(against or (), source, devices)
    check_output(out, (".html", ".htm"), source, cluster, profile, *files)
    with show_progress(progress) as on_progress:
        other_plans: dict[str, Plan | str] = {}
        if devices is None:
            plan, page = Plan.load(source), source.with_suffix(".html")
        else:
            run = load_run(
                source, cluster=cluster, memory_limit=memory_limit, on_progress=on_progress
            )
            planned = AlternativePlanner.of(run, devices)
            plan, page = planned.plan, Path(f"{source.stem}.html")
            other_plans |= planned.what_if_plans() if what_if else ()
            other_plans |= planned.best_plans(top) if top is not None else ()
            # One of the values is `presets`.
            other_plans |= planned.preset_plans() if len(files) < len(against or ()) else ()
        for name, file in _make_plan_names(files, other_plans).items():
            other_plans[name] = _load_or_search_plan(file, plan.devices, cluster, on_progress)
        # Here, with progress, what the page would otherwise compute without it.
        plan.derive(on_progress)
        on_progress("page")
        page = out or page
        page.parent.mkdir(parents=True, exist_ok=True)
        plan.report(page, other_plans, measured)
    echo(str(page))


def _list_compared_files(against: Sequence[str], source: Path, devices: int | None) -> list[Path]:
    """Return the files of --against.

    Checked before the search, which may take minutes.

    Raises:
        ConfigError: if a file does not exist.
        typer.BadParameter: if `presets`, which need a search, are compared with a saved plan.
    """
    files = [Path(each) for each in against if each != PRESETS]
    require_existing(ConfigError)(files)
    if devices is None and len(files) < len(against):
        raise typer.BadParameter(
            f"--against {PRESETS} needs a configuration: {source} is a saved plan\n"
            "use its configuration with --devices, or leave out --against presets"
        )
    return files


def _make_plan_names(files: Sequence[Path], names: Collection[str]) -> dict[str, Path]:
    """Return the plan files by name: the stem, or the path if the stem is not unique among `files`
    and `names`."""
    stems = [*(file.stem for file in files), *names]
    return {file.stem if stems.count(file.stem) == 1 else str(file): file for file in files}


def _load_or_search_plan(
    file: Path, devices: int, cluster: str | None, on_progress: OnProgress
) -> Plan:
    if file.suffix == ".json":
        return Plan.load(file)
    return load_run(file, cluster=cluster, on_progress=on_progress).plan(devices)


@app.command("diff")
def diff_command(
    first: Annotated[
        Path, typer.Argument(help="A saved plan.", callback=require_existing(PlanError))
    ],
    second: Annotated[
        Path, typer.Argument(help="Another saved plan.", callback=require_existing(PlanError))
    ],
    every: EveryOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Compare two saved plans.

    Lists the differences in shardings, stages, storage and recomputation, and in predicted time,
    memory and communication. Exit status 1 if there are any.
    """
    changes = differences(Plan.load(first), Plan.load(second), every)
    if json:
        echo(dumps([asdict(change) for change in changes], indent=1))
    elif changes:
        echo(differences_text(changes, first.name, second.name))
    else:
        echo("the plans make the same decisions")
    if changes:
        raise typer.Exit(1)


def differences_text(changes: list[Difference], first: str, second: str) -> str:
    """Format the differences between two plans as a table of 80 columns.

    A row has a property and its value in each plan; the names of the operators or parameters that
    differ are below the row.

    Args:
        changes: the differences.
        first: title of the column of the first plan.
        second: title of the column of the second plan.
    """
    label_width = max(len(change.what) for change in changes)
    # Two columns of values share the width that labels and gaps leave.
    value_width = (MIN_WIDTH - label_width) // 2 - len(GAP)
    lines = list[str]()
    # The header is formatted as a row.
    for change in (Difference("", first, second), *changes):
        # `wrap` gives an empty value no line, which `zip_longest` fills.
        values = [wrap(value, value_width) for value in (change.first, change.second)]
        for label, first_value, second_value in zip_longest([change.what], *values, fillvalue=""):
            cells = label.ljust(label_width), first_value.ljust(value_width), second_value
            lines.append(GAP.join(cells).rstrip())
        for name in change.names[:MAX_LISTED_NAMES]:
            lines += (GAP + piece for piece in split_at_dots(name, MIN_WIDTH - len(GAP)))
        if len(change.names) > MAX_LISTED_NAMES:
            lines.append(f"{GAP}and {len(change.names) - MAX_LISTED_NAMES} more")
    return "\n".join(lines)
