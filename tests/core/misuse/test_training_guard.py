"""Ranks that train a planned model differently are told in their next call."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from torchrun import torchrun

DIFFERENCES = {
    "rate": "before call 3, learning rates differed: 0.2 on rank 1, but 0.1 on rank 0",
    "decay": "before call 2, checksums of the options of optimizers differed: ",
    "step": "before call 3, ranks made different numbers of optimizer steps: 0 on rank 1, but 1",
    "clip": "before call 2, gradients were clipped to different norms: 2 on rank 1, but 1 on",
    "torch clip": "before call 3, gradients were clipped to different norms: 0.1 on rank 1, but 0",
    "scale": "before call 3, checksums of parameters of which all ranks have a replica differed: ",
    "drop": "before call 3, checksums of parameters of which all ranks have a replica differed: ",
    "zero": "before call 2, only some ranks kept the gradients of an earlier step "
    r"\(1 for kept\): 1 on rank 1, but 0 on rank 0",
}


@pytest.fixture(scope="module")
def printed() -> Callable[[], str]:
    return cache(lambda: torchrun(Path(__file__).with_name("training_ranks.py"), 2))


@pytest.mark.distributed
@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_train_differently_are_named_on_all_ranks(
    case: str, printed: Callable[[], str]
) -> None:
    for rank in range(2):
        error = f"rank {rank}, {case}: training differs between ranks: {DIFFERENCES[case]}"
        assert re.search(error, printed()), printed()


@pytest.mark.distributed
def test_ranks_that_train_alike_go_on(printed: Callable[[], str]) -> None:
    assert len(re.findall("rank [01], alike.*: passed", printed())) == 10, printed()


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "model"), [("factor", "WithLoss"), ("labels", "Sequential")])
def test_ranks_that_train_a_global_output_with_different_losses_are_named_on_all_ranks(
    case: str, model: str, printed: Callable[[], str]
) -> None:
    for rank in range(2):
        error = (
            f"rank {rank}, {case}: rank 1 and rank 0 train the output of {model} with different"
            " losses, but every rank passes the global batch"
        )
        assert error in printed(), printed()
