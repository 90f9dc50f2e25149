"""Times and ratios with their spread."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.values, n=4)
        return low, high

    def milliseconds(self) -> str:
        """`240 (230–270)` of values in seconds: the median, the smallest and the largest."""
        low, middle, high = (1e3 * s for s in (min(self.values), self.median, max(self.values)))
        return f"{middle:.0f} ({low:.0f}–{high:.0f})"

    def ratio(self) -> str:
        """`1.010 (0.990–1.030)`: the median and the quartiles."""
        low, high = self.quartiles
        return f"{self.median:.3f} ({low:.3f}–{high:.3f})"


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of this process that one call takes: other load on the machine hardly counts."""
    started = time.process_time()
    function()
    return time.process_time() - started


def in_fork(function: Callable[[], T]) -> T:
    """What `function` returns in a fork of this process, whose caches stay as they are.

    Raises:
        RuntimeError: if it raises there.
    """
    return _in(multiprocessing.get_context("fork"), function)


def in_fresh_process(function: Callable[[], T]) -> T:
    """What `function` returns in a process that has done nothing before.

    Raises:
        RuntimeError: if it raises there.
    """
    return _in(multiprocessing.get_context("spawn"), function)


def _in(context: Any, function: Callable[[], T]) -> T:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function))
    process.start()
    sender.close()
    try:
        result: T = receiver.recv()
    except EOFError:
        raise RuntimeError("a measurement failed; its error is shown above") from None
    finally:
        process.join()
    return result


def _send(sender: Any, function: Callable[[], object]) -> None:
    sender.send(function())


def paired(
    steps: Mapping[str, Callable[[], float]], against: str, rounds: int
) -> tuple[dict[str, Sample], dict[str, Sample]]:
    """Runs all `steps` in turn, round after round, each round starting with another one.

    A machine that becomes slower for a while slows a whole round, whose ratios remain.

    Args:
        steps: functions that return the seconds that they took.
        against: the one that the others are compared with, round by round.

    Returns:
        The seconds of each, and the ratios of each of the others.
    """
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            seconds[name].append(steps[name]())
    ratios = {name: _ratios(seconds[name], seconds[against]) for name in names if name != against}
    return {name: Sample(tuple(values)) for name, values in seconds.items()}, ratios


def _ratios(values: Sequence[float], base: Sequence[float]) -> Sample:
    return Sample(tuple(a / b for a, b in zip(values, base, strict=True)))
