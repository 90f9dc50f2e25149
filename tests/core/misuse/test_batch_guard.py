"""Tokens and classes that a model does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrun import torchrun


@pytest.mark.distributed
def test_an_index_beyond_a_cut_table_or_beyond_cut_classes_is_refused_on_all_ranks() -> None:
    printed = torchrun(Path(__file__).with_name("index_ranks.py"), 2)
    assert "refused on all ranks" in printed, printed
