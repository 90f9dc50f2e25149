"""Launches ranks as local processes, and restarts them.

The processes run the given command in the environment that torchrun would set up, so a rank cannot
tell, and need not know, who launched it. Rank N writes to `<log folder>/1/rank.N/stdout` and
`stderr`. If a rank fails or is killed, the others are terminated, and all are restarted if
requested; with `launch_elastic` on the devices that remain. If the launcher itself is killed, so
are its ranks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

from shardwright.errors import ConfigError
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.process_group import TIMEOUT
from shardwright.run.launch.rank_failure import RankFailedError, StoppedError, first_failure
from shardwright.run.launch.rank_processes import (
    RankProcess,
    end_ranks,
    rank_environments,
    serve_store,
    wait_for_ranks,
)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(
    command: Sequence[str],
    num_ranks: int,
    logs: LogFolder,
    *,
    max_restarts: int = 0,
    on_restart: Callable[[int], None] = lambda number: None,
    timeout: timedelta = TIMEOUT,
    locks: Collection[int] = (),
) -> None:
    """Run `python <command>` as `num_ranks` local processes and wait for all of them.

    Args:
        max_restarts: how many times all ranks are restarted after a failure.
        on_restart: called before each restart with its number, from 1 on.
        timeout: how long a rank may be stopped by a signal; as long as collectives wait for it.
        locks: file descriptors of locked folders, which stay locked until all ranks have ended.

    Raises:
        RankFailedError: if a rank failed and there are no restarts left; the others are terminated.
        StoppedError: if this process received SIGINT, SIGTERM, SIGHUP or SIGQUIT; all ranks are
            terminated.
    """
    with serve_store() as port, _stop_signals() as received:
        for restart in range(max_restarts + 1):
            logs.archive_attempt()
            if restart > 0:
                on_restart(restart)
            ranks = list[RankProcess]()
            try:
                environments = rank_environments(num_ranks, port, restart, max_restarts)
                for rank, environment in enumerate(environments):
                    ranks.append(RankProcess.start(rank, command, environment, logs, locks))
                wait_for_ranks(ranks, timeout, received)
            finally:
                end_ranks(ranks)
            if received:
                raise StoppedError(received[0])
            ends = [rank.end for rank in ranks]
            if all(end.status == 0 for end in ends):
                return
            if restart == max_restarts:
                raise first_failure(ends, logs)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals to stop that this process receives within it, in place of their effect. Only the
    main thread receives signals."""
    received = list[int]()

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class DeviceRange:
    """The minimum and maximum number of devices of an elastic run.

    Raises:
        ConfigError: unless 1 ≤ minimum ≤ maximum.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"--elastic {self.minimum}:{self.maximum}: expected MIN:MAX with 1 ≤ MIN ≤ MAX"
            )

    @staticmethod
    def parse(text: str) -> DeviceRange:
        """Raises:
        ConfigError: if the text is not `MIN:MAX`.
        """
        low, colon, high = text.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal()):
            raise ConfigError(f"--elastic {text}: expected MIN:MAX, for example 2:8")
        return DeviceRange(int(low), int(high))


def launch_elastic(
    command_for: Callable[[int], tuple[Sequence[str], int]],
    command: Sequence[str],
    devices: int,
    minimum: int,
    logs: LogFolder,
    *,
    max_restarts: int = 0,
    on_restart: Callable[[str], None],
    timeout: timedelta = TIMEOUT,
    locks: Collection[int] = (),
) -> None:
    """Run `command` on `devices` ranks, and continue on fewer whenever some are killed.

    A device whose rank is killed counts as lost. If a rank fails with an error no device is lost,
    and the run restarts on the same number of devices, at most `max_restarts` times.

    Args:
        command_for: from the number of remaining devices to the command that continues the run and
            the number of devices that it uses.
        on_restart: called with a message that says why and on how many devices the run continues.
        timeout, locks: as in `launch`.

    Raises:
        RankFailedError: if fewer than `minimum` devices remain, or a rank failed and there are no
            restarts left.
        StoppedError: see `launch`.
    """
    devices_left, restarts = devices, 0
    while True:
        try:
            launch(command, devices, logs, timeout=timeout, locks=locks)
            return
        except RankFailedError as error:
            devices_left -= len(error.lost)
            restarts += not error.lost
            if devices_left < minimum:
                raise RankFailedError(
                    f"{error}\ndevices left: {devices_left}, fewer than the minimum of {minimum}"
                    " set by --elastic"
                ) from None
            if restarts > max_restarts:
                raise
            reason = str(error).partition(";")[0]
        command, devices = command_for(devices_left)
        on_restart(f"{reason}; devices left: {devices_left}; continuing on {devices}")
