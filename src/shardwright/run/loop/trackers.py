"""Where the losses of a run are shown while it lasts: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError

Track = Callable[[int, Mapping[str, float]], None]
"""Takes a step, counted from 1 over all epochs, and the numbers of that step by name."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises: ConfigError: the package of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"train.log_to: {name} is not installed: pip install 'shardwright[{name}]', or"
                f" leave {name} out"
            )


@contextmanager
def trackers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], start: int
) -> Iterator[Track]:
    """What passes the numbers of a step to all trackers of these names.

    Args:
        names: `tensorboard`, which writes into a folder of this name, and `wandb`, whose own
            environment variables name the project and the run.
        folder: what they write to.
        config: of the run, to be shown with it.
        start: the number of steps that are done; TensorBoard drops what it has of later ones.
    """
    with ExitStack() as stack:
        tracks: list[Track] = []
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
            stack.callback(writer.close)

            def to_tensorboard(step: int, numbers: Mapping[str, float]) -> None:
                for name, number in numbers.items():
                    writer.add_scalar(name, number, step)

            tracks.append(to_tensorboard)
        if "wandb" in names:
            import wandb

            run = stack.enter_context(
                wandb.init(dir=str(folder), config=dict(config), resume="allow")
            )
            tracks.append(lambda step, numbers: run.log(dict(numbers), step=step))

        def track(step: int, numbers: Mapping[str, float]) -> None:
            for each in tracks:
                each(step, numbers)

        yield track
