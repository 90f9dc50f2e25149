"""Random cases: the same in every run; `make test-slow SEED=7` draws others.

A case is drawn from one number, `seed`. A test takes it as a parameter from `random_cases`, or
draws from `first_seed` and has the mark `random`; Hypothesis draws from `first_seed` too. A random
test that fails prints the command that repeats it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator

import hypothesis
import pytest

SPACING = 1000
"""Between the first seeds of two values of `SEED`: more than a test has cases."""


def first_seed() -> int:
    return SPACING * int(os.environ.get("SEED") or 0)


def random_cases(count: int, *, slow: int = 0) -> pytest.MarkDecorator:
    """Parametrizes a test by `seed`: `count` cases in the default suite, and `slow` more."""
    first, marks = first_seed(), [pytest.mark.random]
    default = [pytest.param(first + n, marks=marks) for n in range(count)]
    marks = [*marks, pytest.mark.slow]
    more = [pytest.param(first + n, marks=marks) for n in range(count, count + slow)]
    return pytest.mark.parametrize("seed", [*default, *more])


def seed_hypothesis(item: pytest.Item) -> None:
    """Lets a test of Hypothesis draw the same examples in every run."""
    test = getattr(item, "obj", None)
    if hypothesis.is_hypothesis_test(test):
        hypothesis.seed(first_seed())(test)
        item.add_marker(pytest.mark.random)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and item.get_closest_marker("random"):
        seed = first_seed() // SPACING
        command = f"SEED={seed} python -m pytest -m '' {shlex.quote(item.nodeid)}"
        report.sections.append(("To repeat this case", command))
    return report
