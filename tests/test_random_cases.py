"""Random cases are the same in every run, others with `SEED`, and repeated by a printed command."""

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
from random_cases import pytest_runtest_makereport, seed_hypothesis

def pytest_collection_modifyitems(items):
    for item in items:
        seed_hypothesis(item)
"""
CASES = """
from hypothesis import given, strategies
from random_cases import random_cases

@random_cases(2, slow=1)
def test_of_a_seed(seed):
    print("drawn", seed)
    assert seed % 1000 != 1

@given(strategies.integers(0, 2**60))
def test_of_hypothesis(number):
    with open("drawn", "a") as file:
        print(number, file=file)
"""


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("SEED", "7")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_cases=CASES)
    return pytester


def test_a_case_that_fails_prints_the_command_that_repeats_it(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-m", "not slow", "-k", "seed")
    result.assert_outcomes(passed=1, failed=1, deselected=2)
    command = "SEED=7 python -m pytest -m '' 'test_cases.py::test_of_a_seed[[]7001]'"
    result.stdout.fnmatch_lines([command])
    repeated = pytester.runpytest_inprocess("-m", "", "test_cases.py::test_of_a_seed[7001]")
    repeated.assert_outcomes(failed=1)


def test_slow_cases_are_others(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-m", "slow", "-rP")
    result.stdout.fnmatch_lines(["drawn 7002"])


def test_hypothesis_draws_the_same_in_every_run_with_a_seed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for seed in ("7", "7", "8"):
        monkeypatch.setenv("SEED", seed)
        pytester.runpytest_inprocess("-k", "hypothesis").assert_outcomes(passed=1, deselected=3)
        file = pytester.path / "drawn"
        drawn.append(file.read_text())
        file.unlink()
    assert drawn[0] == drawn[1] != drawn[2]
