"""Launch ranks as local processes, and restart them after failures.

Ranks get the environment variables that torchrun sets, so scripts for torchrun run unchanged.
Rank N writes to `<log folder>/1/rank.N/stdout` and `stderr`. If a rank fails or is killed, the
others are terminated, and all are restarted if requested; with `launch_elastic`, on the remaining
devices. If the launcher itself is killed, its ranks are killed too.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

from shardwright.errors import ConfigError
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.process_group import TIMEOUT
from shardwright.run.launch.rank_failure import (
    RankFailedError,
    StoppedError,
    first_failure,
    requested_stop,
)
from shardwright.run.launch.rank_processes import (
    RankProcess,
    end_ranks,
    rank_environments,
    stop_ranks,
    wait_for_ranks,
)
from shardwright.run.launch.rendezvous_store import private_folder, serve_store

# From schedulers, Ctrl-C, a closed terminal, and Ctrl-\.
OPEN_FILES, OPEN_FILES_PER_RANK = 32, 2
"""Upper bounds of the files that a launcher opens: for itself, and for the log and the connection
of each rank."""

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
    serves_scripts: bool = True,
) -> None:
    """Run `python <command>` as `num_ranks` local processes and wait for all of them.

    Args:
        command: the arguments of the Python interpreter.
        num_ranks: number of processes.
        logs: the log folder, with a folder for each rank.
        max_restarts: number of times that all ranks are restarted after a failure.
        on_restart: called before each restart with the number of the restart, counted from 1.
        timeout: longest time for which a rank may be stopped by a signal such as SIGSTOP without
            counting as failed; usually the timeout of the collectives in which others wait.
        locks: file descriptors of locked folders; inherited by the ranks, so that folders stay
            locked until all ranks have ended, even if this process is killed.
        serves_scripts: whether to serve a `TCPStore` for `init_process_group()` of scripts. Ranks
            of this package meet in a file instead, which other users of the machine cannot open.

    Raises:
        ConfigError: if the limit of open files is too low for `num_ranks`.
        RankFailedError: if a rank failed and no restarts are left; the others are terminated.
        StoppedError: if this process received SIGINT, SIGTERM, SIGHUP or SIGQUIT, or a rank
            received SIGINT or SIGTERM; all ranks have ended. The ranks save a checkpoint first if
            the run has checkpoints, unless this process receives a second signal.
    """
    _check_open_files_limit(num_ranks)
    with (
        # Another user who floods the port of a `TCPStore` can keep it from ending.
        serve_store() if serves_scripts else nullcontext() as port,
        private_folder() as store_folder,
        _collect_stop_signals() as stop_signals,
    ):
        for restart in range(max_restarts + 1):
            # Before the first start too: `launch_elastic` starts each attempt by a call of this
            # function.
            logs.archive_attempt()
            if restart > 0:
                on_restart(restart)
            ranks = list[RankProcess]()
            try:
                environments = rank_environments(
                    num_ranks, port, restart, max_restarts, store_folder
                )
                for rank, environment in enumerate(environments):
                    ranks.append(RankProcess.start(rank, command, environment, logs, locks))
                wait_for_ranks(ranks, timeout, stop_signals)
                # Ranks of a run with checkpoints save one before they end.
                if stop_signals:
                    stop_ranks(ranks, timeout, stop_signals)
            finally:
                # Also after an exception in this process, so that no rank outlives it.
                end_ranks(ranks)
            ends = [rank.end for rank in ranks]
            # First, as a rank's own error tells which signal it was and whether a checkpoint was
            # saved.
            stopped = requested_stop(ends)
            if stopped is not None:
                raise stopped
            if stop_signals:
                raise StoppedError(stop_signals[0])
            if all(end.status == 0 for end in ends):
                logs.warn_if_deleted(*(logs.stderr(rank) for rank in range(num_ranks)))
                return
            if restart == max_restarts:
                raise first_failure(ends, logs)


def _check_open_files_limit(num_ranks: int) -> None:
    """Raise ConfigError if this process may not open the files that `num_ranks` ranks need.

    Beyond the limit, PyTorch's store would end the process without an error.
    """
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * num_ranks
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise ConfigError(
            f"{num_ranks} ranks need {needed} open files, but the limit is {limit}\n"
            f"raise the limit: ulimit -n {needed}"
        )


@contextmanager
def _collect_stop_signals() -> Iterator[list[int]]:
    """Context that collects stop signals in a list, so that they do not end this process.

    Outside the main thread the list stays empty, because Python runs signal handlers only there.
    """
    stop_signals = list[int]()

    def receive(number: int, frame: FrameType | None) -> None:
        stop_signals.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield stop_signals
        return
    handlers = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
    try:
        yield stop_signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class DeviceRange:
    """Bounds of the number of devices of an elastic run: the option `--elastic MIN:MAX`.

    Raises:
        ConfigError: if the numbers are not 1 ≤ minimum ≤ maximum.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"--elastic {self.minimum}:{self.maximum} is not a range of devices\n"
                "use MIN:MAX with 1 ≤ MIN ≤ MAX, for example --elastic 2:8"
            )

    @staticmethod
    def parse(text: str) -> DeviceRange:
        """Parse the option `--elastic MIN:MAX`.

        Raises:
            ConfigError: if `text` is not `MIN:MAX`.
        """
        low, colon, high = text.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal()):
            raise ConfigError(f"--elastic {text} is not MIN:MAX\nuse for example --elastic 2:8")
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
    """Run `command` on `devices` ranks, and continue on fewer devices if ranks are killed.

    A device whose rank is killed counts as lost. If a rank fails with an exception, no device is
    lost, and the run restarts on the same number of devices, at most `max_restarts` times.

    Args:
        command_for: maps the number of remaining devices to the command that continues the run,
            and the number of devices that it uses.
        command: arguments of the Python interpreter at the first start.
        devices: number of devices at the first start.
        minimum: smallest number of devices on which to continue.
        on_restart: called before each restart with a text: its reason and the number of devices.
        timeout: longest time in which a rank may be stopped by a signal without counting as failed.
        locks: file descriptors of locked folders, which the ranks inherit.

    Raises:
        RankFailedError: if fewer than `minimum` devices remain, or a rank failed and no restarts
            are left.
        StoppedError: if this process or a rank received a signal to stop; all ranks have ended.
    """
    remaining_devices, restarts = devices, 0
    while True:
        try:
            # Without restarts, which are counted here, as the next attempt may have another
            # command.
            launch(command, devices, logs, timeout=timeout, locks=locks, serves_scripts=False)
            return
        except RankFailedError as error:
            remaining_devices -= len(error.lost_ranks)
            # Losses of devices are not limited: each leaves fewer devices, down to the minimum.
            restarts += not error.lost_ranks
            if remaining_devices < minimum:
                raise RankFailedError(
                    f"{error}\nonly {remaining_devices} devices remain, but --elastic needs "
                    f"{minimum}: replace the failed devices, or use a smaller minimum"
                ) from None
            if restarts > max_restarts:
                raise
            # The message continues with the path of the log, after a semicolon.
            reason = str(error).partition(";")[0]
        command, devices = command_for(remaining_devices)
        on_restart(f"{reason}; devices left: {remaining_devices}; continuing on {devices}")
