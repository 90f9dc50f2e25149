"""Ranks that are not alike are made so, or refused on all of them."""

import re
from pathlib import Path

import pytest

from features.agreement_ranks import CHECKS, ENDINGS
from torchrun import checks_on_ranks, torchrun

SCRIPT = Path(__file__).with_name("agreement_ranks.py")


test_ranks_agree_or_all_say_why_not = checks_on_ranks(CHECKS, 4)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (ENDINGS[0].__name__, "call 15: rank 2"),
        (
            ENDINGS[1].__name__,
            "the ranks wait for .*rank 2 in evaluation forward pass 1",
        ),
    ],
)
def test_ranks_in_different_collectives_all_name_the_call_that_differs(
    ending: str, said: str
) -> None:
    output = torchrun(SCRIPT, 4, ending)
    assert all(re.search(f"rank {rank} says: {said}", output) for rank in range(4)), output
