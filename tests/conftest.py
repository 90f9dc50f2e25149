"""What holds for all tests."""

import gc
import os
import sys

import pytest

from cpu_times import CpuTimes
from random_cases import pytest_runtest_makereport, seed_hypothesis

__all__ = [
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
]

# No test leaves a graph in the user's own folder, or reads one; the tests of the cache ask for it.
os.environ.setdefault("SHARDWRIGHT_GRAPH_CACHE", "off")

NO_BYTECODE = sys.dont_write_bytecode
"""Whether PYTHONDONTWRITEBYTECODE is set. Collection writes bytecode all the same: without it each
worker compiles all tests, and each process that they start the package, in 1.3 CPU seconds."""
sys.dont_write_bytecode = False

SLOW_TIMEOUT = 3600
"""Seconds for a slow test: some take minutes on an idle machine, and machines are shared."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        type=int,
        metavar="FILES",
        help="print the FILES that cost most CPU, with that of the processes they start",
    )


def pytest_configure(config: pytest.Config) -> None:
    lines = config.getoption("--cpu-times")
    if lines is not None:
        config.pluginmanager.register(CpuTimes(lines), "cpu-times")


def pytest_collection_finish() -> None:
    # Tests write modules of one name again within a second, which bytecode would hide.
    sys.dont_write_bytecode = NO_BYTECODE
    # The garbage collector would visit the 700,000 objects of modules and tests again and again.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        seed_hypothesis(item)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


@pytest.fixture
def untried_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal suggests its first `sw.local_map` without a trial, which captures the model
    again: test_way_out.py proves the trials."""
    from shardwright.core.capture import way_out

    monkeypatch.setattr(way_out, "_is_captured", lambda *_: True)
