"""One search tells the overhead of sharding of all options that cut a batch into as many parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.constraints.shard import Pins
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.planner.candidate import Candidate, candidates
from shardwright.core.planner.captured_model import CapturedModel
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.recompute_bound import RecomputeOptions
from shardwright.core.planner.sharding_overhead import ShardingOverheads
from shardwright.core.planner.step_bound import ShardingOverhead, StepBounds
from shardwright.errors import StrategyError

BATCH = 8


class Residual(nn.Module):
    """Layers whose matrix products must be sharded where there are fewer samples than devices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def make_options(stages: int, micro_batches: int) -> PlanOptions:
    return PlanOptions(
        devices=8,
        cluster="h100",
        stages=stages,
        micro_batches=micro_batches,
        hsdp=OptimizerParallel(),
        memory_limit="60GB",
    )


with torch.device("meta"):
    MODELS = {
        count: CapturedModel(
            sw.capture(Residual(), (torch.empty(BATCH // count, 2048),)), Pins({}, {}), (), True
        )
        for count in (1, 2, 4, 8)
    }


class CountedSearch:
    """`candidates` that records the options of each search."""

    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.fails, self.searched = fails, list[PlanOptions]()

    def __call__(self, options: PlanOptions) -> Sequence[Candidate]:
        if options.stages in self.fails:
            raise StrategyError(f"stages={options.stages}: cannot be divided\nuse fewer")
        self.searched.append(options)
        return candidates(MODELS[options.num_micro_batches], options)


def make_overheads(all_options: Sequence[PlanOptions], search: CountedSearch) -> ShardingOverheads:
    bounds = StepBounds(
        {count: model.graph for count, model in MODELS.items()},
        lambda: RecomputeOptions.of(MODELS[1].graph, {}),
    )
    return ShardingOverheads(all_options, search, bounds)


# As many parts of a batch of 8 as there are samples, and four times as many.
WHOLE_SAMPLES = [make_options(1, 1), make_options(2, 2), make_options(4, 4)]
PARTS_OF_SAMPLES = [make_options(1, 4), make_options(2, 8)]


def test_options_with_as_many_parts_share_one_search_on_the_fewest_devices() -> None:
    search = CountedSearch()
    overheads = make_overheads(WHOLE_SAMPLES, search)
    assert len({overheads.of(options) for options in WHOLE_SAMPLES}) == 1
    assert [options.stages for options in search.searched] == [4]


def test_parts_of_samples_have_more_overhead_than_whole_samples() -> None:
    overheads = make_overheads([*WHOLE_SAMPLES, *PARTS_OF_SAMPLES], CountedSearch())
    whole, part = overheads.of(WHOLE_SAMPLES[0]), overheads.of(PARTS_OF_SAMPLES[0])
    # Both add the gradients of micro-batches, but only parts of samples communicate.
    assert whole.seconds + 0.03 < part.seconds
    assert whole.saved_bytes < 1.02 and part.saved_bytes > 1.2


def test_a_search_that_fails_is_replaced_by_that_of_more_devices() -> None:
    search = CountedSearch(fails=[4])
    overheads = make_overheads(WHOLE_SAMPLES, search)
    assert overheads.of(WHOLE_SAMPLES[0]).seconds >= 1.0
    assert [options.stages for options in search.searched] == [2]
    nothing = make_overheads(WHOLE_SAMPLES, CountedSearch(fails=[1, 2, 4]))
    assert nothing.of(WHOLE_SAMPLES[0]) == ShardingOverhead()


def test_options_that_no_others_equal_are_not_searched_for_an_overhead() -> None:
    search = CountedSearch()
    alone = make_options(1, 8)
    schedules = [alone, replace(alone, schedule="gpipe")]
    assert make_overheads([*WHOLE_SAMPLES, *schedules], search).of(alone) == ShardingOverhead()
    assert not search.searched


def test_no_candidate_has_less_overhead_than_the_minimum() -> None:
    overheads = make_overheads(PARTS_OF_SAMPLES, CountedSearch())
    least = overheads.of(PARTS_OF_SAMPLES[0])
    for options in PARTS_OF_SAMPLES:
        for candidate in candidates(MODELS[options.num_micro_batches], options):
            overhead = overheads.of_candidate(candidate)
            assert overhead.seconds >= 0.97 * least.seconds
            assert overhead.saved_bytes >= 0.97 * least.saved_bytes
