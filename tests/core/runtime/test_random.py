"""Random operators on shards: reproducible for a plan, equal on replicas, distinct on shards."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.parallel.simulate_ranks import Outcome, simulate
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.25)


def run(cuts: dict[str, tuple[int, ...]], seed: int = 1) -> Outcome:
    x = torch.ones(64, 32)
    graph = sw.capture(Dropped(), (x,))
    (op,) = graph.ops
    partitioned = Partitioned(graph, prime_mesh(4), Decisions({op.name: cuts}, {}))
    return simulate(partitioned, {}, {}, [x], seed=seed)


def mask(outcome: Outcome) -> Tensor:
    return outcome.outputs[0] != 0


def factors() -> tuple[str, ...]:
    from shardwright.core.rules import rule_of

    found = rule_of(sw.capture(Dropped(), (torch.ones(64, 32),)).ops[0])
    assert found is not None
    return found.factors


def test_one_seed_gives_one_mask_and_another_seed_another() -> None:
    rows, _ = factors()
    cuts = {rows: (0,)}
    assert torch.equal(mask(run(cuts)), mask(run(cuts)))
    assert not torch.equal(mask(run(cuts)), mask(run(cuts, seed=2)))


def test_devices_that_hold_the_same_block_draw_the_same_mask() -> None:
    rows, columns = factors()
    for cuts in ({}, {rows: (0,)}, {columns: (1,)}):
        assert run(cuts).replica_difference == 0.0


def test_shards_draw_distinct_masks_that_drop_as_often_as_asked() -> None:
    rows, _ = factors()
    kept = mask(run({rows: (0, 1)}))
    blocks = kept.chunk(4)
    assert not any(torch.equal(blocks[0], other) for other in blocks[1:])
    assert 0.65 < kept.double().mean().item() < 0.85


def test_kept_elements_are_scaled_as_on_one_device() -> None:
    rows, _ = factors()
    values = run({rows: (1,)}).outputs[0]
    assert set(values.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}


def test_a_simulated_step_leaves_the_random_state_of_the_process_alone() -> None:
    rows, _ = factors()
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    run({rows: (0,)})
    assert torch.equal(torch.rand(3), wanted)
