"""Scripts as people write them, with a few lines changed for several devices."""

from __future__ import annotations

import pytest
from benchmarks.bench_scripts import MOST_LINES, SCRIPTS, changed_lines, compare


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_needs_at_most_five_other_lines(name: str) -> None:
    assert 0 < changed_lines(name)[0] <= MOST_LINES


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_resumes_and_generates_as_on_one_device(name: str) -> None:
    if name == "sft":
        pytest.importorskip("trl")
    found = compare(name)
    assert found.is_equal, found
