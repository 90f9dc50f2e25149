"""What a run shows on a terminal, and elsewhere."""

from io import StringIO

from rich.console import Console

from shardwright.run import StepRecord
from shardwright.run.loop.progress_bar import LiveProgress

STEP = StepRecord(epoch=1, step=7, loss=2.25, samples_per_second=1234.0)


def shown(terminal: bool) -> str:
    file = StringIO()
    with LiveProgress(Console(file=file, force_terminal=terminal, width=120), 30, 8) as progress:
        progress.step(STEP)
        progress.line(f"[as it is] {'long ' * 40}")
    return file.getvalue()


def test_a_terminal_shows_the_newest_step_its_loss_and_speed() -> None:
    output = shown(terminal=True)
    assert "epoch 1 step 7" in output
    assert "loss 2.250000  1,234 samples/s" in output
    assert "16/30" in output


def test_a_file_gets_the_lines_as_they_are_and_nothing_else() -> None:
    assert shown(terminal=False) == f"[as it is] {'long ' * 40}\n"
