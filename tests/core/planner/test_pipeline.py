"""What is asked of stages and micro-batches, checked before anything is planned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.two(self.one(x).relu()) * scale).square().mean()


ARGS = (torch.arange(64.0).reshape(8, 8) / 64, torch.linspace(0, 1, 8).unsqueeze(0))


def test_a_pipeline_bears_the_names_of_its_model() -> None:
    net = Net()
    pipeline = sw.Pipeline(net, 4)
    assert list(pipeline.state_dict()) == list(net.state_dict())
    assert pipeline.one is net.one
    pipeline.eval()
    assert not net.training and not net.one.training


def test_on_one_device_a_pipeline_runs_its_micro_batches_in_turn() -> None:
    net = Net()
    torch.testing.assert_close(sw.Pipeline(net, 4)(*ARGS), net(*ARGS))
    summed = sw.Pipeline(net, 4, loss_reduction="sum")
    torch.testing.assert_close(summed(*ARGS), 4 * net(*ARGS))


def test_a_plan_has_the_stages_of_the_pipeline() -> None:
    net = sw.Pipeline(Net(), 4, {"one": 0, "two": 1})
    plan = sw.plan(net, ARGS, devices=4)
    assert plan.devices == 4 and plan.mesh.num_devices == 2
    assert (plan.pipeline.stages, plan.pipeline.micro_batches) == (2, 4)
    assert plan.inputs[0]["shape"] == (2, 8) and plan.inputs[1]["shape"] == (1, 8)
    said = sw.plan(Net(), ARGS, devices=4, micro_batches=4, stage_config=net.stage_config)
    assert (said.pipeline, said.cuts) == (plan.pipeline, plan.cuts)
    assert sw.Plan.from_json(plan.to_json()).pipeline == plan.pipeline


def test_stages_are_cut_automatically() -> None:
    plan = sw.plan(sw.Pipeline(Net(), 2), ARGS, devices=4, stages=2)
    assert [plan.pipeline.chunk_of[n] for n in ("one", "two")] == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "stages=0: must be a whole number of at least 1"),
        (
            {"stages": 3, "micro_batches": 4},
            "(?s)4 devices cannot be divided into 3.*1, 2, 4",
        ),
        ({"stages": 2}, "(?s)1 micro-batches for 2 stages.*micro_batches=2"),
        ({"stages": 2, "micro_batches": 2, "schedule": "1b1f"}, "must be one of 1f1b, gpipe"),
        (
            {"stages": 2, "micro_batches": 2, "schedule": "dualpipe_v"},
            "2 micro-batches for 2 stages: schedule 'dualpipe_v' needs 4\n"
            "set micro_batches=4 or more, or schedule='zero_bubble_v'",
        ),
        ({"stages": 4, "micro_batches": 4, "stage_config": {"one": 0, "two": 1}}, "has 2 stages"),
        (
            {
                "stages": 2,
                "micro_batches": 8,
                "stage_config": {"one": 0, "two": 1},
                "schedule": "zero_bubble_v",
            },
            "(?s)run through stages 0, 1 .*'zero_bubble_v' runs in the order 0, 1, 1, 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(sw.StrategyError, match=message):
        sw.plan(Net(), ARGS, devices=4, **options)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(sw.PlanError, match=r"8 samples cannot be split into 3 .*\n.* 1, 2, 4, 8"):
        sw.plan(Net(), ARGS, devices=4, micro_batches=3)


def test_rounds_of_interleaved_chunks_must_be_equal() -> None:
    x = torch.ones(10, 8)
    config = {"one": 0, "two": 1}
    with pytest.raises(sw.StrategyError, match="nearest valid numbers: "):
        sw.plan(
            Net(),
            (x, ARGS[1]),
            devices=4,
            stage_config=config,
            micro_batches=5,
            schedule="interleaved_1f1b",
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sw.Pipeline(Net(), 0), "micro_batches=0"),
        (lambda: sw.Pipeline(Net(), True), "micro_batches=True"),
        (lambda: sw.Pipeline(Net(), 2, loss_reduction="max"), "must be one of mean, sum"),
        (lambda: sw.Pipeline(torch.relu, 2), "must be an nn.Module"),
        (lambda: sw.plan(sw.Pipeline(Net(), 2), ARGS, devices=4, micro_batches=4), "contradicts"),
    ],
)
def test_a_pipeline_checks_what_it_is_given(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(sw.StrategyError, match=message):
        make()
