"""`sw.rehearse` trains as one rank of a plan, without the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from sample_models import Model, encoder, gpt2, llama, mlp, resnet
from shardwright.core.api.lone_rank import fake_process_group

SHARDED = sw.OptimizerParallel(level="level3", threshold=0)
CASES: dict[str, tuple[Callable[[], Model], dict[str, Any]]] = {
    "perceptron": (mlp, {}),
    "sharded parameters": (mlp, {"mode": "data_parallel", "hsdp": SHARDED}),
    "statistics over the batch": (lambda: resnet(8, 2, (1, 1)), {"mode": "data_parallel"}),
    "attention": (lambda: encoder(8), {}),
    "named inputs": (lambda: llama(8), {}),
    "micro-batches": (lambda: llama(8), {"micro_batches": 2}),
    "stages that share a weight": (lambda: gpt2(8), {"stages": 2, "micro_batches": 4}),
}


def planned(model: Model, devices: int, **options: Any) -> tuple[Model, sw.Plan]:
    return model, sw.plan(*model, devices=devices, **options)


@cache
def planned_case(case: str) -> tuple[Model, sw.Plan]:
    make, options = CASES[case]
    return planned(make(), 8, **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", CASES)
def test_every_step_sends_what_the_plan_says(case: str, device: str) -> None:
    model, plan = planned_case(case)
    result = sw.rehearse(*model, plan, device=device)
    assert result.passes()
    for rank in result.ranks:
        assert sum(each.bytes for each in rank.traffic.values()) == rank.planned_bytes
    assert max(rank.planned_bytes for rank in result.ranks) == plan.bytes > 0


@pytest.mark.parametrize("stages", [1, 2])
def test_what_weighs_micro_batches_of_ranks_with_their_own_part_is_expected(stages: int) -> None:
    options = {"mode": "data_parallel", "dataset_strategy": "data_parallel", "micro_batches": 2}
    (net, args, batch), plan = planned(llama(8), 4, stages=stages, **options)
    rows = 8 * stages // 4
    part = {k: v[:rows] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    ranks = sw.rehearse(net, args, part, plan).ranks
    assert all(rank.as_planned for rank in ranks)
    assert ranks[-1].planned_bytes > sum(plan.partitioned.step_bytes[-1])


def test_the_first_and_the_last_rank_of_each_stage_are_rehearsed() -> None:
    model, plan = planned(gpt2(8), 8, stages=2, micro_batches=4)
    ranks = sw.rehearse(*model, plan).ranks
    assert [(rank.rank, rank.stage) for rank in ranks] == [(0, 0), (3, 0), (4, 1), (7, 1)]


def test_one_rank_of_64_starts_and_trains() -> None:
    sharing = replace(SHARDED, shard_size=8)
    model, plan = planned(mlp(64, (64, 128, 64)), 64, mode="data_parallel", hsdp=sharing)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    (rank,) = sw.rehearse(*model, plan, ranks=[37], optimizer=sgd, device="cpu").ranks
    assert rank.as_planned
    assert [phase.name for phase in rank.phases] == [
        *("start", "step 1", "step 2", "step 3", "checkpoint written", "checkpoint read")
    ]
    assert set(rank.phases[1].parts) == {"forward and backward", "clipping", "optimizer"}
    assert rank.groups == 2


def test_memory_is_that_of_the_plan() -> None:
    model, plan = planned(llama(8, 64, width=64, vocabulary=512), 8)
    (rank,) = sw.rehearse(*model, plan, ranks=[7]).ranks
    assert rank.planned_peak == plan.memory.peak
    assert rank.peak_bytes == pytest.approx(rank.planned_peak, rel=0.02)
    assert rank.parameter_bytes == plan.parameter_bytes
    assert rank.optimizer_bytes == pytest.approx(2 * rank.parameter_bytes, rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_stages_hold_what_they_receive_for_the_micro_batches_in_flight(schedule: str) -> None:
    batches = {"stages": 2, "micro_batches": 8, "schedule": schedule}
    model, plan = planned(llama(16, 64, width=64, vocabulary=64, layers=4), 2, **batches)
    for rank in sw.rehearse(*model, plan).ranks:
        assert rank.as_planned
        assert rank.planned_peak == pytest.approx(rank.peak_bytes, rel=0.02)


def test_a_checkpoint_holds_the_shards_of_the_rank_and_its_optimizer() -> None:
    model, plan = planned(mlp(), 8, mode="data_parallel", hsdp=SHARDED)
    (rank,) = sw.rehearse(*model, plan, ranks=[5], device="cpu").ranks
    assert rank.checkpoint_bytes is not None
    assert rank.checkpoint_bytes > rank.parameter_bytes + rank.optimizer_bytes


def test_on_the_meta_device_a_model_of_any_size_is_rehearsed() -> None:
    with sw.no_init_parameters():
        net = sw.WithLoss(nn.Linear(2**18, 2**18, bias=False), nn.MSELoss())
    x = torch.empty(16, 2**18, device="meta")
    plan = sw.plan(net, (x, x), devices=16)
    (rank,) = sw.rehearse(net, (x, x), None, plan, ranks=[15]).ranks
    assert rank.as_planned
    assert rank.parameter_bytes == 2**36 * 4 // 16


def test_numbers_of_the_caller_stay_as_they_are() -> None:
    model, plan = planned(mlp(), 8)
    before = {name: tensor.clone() for name, tensor in model[0].state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    sw.rehearse(*model, plan, ranks=[0], device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model[0].state_dict().items())


def test_a_plan_for_one_device_is_rehearsed_without_a_process_group() -> None:
    model, plan = planned(mlp(), 1)
    (rank,) = sw.rehearse(*model, plan, device="cpu").ranks
    assert (rank.as_planned, rank.planned_bytes, rank.groups) == (True, 0, 0)


def test_what_cannot_be_rehearsed_is_refused() -> None:
    model, plan = planned(mlp(), 8)
    with pytest.raises(sw.PlanError, match="no rank 8: the plan has 8 devices"):
        sw.rehearse(*model, plan, ranks=[8])
    with pytest.raises(sw.PlanError, match=r"on device 'cuda'\n.* meta and cpu"):
        sw.rehearse(*model, plan, device="cuda")
    with (
        fake_process_group(0, 2),
        pytest.raises(sw.PlanError, match="while a process group is initialized"),
    ):
        sw.rehearse(*model, plan)
