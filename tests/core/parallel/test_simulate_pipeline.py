"""Random models in random stages, on simulated ranks: one device's losses, gradients and bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from core.parallel.pipeline_models import EarlyLoss, Tied, batch
from random_cases import random_cases
from random_graphs import random_net
from random_plans import random_cuts, random_outputs, random_storage
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.parallel.simulate_pipeline import simulate_stages
from shardwright.core.parallel.simulate_ranks import Outcome
from shardwright.core.parallel.unsharded_parameters import UnshardedParameters
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.plan import make_plan


def in_random_parts(graph: Graph, pipeline: PipelineSpec, draw: random.Random) -> dict[str, int]:
    """Consecutive operators, split into chunks at random positions."""
    places = sorted(draw.sample(range(1, len(graph.ops)), pipeline.num_chunks - 1))
    return {op.name: sum(i >= p for p in places) for i, op in enumerate(graph.ops)}


def random_pipeline(graph: Graph, micro_batches: int, seed: int) -> PipelineSpec:
    draw = random.Random(seed)
    schedule, chunks = draw.choice(
        [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zero_bubble_v", 2)]
    )
    stages = 4 if chunks == 1 and draw.random() < 0.3 else 2
    asked = PipelineSpec(stages, micro_batches, schedule, chunks)
    chunk_of = in_random_parts(graph, asked, draw)
    # Random models mix samples: the losses of micro-batches are what is trained.
    return PipelineSpec(stages, micro_batches, schedule, chunks, chunk_of, loss_reduction="sum")


def staged_plan(graph: Graph, devices: int, seed: int) -> sw.Plan:
    """Any cuts, any storage, any stages."""
    mesh = prime_mesh(devices)
    decisions = Decisions(
        random_cuts(graph, mesh, seed),
        random_storage(graph, mesh, seed),
        random_outputs(graph, mesh, seed),
    )
    return make_plan(
        Partitioned(graph, mesh, decisions, random_pipeline(graph, 4, seed)),
        mode="random",
        options={"seed": seed},
        search_seconds=0.0,
        training=True,
    )


def trained_net(seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """A random net that has parameters, and takes a batch of any size."""
    tries = (random_net(1000 * seed + i) for i in range(1000))
    return next((net, args) for net, args in tries if list(net.parameters()) and fits(net, args))


def of_step(plan: sw.Plan, net: nn.Module, args: tuple[Any, ...]) -> Outcome:
    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    return simulate_stages(plan.partitioned, parameters, buffers, args)


def fits(net: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        net(*(x[:1] for x in args))
    except RuntimeError:
        return False
    return True


@random_cases(10, slow=50)
def test_random_models_in_random_stages_equal_one_device(seed: int) -> None:
    net, args = trained_net(seed)
    graph = sw.capture(net, tuple(x[:1] for x in args))
    result = sw.check(net, args, {}, staged_plan(graph, (1, 2, 4, 6)[seed % 4], seed))
    assert result.passes(1e-9), str(result)


@random_cases(6)
def test_casts_that_micro_batches_share_give_every_bit_of_casts_of_their_own(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, args = trained_net(seed)
    graph = sw.capture(net, tuple(x[:1] for x in args), compute_dtype=torch.bfloat16)
    plan = staged_plan(graph, (1, 2, 4)[seed % 3], seed)
    shared, handed_out = of_step(plan, net, args), UnshardedParameters.tensors

    def anew(self: UnshardedParameters) -> dict[str, Any]:
        self._casts = {}
        return handed_out(self)

    monkeypatch.setattr(UnshardedParameters, "tensors", anew)
    apart = of_step(plan, net, args)
    assert torch.equal(shared.outputs[0], apart.outputs[0])
    assert shared.gradients.keys() == apart.gradients.keys() and shared.gradients
    for name, gradient in shared.gradients.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, apart.gradients[name]), name


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        (2, "1f1b"),
        (4, "gpipe"),
        (2, "interleaved_1f1b"),
        (2, "zero_bubble_v"),
        (2, "interleaved_zero_bubble"),
        (2, "dualpipe_v"),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tied_weights_skips_and_unevenly_ignored_targets(
    stages: int, schedule: str, reduction: str
) -> None:
    net, args = Tied(batch_norm=reduction == "sum"), batch()
    pipeline = sw.Pipeline(net, 4, loss_reduction=reduction)
    plan = sw.plan(pipeline, args, devices=8, stages=stages, schedule=schedule, mem_coeff=10.0)
    result = sw.check(pipeline, args, {}, plan)
    assert result.passes(1e-9), str(result)
    assert result.loss is not None


def test_the_loss_is_that_of_the_whole_batch_though_targets_are_ignored_unevenly() -> None:
    net, args = Tied(), batch()
    plan = sw.plan(net, args, devices=2, stages=2, micro_batches=4)
    loss = sw.check(net, args, {}, plan).loss
    assert loss == pytest.approx(float(net(*args)[0].detach()), rel=1e-5)


def test_the_loss_may_be_made_before_the_last_stage() -> None:
    net, args = EarlyLoss(), batch()
    config = {"one": 0, "two": 0, "three": 1}
    plan = sw.plan(net, args, devices=4, micro_batches=2, stage_config=config)
    result = sw.check(net, args, {}, plan)
    assert result.passes(1e-9), str(result)


def test_every_stage_sends_what_is_planned() -> None:
    """A wrong layout between stages would change the bytes sent."""
    net, args = Tied(), batch()
    plan = sw.plan(net, args, devices=4, stages=2, micro_batches=2)
    assert [(row.stage, row.to_stage) for row in plan.crossings] == [(0, 1)]
    row = plan.crossings[0]
    assert 0 < row.backward_bytes <= row.forward_bytes
    result = sw.check(net, args, {}, plan)
    assert result.counted_bytes == result.planned_bytes
