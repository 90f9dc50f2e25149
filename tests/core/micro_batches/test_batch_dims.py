"""Which dimension of each input is split into micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.micro_batches.batch_dims import JoinedDims

SAMPLES, STEPS = 8, 4
LABELS = torch.tensor([0, 0, 1, 2, 3, 4, 0, 1])
WAYS: tuple[dict[str, Any], ...] = ({}, {"stages": 2})


class Recurrent(nn.Module):
    """`nn.LSTM` has the samples in dimension 1 by default."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.out(self.rnn(x)[0])
        if y.ndim == 1:
            return F.cross_entropy(h[-1], y, ignore_index=0)
        return F.cross_entropy(h.flatten(0, 1), y.flatten(), ignore_index=0)


def test_dimensions_whose_rows_change_their_shard_are_not_the_same_samples() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x.sin(), torch.cat([x, x]), x.flip(0)

    graph = sw.capture(Joined(), (torch.randn(4, 2),))
    joined = JoinedDims(graph)
    x, *outputs = (
        joined.root_of_group((v, 0)) for v in (*graph.input_values, *graph.output_values)
    )
    assert [root == x for root in outputs] == [True, False, False]


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 5)

    def forward(self, table: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(F.embedding(ids, table)), y, ignore_index=0)


class Neighbors(Looked):
    def forward(self, adjacency: Tensor, x: Tensor, y: Tensor) -> Tensor:
        h = adjacency @ (adjacency @ self.out(x)).tanh()
        return F.cross_entropy(h.mean(1), y, ignore_index=0)


def checked(net: nn.Module, call: tuple[Tensor, ...], **options: Any) -> sw.Plan:
    """The plan for 4 micro-batches, compared with the eager module on the whole batch."""
    plan = sw.plan(net, call, devices=2, micro_batches=4, **options)
    assert sw.check(net, call, None, plan).passes()
    return plan


@pytest.mark.parametrize("way", WAYS)
def test_samples_in_another_dimension_are_found_through_the_loss(way: dict[str, Any]) -> None:
    call = torch.randn(STEPS, SAMPLES, 6), LABELS
    assert checked(Recurrent(), call, **way).pipeline.batch_dims == (1, 0)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_plans_count_the_samples_of_the_dimension_that_is_theirs(micro_batches: int) -> None:
    call = torch.randn(STEPS, SAMPLES, 6), LABELS
    plan = sw.plan(Recurrent(), call, devices=2, micro_batches=micro_batches)
    assert plan.global_batch == SAMPLES
    assert sw.check(Recurrent(), call, None, plan).passes()


def test_what_no_input_has_in_dimension_0_must_be_named() -> None:
    net, call = Recurrent(), (torch.randn(STEPS, SAMPLES, 6), LABELS.repeat(STEPS, 1))
    with pytest.raises(sw.StrategyError, match=r"aten.lstm.input in 'rnn'.* mixes samples"):
        sw.plan(net, call, devices=2, micro_batches=4)
    assert checked(net, call, batch_dims={"x": 1}).pipeline.batch_dims == (1, 1)


def test_a_table_as_long_as_the_batch_is_passed_in_full() -> None:
    call = torch.randn(SAMPLES, 6), LABELS, LABELS
    assert checked(Looked(), call).pipeline.batch_dims == (None, 0, 0)
    named = {"table": None, "ids": 0, "y": 0}
    assert checked(Looked(), call, batch_dims=named).pipeline.batch_dims == (None, 0, 0)


@pytest.mark.parametrize("nodes", [3, SAMPLES])
def test_an_adjacency_matrix_is_passed_in_full(nodes: int) -> None:
    call = torch.randn(nodes, nodes), torch.randn(SAMPLES, nodes, 6), LABELS
    assert checked(Neighbors(), call).pipeline.batch_dims == (None, 0, 0)


@pytest.mark.parametrize(
    ("batch_dims", "said"),
    [
        ({"z": 0}, r"batch_dims: the model has no tensor input 'z'\nuse one of 'x'"),
        ({"x": 3}, r"batch_dims\['x'\]=3, but the input has 3 dimensions"),
        ({"x": "0"}, "must be names of inputs, each with a dimension or None"),
    ],
)
def test_dimensions_that_the_inputs_lack_are_refused(batch_dims: Any, said: str) -> None:
    call = torch.randn(STEPS, SAMPLES, 6), LABELS
    with pytest.raises(sw.StrategyError, match=said):
        sw.plan(Recurrent(), call, devices=2, micro_batches=4, batch_dims=batch_dims)


def test_a_saved_plan_has_the_dimensions(tmp_path: Any) -> None:
    net, call = Recurrent(), (torch.randn(STEPS, SAMPLES, 6), LABELS)
    sw.plan(net, call, devices=2, micro_batches=4).save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert loaded.pipeline.batch_dims == (1, 0)
    assert sw.check(net, call, None, loaded).passes()


def test_labels_alone_are_not_split_where_the_loss_mixes_samples() -> None:
    class Root(Looked):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.out(x)[:, 0], y.to(x.dtype)).sqrt()

    with pytest.raises(sw.StrategyError, match="is not linear in a mean or sum over samples"):
        sw.plan(Root(), (torch.randn(SAMPLES, 6), LABELS), devices=2, micro_batches=4)


class TimeFirst(nn.Module):
    """Losses of steps in time, from one call on all steps of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(6, 3)

    def forward(self, x: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        logits = self.policy(torch.tanh(x)).flatten(0, 1).log_softmax(-1)
        loss = F.nll_loss(logits, actions.flatten(), reduction="none", ignore_index=1)
        return (loss.view_as(actions) * rewards).sum(0).mean()


def test_losses_of_steps_and_samples_in_one_list_are_told_apart() -> None:
    batch = (torch.randn(5, 4, 6), torch.randint(3, (5, 4)), torch.randn(5, 4))
    net, dims = TimeFirst(), {"x": 1, "actions": 1, "rewards": 1}
    plan = sw.plan(net, batch, devices=2, micro_batches=2, batch_dims=dims)
    assert sw.check(net, batch, None, plan).passes()
