"""Extreme numbers in files and options end in success or in one error of ours."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from features.number_cases import CASES, prepare, run
from random_cases import first_seed

DRAWN = 6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "fuzzed_model", raising=False)
    prepare(tmp_path)
    return tmp_path


@pytest.mark.random
@pytest.mark.parametrize("kind", CASES)
def test_some_extreme_numbers_end_in_success_or_one_error(kind: str, folder: Path) -> None:
    drawn = random.Random(first_seed()).sample(list(CASES[kind]()), DRAWN)
    assert len([run(case) for case in drawn]) == DRAWN


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_each_extreme_number_ends_in_success_or_one_error(kind: str, folder: Path) -> None:
    for case in CASES[kind]():
        run(case)


@pytest.mark.parametrize(
    ("kind", "place", "number"),
    [
        ("configurations", "train.timeout_seconds", "9007199254740992"),
        ("mindformers", "seed", "1e300"),
        ("options", "rehearse --devices", "18446744073709551616"),
    ],
)
def test_numbers_that_once_ended_in_a_raw_error_are_refused_by_name(
    kind: str, place: str, number: str, folder: Path
) -> None:
    (case,) = (case for case in CASES[kind]() if (case.place, case.number) == (place, number))
    assert place.split(" --")[-1] in run(case)
