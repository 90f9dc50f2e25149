"""PyTorch's own samples of its operators are exact under random plans, or refused by our errors."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from random_cases import first_seed
from random_plans import random_plan
from shardwright.core.parallel.simulate_ranks import simulate

pytest.importorskip("expecttest", reason="PyTorch's operator samples need expecttest")

from checked_samples import checked_endings
from operator_samples import (
    DEVICES,
    RANDOM,
    RAW,
    REFUSED,
    WRONG,
    Ending,
    counts,
    endings,
    operators,
)

DRAWING = ("normal", "bernoulli", "nn.functional.rrelu", "svd_lowrank", "pca_lowrank")
MENDED = (
    *("linalg.lu", "lu_unpack", "nn.functional.hinge_embedding_loss", "meshgrid.list_of_tensors"),
    *("inner", "transpose", "ormqr", "nn.functional.normalize"),
    "nn.functional.pixel_shuffle",
)
CONJUGATED = ("fft.ifft", "fft.ihfft", "fft.ihfft2", "fft.ihfftn")
"""Their kernels return views with a conjugate bit, which fake tensors do not have."""
SPARSE = ("sparse.sampled_addmm", "to_sparse")


def bad(ends: list[Ending]) -> str:
    return "\n".join(str(e) for e in ends if e.end in (WRONG, RAW))


def named(*names: str) -> list[object]:
    return [op for op in operators() if op.full_name in names]


@pytest.mark.random
def test_some_operators_are_exact_or_refused() -> None:
    seed = first_seed()
    ends = endings(random.Random(12 + seed).sample(operators(), 25), seed=seed)
    assert not bad(ends), bad(ends)
    assert counts(ends)[REFUSED] < len(ends) / 4


@pytest.mark.random
def test_check_of_some_operators_passes_or_refuses() -> None:
    seed = first_seed()
    ends = checked_endings(random.Random(49 + seed).sample(operators(), 25), 1, seed)
    assert not bad(ends), bad(ends)
    assert counts(ends)[REFUSED] < len(ends) / 2


@pytest.mark.slow
@pytest.mark.random
def test_all_operators_are_exact_or_refused() -> None:
    """One sample of each."""
    ends = endings(operators(), count=1, seed=first_seed())
    print(counts(ends))
    assert not bad(ends), bad(ends)
    assert counts(ends)[REFUSED] < 50 < 500 < len(ends)


@pytest.mark.parametrize("names", [MENDED, CONJUGATED])
def test_operators_of_scalars_empty_tensors_and_conjugated_views_are_exact(
    names: tuple[str, ...],
) -> None:
    ends = endings(named(*names))
    assert not bad(ends), bad(ends)
    assert not counts(ends)[REFUSED]


def test_sparse_tensors_are_refused() -> None:
    ends = endings(named(*SPARSE))
    assert {each.end for each in ends} == {REFUSED}
    assert all("sparse" in each.why for each in ends), ends


@pytest.mark.slow
def test_replicas_of_random_operators_draw_the_same_and_repetitions_too() -> None:
    ends = endings(named(*DRAWING))
    assert not bad(ends), bad(ends)
    assert {each.operator for each in ends if each.end == RANDOM} == set(DRAWING)


class Draws(nn.Module):
    """Numbers around `mean`, by an operator that has no sharding rule."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((5, 4000), 3.0, dtype=torch.float64))

    def forward(self) -> Tensor:
        return torch.normal(self.mean, 2.0)


def test_a_random_operator_without_a_rule_keeps_its_distribution() -> None:
    graph = sw.capture(Draws(), ())
    plan = random_plan(graph, DEVICES, seed=3)
    first, second = (
        simulate(plan.partitioned, {"mean": Draws().mean.detach()}, {}, [], seed=seed)
        for seed in (0, 1)
    )
    assert first.replica_difference == second.replica_difference == 0
    for outcome in (first, second):
        assert outcome.outputs[0].mean().item() == pytest.approx(3.0, abs=0.1)
        assert outcome.outputs[0].std().item() == pytest.approx(2.0, abs=0.1)
    assert not torch.equal(first.outputs[0], second.outputs[0])
