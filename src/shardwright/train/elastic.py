"""Goes on with the devices that are left when ranks are killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.errors import ConfigError
from shardwright.train.launch import LogFolder, RankFailedError, launch


@dataclass(frozen=True)
class Range:
    """With how few and how many devices a run may go on.

    Raises:
        ConfigError: less than one device, or more at least than at most.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"--elastic {self.minimum}:{self.maximum}: expected MIN:MAX with 1 ≤ MIN ≤ MAX"
            )

    @staticmethod
    def parse(text: str) -> Range:
        """Raises: ConfigError: the text is not `MIN:MAX`."""
        low, colon, high = text.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal()):
            raise ConfigError(f"--elastic {text}: expected MIN:MAX, for example 2:8")
        return Range(int(low), int(high))


def launch_elastic(
    planned_for: Callable[[int], tuple[Sequence[str], int]],
    command: Sequence[str],
    devices: int,
    minimum: int,
    logs: LogFolder,
    *,
    max_restarts: int = 0,
    on_restart: Callable[[str], None],
) -> None:
    """Run `command` on `devices` ranks, and go on with fewer whenever some are killed.

    A device whose rank was killed counts as lost. A rank that fails with an error loses none: then
    all are started again on as many devices, at most `max_restarts` times.

    Args:
        planned_for: given how many devices are left, the command that goes on there and how many
            of them it uses.
        on_restart: told in words why and on how many devices the run goes on.

    Raises:
        RankFailedError: fewer than `minimum` devices are left, or a rank failed once more than
            `max_restarts`.
        StoppedError: as `launch`.
    """
    left, restarts = devices, 0
    while True:
        try:
            launch(command, devices, logs)
            return
        except RankFailedError as error:
            left -= len(error.lost)
            restarts += not error.lost
            if left < minimum:
                raise RankFailedError(
                    f"{error}\ndevices left: {left}, fewer than the {minimum} that --elastic allows"
                ) from None
            if restarts > max_restarts:
                raise
            reason = str(error).partition(";")[0]
        command, devices = planned_for(left)
        on_restart(f"{reason}; devices left: {left}; going on with {devices}")
