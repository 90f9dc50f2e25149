"""Experiment trackers: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError

Track = Callable[[int, Mapping[str, float]], None]
"""Function that logs the metrics of a step, by name; steps count from 1 over all epochs."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"train.log_to: {name} is not installed\n"
                f"pip install 'shardwright[{name}]', or remove {name} from `train.log_to`"
            )


@contextmanager
def open_trackers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], start: int
) -> Iterator[Track]:
    """Context with open trackers; yields a function that logs the metrics of a step to each.

    Args:
        names: `tensorboard`, which writes to the subfolder `tensorboard`, and `wandb`, whose
            project and run are named by its own environment variables.
        folder: the folder to which trackers write.
        config: the configuration of the run, shown by `wandb`.
        start: number of finished steps; TensorBoard drops records of later steps, which will run
            again.
    """
    with ExitStack() as stack:
        tracks: list[Track] = []
        if "tensorboard" in names:
            # Imported here, because each tracker is an optional dependency.
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
                # A restart continues the run that the environment names, if it names one.
                wandb.init(dir=str(folder), config=dict(config), resume="allow")
            )
            tracks.append(lambda step, numbers: run.log(dict(numbers), step=step))

        def track(step: int, numbers: Mapping[str, float]) -> None:
            for each in tracks:
                each(step, numbers)

        yield track
