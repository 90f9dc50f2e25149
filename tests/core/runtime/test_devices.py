from pathlib import Path

import pytest

from torchrun import torchrun


@pytest.mark.distributed
def test_a_rank_makes_each_of_its_groups_once_and_no_others() -> None:
    output = torchrun(Path(__file__).with_name("device_ranks.py"), 4)
    assert output.count("passed ") == 4, output
