"""The training loop, on one device and without a plan."""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.core.checkpoint.position import Position
from shardwright.run import Batches, MeanAbsoluteError, MeanSquaredError, StepRecord, train
from shardwright.run.data.evaluation import Evaluation


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) - y).square().mean()


def trained(net: nn.Module, batches: Batches, lr: float = 0.1, **options: Any) -> list[StepRecord]:
    """The steps of training by plain gradient descent on the CPU."""
    steps: list[StepRecord] = []
    optimizer, device = torch.optim.SGD(net.parameters(), lr=lr), torch.device("cpu")
    train(net, optimizer, batches, device=device, **{"on_step": steps.append, **options})
    return steps


def test_it_is_gradient_descent_on_every_batch_of_every_epoch() -> None:
    torch.manual_seed(0)
    net = Loss()
    mine = copy.deepcopy(net)
    x = torch.randn(10, 3, dtype=torch.float64)
    batches = Batches((x, x.sum(1, keepdim=True)), batch_size=4)
    steps = trained(net, batches, epochs=2)
    losses = []
    for epoch in range(2):
        for inputs, targets in batches.epoch(epoch):
            loss = mine(inputs, targets)
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss, list(mine.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(mine.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
    # The optimizer fuses its update where the CPU can, which rounds once less.
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-12)
    assert [(step.epoch, step.step) for step in steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(step.samples_per_second > 0 for step in steps)
    torch.testing.assert_close(net.layer.weight, mine.layer.weight, rtol=1e-12, atol=1e-12)


def test_max_steps_ends_it_over_all_epochs() -> None:
    batches = Batches((torch.ones(8, 3, dtype=torch.float64), torch.ones(8, 1)), batch_size=4)
    steps = trained(Loss(), batches, epochs=5, max_steps=3)
    assert [(step.epoch, step.step) for step in steps] == [(0, 0), (0, 1), (1, 0)]


def test_the_line_of_a_step_is_the_documented_one() -> None:
    step = StepRecord(0, 100, float(np.float32(2.3016002)), 1234.5)
    assert step.line == "epoch: 0, step: 100, loss is 2.3016002"


def test_a_step_survives_json_exactly() -> None:
    step = StepRecord(3, 14, 0.1 + 0.2, 1 / 3)
    assert StepRecord.from_json(step.to_json()) == step


def test_losses_compare_a_column_of_outputs_with_a_row_of_targets() -> None:
    output, target = torch.tensor([[1.0], [5.0]]), torch.tensor([2, 2])
    assert MeanAbsoluteError()(output, target).item() == 2.0
    assert MeanSquaredError()(output, target).item() == 5.0


def test_the_rate_is_that_of_each_step_and_large_gradients_are_scaled_down() -> None:
    net = Loss()
    before = net.layer.weight.detach().clone()
    batches = Batches((100 * torch.ones(12, 3, dtype=torch.float64), torch.ones(12, 1)), 4)
    asked, steps = list[int](), list[torch.Tensor]()

    def rate(step: int) -> float:
        asked.append(step)
        return 0.5**step

    def on_step(step: StepRecord) -> None:
        steps.append(net.layer.weight.detach().clone())

    trained(net, batches, lr=7.0, epochs=1, on_step=on_step, rate=rate, clip_norm=0.1)
    assert asked == [0, 1, 2]
    lengths = [(b - a).norm().item() for a, b in pairwise([before, *steps])]
    np.testing.assert_allclose(lengths, [0.1, 0.05, 0.025], rtol=1e-4)


def test_the_loss_on_other_data_is_in_every_so_many_records_and_changes_nothing() -> None:
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batches = Batches((x, x.sum(1, keepdim=True)), batch_size=4)
    other = Batches((x.square(), x[:, :1]), batch_size=4)
    runs = list[list[StepRecord]]()
    for evaluation in (None, Evaluation(other, every=2, max_batches=2)):
        torch.manual_seed(0)
        net = Loss()
        runs.append(trained(net, batches, epochs=2, evaluation=evaluation))
        assert net.training
    assert [a.loss for a in runs[0]] == [b.loss for b in runs[1]]
    assert [step.evaluation_loss is None for step in runs[1]] == [True, False] * 3
    with torch.no_grad():
        losses = [net(*batch).item() for batch in other.epoch(0)][:2]
    assert runs[1][-1].evaluation_loss == pytest.approx(sum(losses) / 2)


def test_it_goes_on_from_any_position_as_if_it_had_never_stopped() -> None:
    x = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batches = Batches((x, x.sum(1, keepdim=True)), batch_size=4)
    torch.manual_seed(0)
    net = Loss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    every = list[StepRecord]()
    places = list[Position]()
    copies = list[dict[str, torch.Tensor]]()

    def after_step(place: Position) -> None:
        places.append(place)
        copies.append({name: value.clone() for name, value in net.state_dict().items()})

    where = {"epochs": 3, "device": torch.device("cpu")}
    train(net, optimizer, batches, on_step=every.append, after_step=after_step, **where)
    assert places[2] == Position(step=3, epoch=1, batch=1, sample=4)
    for done, (place, copied) in enumerate(zip(places, copies, strict=True), 1):
        net.load_state_dict(copied)
        rest = list[StepRecord]()
        train(net, optimizer, batches, on_step=rest.append, start=place, max_steps=5, **where)
        assert [(s.epoch, s.step, s.loss) for s in rest] == [
            (s.epoch, s.step, s.loss) for s in every[done:5]
        ]
