"""What each file of tests costs: `pytest --cpu-times`, with or without workers."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process and of all that it has started, running ones included."""
    return sum(os.times()[:4]) + sum(map(_seconds_of, _children(Path("/proc/self"))))


def _seconds_of(process: Path) -> float:
    """Of a process, of the children that it has waited for, and of those that run."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS + sum(map(_seconds_of, _children(process)))


def _children(process: Path) -> list[Path]:
    try:
        lists = [path.read_text() for path in process.glob("task/*/children")]
    except OSError:  # it has ended
        return []
    return [Path("/proc", pid) for text in lists for pid in text.split()]


class CpuTimes:
    """Sums CPU and wall seconds by file, in the process that prints the summary.

    Args:
        lines: how many files are printed, the most expensive first.
    """

    def __init__(self, lines: int) -> None:
        self.lines = lines
        self.started = time.monotonic()
        self.cpu: Counter[str] = Counter()
        self.wall: Counter[str] = Counter()
        self.workers = 0.0
        self.last = 0.0

    def pytest_collection_finish(self) -> None:
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        file = report.nodeid.partition("::")[0]
        # A report of a worker that was killed has no CPU time.
        self.cpu[file] += getattr(report, "cpu_seconds", 0.0)
        self.wall[file] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.workers += getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = self.workers or cpu_seconds()
        rows = [(seconds, self.wall[file], file) for file, seconds in self.cpu.most_common()]
        rest = total - self.cpu.total()
        terminalreporter.section("CPU seconds, wall seconds")
        for cpu, wall, name in rows[: self.lines]:
            terminalreporter.write_line(f"{cpu:8.1f} {wall:8.1f}  {name}")
        terminalreporter.write_line(f"{rest:8.1f} {'':8}  start and collection")
        wall = time.monotonic() - self.started
        terminalreporter.write_line(f"{total:8.1f} {wall:8.1f}  in all, {len(rows)} files")
