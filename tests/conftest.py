"""What holds for all tests."""

import os

import pytest

from random_cases import pytest_runtest_makereport, seed_hypothesis

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_makereport"]

# No test leaves a graph in the user's own folder, or reads one; the tests of the cache ask for it.
os.environ.setdefault("SHARDWRIGHT_GRAPH_CACHE", "off")

SLOW_TIMEOUT = 3600
"""Seconds for a slow test: some take minutes on an idle machine, and machines are shared."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        seed_hypothesis(item)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
