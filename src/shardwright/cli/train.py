"""The command `train`: training on local processes, on several nodes, or under torchrun."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from torch.distributed.elastic.multiprocessing.errors import record

from shardwright import __version__
from shardwright.cli.app import app, echo
from shardwright.cli.local_ranks import LocalRankLauncher, TrainOptions
from shardwright.cli.options import (
    LOG_DIR,
    ConfigArgument,
    LogDirOption,
    MemCoeffOption,
    load_run,
    print_batch_formula,
    require_existing,
)
from shardwright.core.checkpoint.folder_lock import lock_folders
from shardwright.core.checkpoint.manifest import CheckpointWarning
from shardwright.core.checkpoint.position import Position
from shardwright.core.plan import Plan
from shardwright.core.plan.measured import PROFILE_FILE, Measured
from shardwright.core.plan.text_columns import PrintableConsole
from shardwright.errors import ConfigError, PlanError
from shardwright.run.config import Run
from shardwright.run.config.training import Profile, check_profiled_steps, train_rank
from shardwright.run.launch.launch import DeviceRange
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.node import Node, launch_node
from shardwright.run.launch.process_group import World, check_same_run, is_launched
from shardwright.run.launch.rank_failure import StoppedError
from shardwright.run.loop.progress_bar import LiveProgress
from shardwright.run.loop.step_log import StepRecord, open_step_log
from shardwright.run.loop.trackers import check_trackers, open_trackers

PROFILE_PAGE = "profile.html"


@app.command("train")
def train_command(
    config: ConfigArgument,
    devices: Annotated[
        int | None,
        typer.Option(help="Number of devices; by default that of --plan, of torchrun, or 1."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Use a saved plan, without a search.", callback=require_existing(PlanError)
        ),
    ] = None,
    log_dir: LogDirOption = LOG_DIR,
    mem_coeff: MemCoeffOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint, if there is one.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Maximum number of restarts of all ranks after failures.")
    ] = 0,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="After the loss of a rank, replan for the remaining devices and resume.",
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(metavar="N|MIN:MAX", help="Number of nodes; each runs this command."),
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="Rank of this node, from 0.")] = None,
    rdzv: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of node 0, with a free port."),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Devices per node; by default the accelerators of this node."),
    ] = None,
    profile: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Profile N steps after the first. Writes a trace of each rank, and a page of"
            " measurements next to predictions, to the log folder.",
        ),
    ] = None,
) -> None:
    """Train on local processes, on several nodes, or under torchrun.

    Starts one process per device. Under torchrun it joins the processes that torchrun started.
    """
    options = TrainOptions(
        config, devices, plan, log_dir, mem_coeff, resume, max_restarts, elastic, profile
    )
    node = _parse_node_options(nnodes, node_rank, rdzv, nproc_per_node, options)
    if node is not None:
        _train_on_node(node, options)
        return
    # `record` writes the error of a rank to the file where its launcher looks for it.
    body = record(_train_or_launch) if is_launched() else _train_or_launch
    body(options)


def _parse_node_options(
    nnodes: str | None,
    rank: int | None,
    rdzv: str | None,
    local_size: int | None,
    options: TrainOptions,
) -> Node | None:
    """Return the node that the options describe; None without --nnodes."""
    if nnodes is None:
        if rank is not None or rdzv is not None or local_size is not None:
            raise ConfigError(
                "--node-rank, --rdzv and --nproc-per-node need --nnodes\n"
                "set the number of nodes, for example --nnodes 2"
            )
        return None
    if options.devices is not None or options.elastic is not None:
        raise ConfigError(
            "--nnodes cannot be combined with --devices or --elastic\n"
            "use --nproc-per-node instead of --devices, --nnodes MIN:MAX instead of --elastic"
        )
    if is_launched():
        raise ConfigError(
            "--nnodes cannot be used under torchrun\npass the number of nodes to torchrun instead"
        )
    return Node.parse(nnodes, rank, rdzv, local_size)


def _train_on_node(node: Node, options: TrainOptions) -> None:
    """Start the ranks of this node, which then plan and train."""
    run = load_run(options.config, options.mem_coeff, resume=options.resume)
    logs = LogFolder(options.log_dir)
    if node.rank == 0:
        # Released before the ranks start, of which rank 0 locks the folders itself.
        with lock_folders(*_list_output_folders(run, logs)):
            run.check_checkpoints()
            logs.clear(num_ranks=1, keep_steps=run.resumes)
    # A node may rejoin a run in progress, so its ranks always resume. The check above on node 0
    # prevents that a new run resumes another run's checkpoints.
    command = options.command(resume=run.checkpoints() is not None)
    timeout = timedelta(seconds=run.config.train.timeout_seconds)
    launch_node(command, node, logs, max_restarts=options.max_restarts, timeout=timeout)


def _train_or_launch(options: TrainOptions) -> None:
    world, logs = World.from_environment(), LogFolder(options.log_dir)
    device_range = DeviceRange.parse(options.elastic) if options.elastic else None
    # A rank that was restarted continues from the checkpoints of its run.
    resume = options.resume or world.restarts > 0
    run = load_run(options.config, options.mem_coeff, resume=resume)
    timeout = timedelta(seconds=run.config.train.timeout_seconds)
    # Under torchrun rank 0 takes the locks; a rank of this command inherits its launcher's.
    with (
        check_same_run(world, _collect_node_settings(run), timeout, run.config.train.device),
        lock_folders(*(_list_output_folders(run, logs) if world.rank == 0 else ())) as locks,
    ):
        # On several nodes, the cluster of the configuration must have nodes of this size.
        if world.local_size < world.size:
            run.check_node_size(world.local_size)
        # A restarted run finds its own checkpoints.
        if world.restarts == 0:
            run.check_checkpoints()
        check_trackers(run.config.train.log_to)
        run, plan_or_search = _load_or_search_plan(run, options, device_range, world)
        # Only the first attempt is profiled.
        profile = None if world.restarts else options.profile
        if profile is not None:
            _check_profile_options(run, profile)
        if run.foreign is not None and run.foreign.only_strategies:
            # One rank writes the strategies, and none trains.
            if not isinstance(plan_or_search, Plan) and world.rank == 0:
                plan_or_search()
            return
        if not isinstance(plan_or_search, Plan) or is_launched():
            _train_one_rank(run, plan_or_search, world, logs, profile)
            return
        logs.clear(num_ranks=plan_or_search.devices, keep_steps=run.resumes)
        # A single rank that is never restarted needs no process of its own.
        if plan_or_search.devices == 1 and options.max_restarts == 0 and device_range is None:
            _train_one_rank(run, plan_or_search, world, logs, profile)
        else:
            LocalRankLauncher(options, run, logs, locks).train(plan_or_search, device_range)


def _collect_node_settings(run: Run) -> dict[str, object]:
    """Return the settings that must be equal on all nodes of a run, by configuration key."""
    # `resume` may differ, because a node that rejoins resumes.
    sections = run.config.model_dump(mode="json", exclude={"train": {"resume"}})
    keys = {
        f"{section}.{key}": value
        for section, values in sections.items()
        # `loss` is a value of its own, not a section.
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }
    return {"shardwright": __version__, **keys}


def _list_output_folders(run: Run, logs: LogFolder) -> list[Path]:
    """Return the folders that a run writes to."""
    checkpoints = run.checkpoints()
    return [logs.root] if checkpoints is None else [logs.root, checkpoints.folder]


def _load_or_search_plan(
    run: Run, options: TrainOptions, device_range: DeviceRange | None, world: World
) -> tuple[Run, Plan | Callable[[], Plan]]:
    """Adjust the run to its number of devices, and load or search for its plan.

    Returns:
        The run, and its plan. With several launched ranks and no saved plan, the plan is a function
        that searches for it, to be called on one rank after all ranks have joined.
    """
    file, devices = options.plan, options.devices
    saved = Plan.load(file) if file is not None else None
    if devices is None:
        devices = saved.devices if saved else device_range.maximum if device_range else world.size
    if saved is not None and saved.devices != devices:
        raise PlanError(
            f"{file} is a plan for {saved.devices} devices, not for {devices}\n"
            f"use --devices {saved.devices}, or leave out --plan to search for a new plan"
        )
    if device_range is not None and not device_range.minimum <= devices <= device_range.maximum:
        raise PlanError(
            f"--elastic {device_range.minimum}:{device_range.maximum} does not allow {devices}"
            " devices\n"
            f"use --devices from {device_range.minimum} to {device_range.maximum}"
        )
    run = run.for_devices(devices)
    # First, so that missing data is reported before the search.
    run.check_data()
    print_batch_formula(run, options.config, devices)
    if saved is not None:
        if world.rank == 0:
            run.save_strategies(saved)
        return run, saved
    # A single process is this command, which starts the ranks itself.
    if world.size not in (1, devices):
        raise PlanError(
            f"--devices {devices}, but torchrun has started {world.size} processes\n"
            f"leave out --devices, or use --devices {world.size}"
        )

    def plan() -> Plan:
        new = run.plan(devices)
        strategies = run.save_strategies(new)
        if strategies is not None:
            echo(f"the strategies of the plan are saved in {strategies}", err=True)
        return new

    # Under torchrun, ranks compare their settings before one of them searches.
    return run, plan() if world.size == 1 else plan


def _train_one_rank(
    run: Run,
    plan: Plan | Callable[[], Plan],
    world: World,
    logs: LogFolder,
    steps: int | None,
) -> None:
    """Train as one rank.

    Rank 0 writes each step to `steps.jsonl`, prints a line every `log_every` steps, and shows its
    progress on a terminal. Other ranks print nothing.

    Args:
        steps: number of steps to profile; None to train without the profiler.
    """
    profile = None
    if steps is not None:
        # The profiler does not create the folder of its trace.
        logs.rank(world.rank).mkdir(parents=True, exist_ok=True)
        profile = Profile(
            steps, logs.rank, lambda plan, measured: _write_profile(plan, measured, logs)
        )
    if world.rank != 0:
        train_rank(run, plan, world, on_step=lambda step: None, profile=profile)
        return
    settings = run.config.train
    with ExitStack() as stack:
        progress = stack.enter_context(
            LiveProgress(PrintableConsole(), run.num_steps, len(run.batches))
        )
        writers: list[Callable[[StepRecord], object]] = []

        def on_start(start: Position) -> None:
            # Only now, as the position decides which lines of the log stay.
            file = stack.enter_context(open_step_log(logs.steps(0), start))
            writers.append(lambda step: file.write(step.to_json() + "\n"))
            # Trackers count steps from 1, over all epochs.
            values, numbers = run.config.model_dump(mode="json"), count(start.step + 1)
            track = stack.enter_context(
                open_trackers(settings.log_to, logs.run, values, start.step)
            )
            writers.append(lambda step: track(next(numbers), step.metrics))
            if start.step > 0:
                progress.line(f"resuming after step {start.step}")

        def on_step(step: StepRecord) -> None:
            for write in writers:
                write(step)
            progress.step(step)
            if step.step % settings.log_every == 0 or step.evaluation_loss is not None:
                progress.line(step.line)

        try:
            # Above the progress bar, which other output would break.
            stack.enter_context(_print_checkpoint_warnings(progress.line))
            train_rank(run, plan, world, on_step, on_start, profile)
        # Without checkpoints nothing defers the signal, and Python raises this error.
        except KeyboardInterrupt:
            raise StoppedError(signal.SIGINT) from None
    # Empty if the run has failed before its first step.
    if writers:
        logs.warn_if_deleted(logs.steps(0))


def _check_profile_options(run: Run, steps: int) -> None:
    """Raise ConfigError if the run has too few steps, or the profile page cannot be written."""
    check_profiled_steps(steps, run.num_steps)
    # Checked now, because the page is written only at the end of the training.
    if find_spec("jinja2") is None:
        raise ConfigError(
            "--profile needs `jinja2` to write its page\n"
            "install it: pip install 'shardwright[tools]'"
        )


def _write_profile(plan: Plan, measured: Measured, logs: LogFolder) -> None:
    """Write the measurements as JSON, and the page that compares them with the plan."""
    measured.save(logs.run / PROFILE_FILE)
    plan.report(logs.run / PROFILE_PAGE, measured=measured)


@contextmanager
def _print_checkpoint_warnings(print_line: Callable[[str], None]) -> Iterator[None]:
    """Context that prints checkpoint warnings by `print_line`, and other warnings as before."""
    # `catch_warnings` restores `showwarning` at its end.
    with warnings.catch_warnings():
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
            if issubclass(category, CheckpointWarning):
                print_line(f"warning: {message}")
            else:
                show_other(message, category, *where, **how)

        warnings.showwarning = show
        yield
