"""What a person sees of a run: the documented lines, and below them a live bar on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.train.steps import Step


class LiveProgress:
    """A context that shows lines and, where the console is a terminal, a bar with the newest step.

    Args:
        num_steps: steps in the whole run, the length of the bar.
        steps_per_epoch: steps in an epoch.
    """

    def __init__(self, console: Console, num_steps: int, steps_per_epoch: int) -> None:
        self._console = console
        self._steps_per_epoch = steps_per_epoch
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=num_steps, loss="-", speed="")

    def __enter__(self) -> LiveProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def line(self, text: str) -> None:
        """Print `text` as it is, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: Step) -> None:
        """Show a finished step on the bar, which goes back where a run was restarted."""
        self._bar.update(
            self._task,
            completed=step.epoch * self._steps_per_epoch + step.step + 1,
            description=f"epoch {step.epoch} step {step.step}",
            loss=f"{step.loss:.6f}",
            speed=f"{step.samples_per_second:,.0f} samples/s",
        )
