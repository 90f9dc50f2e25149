"""Launches the local ranks of the command `train`, and shows their progress."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from shardwright.core.plan import Plan
from shardwright.core.plan.text_columns import PrintableConsole
from shardwright.errors import LayoutError, StrategyError
from shardwright.run.config import Run
from shardwright.run.launch.launch import DeviceRange, launch, launch_elastic
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.loop.progress_bar import LiveProgress, follow_files
from shardwright.run.loop.step_log import StepRecord


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command `train`, except node options such as `--node-rank`."""

    config: Path
    devices: int | None
    plan: Path | None
    log_dir: Path
    mem_coeff: str | None
    resume: bool
    max_restarts: int
    elastic: str | None
    profile: int | None

    def command(self, resume: bool) -> list[str]:
        """Return the arguments of `python` on each rank."""
        # Without -P, `-m` puts the working folder on sys.path, where a file may shadow a module.
        command = ["-P", "-m", "shardwright", "train", str(self.config)]
        for name in ("plan", "log_dir", "mem_coeff", "profile"):
            value = getattr(self, name)
            if value is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        return [*command, "--resume"] if resume else command


@dataclass(frozen=True)
class LocalRankLauncher:
    """Launcher of the local ranks of a run, which shows their progress.

    Args:
        locks: file descriptors of the locked folders, which the ranks inherit.
    """

    options: TrainOptions
    run: Run
    logs: LogFolder
    locks: Collection[int]

    def train(self, plan: Plan, device_range: DeviceRange | None) -> None:
        """Start the ranks, and restart them after failures as the options allow."""
        max_restarts = self.options.max_restarts
        timeout = timedelta(seconds=self.run.config.train.timeout_seconds)
        command = self.command(plan, self.run.resumes)
        with self.progress() as progress:
            if device_range is not None:
                launch_elastic(
                    lambda remaining: self.replan(remaining, device_range.minimum),
                    command,
                    plan.devices,
                    device_range.minimum,
                    self.logs,
                    max_restarts=max_restarts,
                    on_restart=progress.line,
                    timeout=timeout,
                    locks=self.locks,
                )
                return

            def on_restart(number: int) -> None:
                log = f"{self.logs.run}/rank.*/stderr.attempt-{number - 1}"
                # The log folder may have been deleted during the run.
                if not self.logs.plan.exists():
                    self.save_plan(plan)
                progress.line(f"a rank failed: restart {number} of {max_restarts}; its log: {log}")

            launch(
                command,
                plan.devices,
                self.logs,
                max_restarts=max_restarts,
                on_restart=on_restart,
                timeout=timeout,
                locks=self.locks,
                serves_scripts=False,
            )

    def command(self, plan: Plan, resume: bool) -> list[str]:
        """Save the plan, and return the arguments of `python` on each rank."""
        self.save_plan(plan)
        # Ranks get the plan, so that no option of the search applies to them.
        return replace(self.options, plan=self.logs.plan, mem_coeff=None).command(resume)

    def save_plan(self, plan: Plan) -> None:
        """Save the plan for the ranks, also after the log folder was deleted during the run."""
        self.logs.run.mkdir(parents=True, exist_ok=True)
        plan.save(self.logs.plan)

    def replan(self, remaining: int, minimum: int) -> tuple[list[str], int]:
        """Plan for the largest number of remaining devices over which the model can be sharded.

        Args:
            remaining: number of devices that are not lost.
            minimum: smallest number of devices to plan for.

        Returns:
            The command of a rank, and the number of devices.
        """
        # From all remaining devices down to the minimum.
        for devices in range(remaining, minimum, -1):
            try:
                plan = self.run.plan(devices)
            except (StrategyError, LayoutError):
                continue
            # Without cuts and stages, every device would compute the same.
            if any(plan.cuts.values()) or plan.pipeline.stages > 1:
                break
        else:
            plan = self.run.plan(minimum)
        return self.command(plan, self.run.checkpoints() is not None), plan.devices

    @contextmanager
    def progress(self) -> Iterator[LiveProgress]:
        """Context that prints the output and the training steps of rank 0 as they are written."""
        with LiveProgress(
            PrintableConsole(), self.run.num_steps, len(self.run.batches)
        ) as progress:
            on_line = {
                self.logs.stdout(0): progress.line,
                # Rank 0 is another process, which reports its steps by its log.
                self.logs.steps(0): lambda line: progress.step(StepRecord.from_json(line)),
            }
            with follow_files(on_line):
                yield progress
