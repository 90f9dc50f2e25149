"""What other choices would cost: the difference that a step really has, and where it turns."""

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import llama, network
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.search.by_time.search import timed_search
from shardwright.core.search.choices import BATCH, COMMUNICATION, MEM_COEFF, OtherChoice
from shardwright.core.search.request import SearchRequest, TimedStep


class Small(nn.Module):
    """The example of docs/search.md: its break-even is 0.012207."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4096, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dense(x.flip(0, 1))
        return y


def small(mem_coeff: float) -> sw.Plan:
    with torch.device("meta"):
        return sw.plan(Small(), (torch.empty(8192, 4096),), devices=2, mem_coeff=mem_coeff)


def others(plan: sw.Plan, name: str, axis: str) -> dict[str, OtherChoice]:
    (choice,) = [each for each in plan.choices_of[name] if each.axis == axis]
    return {each.factor: each for each in choice.alternatives}


def test_symbolic_costs_are_those_of_the_log_and_turn_at_the_break_even() -> None:
    plan = small(0.01)
    assert plan.cuts.get("dense") is None
    batch = others(plan, "dense", plan.mesh.alias_names[0])["b"]
    assert batch.cost == pytest.approx(20.48 - 16.7772, rel=1e-4)
    turn = batch.multipliers[MEM_COEFF]
    assert turn * 0.01 == pytest.approx(0.012207, rel=1e-3)
    assert [bool(small(0.01 * turn * by).cuts.get("dense")) for by in (0.99, 1.01)] == [False, True]


def test_seconds_are_the_difference_of_two_steps() -> None:
    net, args, kwargs = network(batch=512)
    plan = sw.plan(net, args, kwargs, devices=4, cluster="h100", mem_coeff=0.1)
    assert plan.graph is not None
    cluster = load_cluster("h100")

    def seconds(changed: dict[str, dict[str, tuple[int, ...]]]) -> float:
        cuts = {op.name: plan.cuts.get(op.name, {}) for op in plan.graph.ops} | changed  # type: ignore[union-attr]
        timed_step = TimedStep(cluster)
        request = SearchRequest(plan.graph, plan.mesh, cuts, timed_step=timed_step)  # type: ignore[arg-type]
        search = timed_search(request, fold=False)
        cost = search.objective.cost([each.pinned or {} for each in search.problem.variables])
        return search.total(cost)

    compared = 0
    for name in ("layer1", "layer2"):
        for number, axis in enumerate(plan.mesh.alias_names):
            for factor, other in others(plan, name, axis).items():
                cut = {f: a for f, a in plan.cuts.get(name, {}).items() if number not in a}
                if len(plan.mesh.alias_names) > 1 or factor not in plan.row(name).cuts:
                    moved = {**cut, **({factor: (number,)} if factor and factor not in cut else {})}
                    if factor in cut:
                        continue
                    difference = seconds({name: moved}) - seconds({})
                    assert other.cost == pytest.approx(difference, rel=1e-6, abs=1e-12)
                    compared += 1
    assert compared >= 4


def test_what_turns_a_choice_is_within_bounds_and_only_of_what_costs_more() -> None:
    net, args, kwargs = llama(batch=16)
    plan = sw.plan(net, args, kwargs, devices=4, cluster="h100")
    every = [other for choice in plan.choices for other in choice.alternatives]
    turning = [other for other in every if other.multipliers]
    assert turning
    for other in turning:
        assert other.cost > 0
        assert set(other.multipliers) <= {COMMUNICATION, BATCH, MEM_COEFF}
        assert all(1 / 64 <= turn <= 64 for turn in other.multipliers.values())


def test_operators_that_are_pinned_have_choices_and_plans_on_one_device_have_none() -> None:
    net = nn.Linear(8, 8)
    sw.shard(net, in_strategy=((2, 1), (1, 1)))
    x = torch.randn(8, 8)
    assert sw.plan(net, (x,), devices=2).choices_of
    assert sw.plan(nn.Linear(8, 8), (x,), devices=1).choices == ()
