"""Two processes gather often enough that PyTorch's own all-gather ends one within seconds."""

from pathlib import Path

import pytest

from torchrun import torchrun


@pytest.mark.distributed
def test_many_all_gathers_at_once_do_not_end_a_process() -> None:
    printed = torchrun(Path(__file__).with_name("gather_ranks.py"), 2)
    assert printed.count("gathered everything") == 2, printed
