"""Collectives move and sum tensors of all dtypes, also of those that gloo does not know."""

from pathlib import Path

import pytest

from torchrun import torchrun


@pytest.mark.distributed
def test_every_dtype_is_sent() -> None:
    printed = torchrun(Path(__file__).with_name("sent_dtypes_ranks.py"), 2)
    assert printed.count("has sent every dtype") == 2, printed
