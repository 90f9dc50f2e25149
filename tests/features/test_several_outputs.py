"""Models with several outputs: any of them are trained, on any plan, as by the eager module."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_cases import random_cases
from random_graphs import random_outputs_net
from random_plans import random_plan, random_recompute
from shardwright.core.graph.graph import Graph
from shardwright.core.parallel.simulate_ranks import Outcome, simulate
from shardwright.core.partition.partitioned import Partitioned


def partitioned(graph: Graph, devices: int, seed: int) -> Partitioned:
    """Any cuts, any storage, half of them with recomputation or optimizer parallel."""
    result = random_plan(graph, devices, seed).partition(graph)
    decisions = result.decisions
    if seed % 2:
        decisions = replace(decisions, recompute=random_recompute(graph, seed))
    if seed % 3 == 0:
        level = ("level1", "level2", "level3")[seed // 3 % 3]
        decisions = replace(decisions, sharding=sw.OptimizerParallel(level))
    return replace(result, decisions=decisions)


def run(net: nn.Module, args: tuple[Any, ...], model: Partitioned, starts: list[Any]) -> Outcome:
    named = {name: p.detach() for name, p in net.named_parameters()}
    return simulate(model, named, {}, list(args), output_gradients=starts)


@random_cases(12, slow=60)
def test_any_outputs_of_random_models_are_trained_as_by_the_module(seed: int) -> None:
    """Values, gradients, and which parameters have none; bytes are those of what is trained."""
    net, args = random_outputs_net(seed)
    model = partitioned(sw.capture(net, args), (2, 3, 4, 6, 8)[seed % 5], seed)
    outputs = list(net(*args).values())
    draw = random.Random(seed)
    chosen = [t.requires_grad and draw.random() < 0.5 for t in outputs]
    starts = [torch.randn_like(t) if c else None for t, c in zip(outputs, chosen, strict=True)]
    if any(chosen):
        ends = [(t, g) for t, g in zip(outputs, starts, strict=True) if g is not None]
        torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
    outcome = run(net, args, model, starts)
    assert outcome.replica_difference < 1e-9
    for got, wanted in zip(outcome.outputs, outputs, strict=True):
        torch.testing.assert_close(got, wanted)
    wanted_gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    assert outcome.gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(outcome.gradients[name], gradient, msg=name)
    graph = model.graph
    pairs = zip(graph.output_values, chosen, strict=True)
    if {value for value, c in pairs if c} >= {v for v in graph.trained if v.requires_grad}:
        assert outcome.stage_bytes == model.step_bytes


class Language(nn.Module):
    """Returns its loss with logits, or alone."""

    def __init__(self, logits: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 12)
        self.logits = logits

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.last(F.relu(self.first(x)))
        loss = F.cross_entropy(logits, labels)
        return (loss, logits) if self.logits else loss


@random_cases(4)
def test_logits_that_are_not_trained_cost_no_communication(seed: int) -> None:
    x, labels = torch.randn(8, 8), torch.randint(0, 12, (8,))
    sent = []
    for logits in (False, True):
        net = Language(logits)
        model = partitioned(sw.capture(net, (x, labels)), 4, seed)
        starts = [torch.ones(()), None][: 1 + logits]
        sent += [*model.step_bytes, *run(net, (x, labels), model, starts).stage_bytes]
    assert len(set(sent)) == 1, sent


class Aside(nn.Module):
    """A second head that its loss knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aside = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x).relu()
        return {"aside": self.aside(hidden), "loss": self.head(hidden).square().mean()}


@random_cases(6)
def test_bytes_are_predicted_for_a_training_step_of_the_loss(seed: int) -> None:
    net, x = Aside(), torch.randn(8, 8)
    model = partitioned(sw.capture(net, (x,)), 4, seed)
    assert run(net, (x,), model, [None, torch.ones(())]).stage_bytes == model.step_bytes
    both = run(net, (x,), model, [torch.ones(8, 8), torch.ones(())])
    assert both.stage_bytes == model.step_bytes
    assert "aside.weight" in both.gradients
