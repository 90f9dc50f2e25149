"""Plans under a memory limit: what is changed, in which order, and what is said if nothing fits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import Stack
from shardwright.core.cost.memory_bounds import memory_lower_bounds
from shardwright.core.partition.decisions import ZERO_LEVELS
from shardwright.core.planner import candidate
from shardwright.core.planner.candidate import Candidate
from shardwright.core.search.recompute import search
from shardwright.core.search.recompute.search import RecomputeSearch
from shardwright.errors import MemoryLimitError, PlanInterrupted
from shardwright.models import Dimensions, build

ARGS = (torch.randn(512, 128),)
GRAPH = sw.capture(Stack(), ARGS)


def plan(**options: Any) -> sw.Plan:
    return sw.plan(GRAPH, **{"devices": 4, "mode": "data_parallel", **options})


def test_a_plan_that_fits_is_not_changed() -> None:
    free = plan()
    assert plan(memory_limit=free.memory.peak).dump() == free.dump()


def test_storage_is_sharded_first_then_operators_are_computed_again() -> None:
    peaks = [plan(hsdp=hsdp).memory.peak for hsdp in (None, True, {"level": "level3"})]
    first = plan(memory_limit=peaks[1])
    assert first.sharding is not None and first.sharding.level == "level1"
    assert not first.recompute
    second = plan(memory_limit=min(peaks) - 1)
    assert second.sharding is not None and second.sharding.level == "level3"
    assert second.recompute and second.memory.peak < min(peaks)


def test_recompute_auto_computes_again_before_anything_else() -> None:
    free = plan(devices=1)
    limit = free.memory.peak - 400_000
    fitted = plan(devices=1, memory_limit=limit, recompute="auto")
    assert fitted.recompute and fitted.memory.peak <= limit
    assert plan(memory_limit="1 TB", recompute="auto").recompute == {}


def test_on_a_cluster_the_fastest_that_fits_is_taken() -> None:
    options = {"mode": "recursive_programming", "cluster": "ascend910b"}
    others = [
        plan(**options, hsdp=hsdp, mem_coeff=mem_coeff)
        for hsdp in (None, *({"level": level} for level in ZERO_LEVELS))
        for mem_coeff in (0.1, 6.4, 51.2)
    ]
    limit = sorted(other.memory.peak for other in others)[len(others) // 2]
    found = plan(**options, memory_limit=limit)
    assert found.memory.peak <= limit < others[0].memory.peak
    fitting = [other.step_time for other in others if other.memory.peak <= limit]
    assert found.step_time is not None
    assert all(other is not None and found.step_time <= 1.011 * other for other in fitting)


def test_model_parallel_and_stages_follow() -> None:
    """One layer's parameters and optimizer state are more than a device has."""
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)), Mean())
    graph = sw.capture(net, (torch.randn(8, 256),))
    alone = sw.plan(graph, devices=2, mode="stand_alone", micro_batches=2)
    fitted = sw.plan(
        graph,
        devices=2,
        mode="stand_alone",
        micro_batches=2,
        hsdp={"level": "level3", "shard_size": 1},
        memory_limit=int(0.7 * alone.memory.peak),
    )
    assert fitted.pipeline.stages == 2
    larger = sw.plan(
        graph,
        devices=2,
        mem_coeff=1e-3,
        hsdp={"level": "level3", "shard_size": 1},
        memory_limit=int(0.7 * alone.memory.peak),
    )
    assert larger.options["mem_coeff"] > 1e-3 and larger.pipeline.stages == 1


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_if_nothing_fits_the_smallest_limit_that_works_is_said() -> None:
    with pytest.raises(sw.MemoryLimitError, match=r"fits into memory_limit=1.0 KiB") as error:
        plan(memory_limit="1KiB")
    needed = error.value.needed
    assert f"{needed:,} bytes" in str(error.value)
    assert re.search(r"with hsdp level3, recompute.*: parameters", str(error.value))
    assert plan(memory_limit=needed).memory.peak == needed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": "much"}, "memory_limit='much': must be a number of bytes, or a text"),
        ({"memory_limit": 0}, "memory_limit=0: must be a number of bytes"),
        ({"recompute": "all"}, "recompute='all': must be None or 'auto'"),
        (
            {"recompute": "auto"},
            "set memory_limit, for example memory_limit='24GiB', or name a cluster",
        ),
    ],
)
def test_what_is_no_limit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sw.StrategyError, match=re.escape(message)):
        plan(**options)


@pytest.mark.slow
def test_it_is_never_slower_than_sharded_data_parallel_nor_with_more_memory() -> None:
    """Layers of Llama-3 8B, with no and with full recomputation, at every level of sharding."""
    sizes = Dimensions(
        family="llama",
        hidden_size=4096,
        num_layers=2,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        seq_length=8192,
        norm_eps=1e-5,
    )
    ids = torch.empty(8, 8192, dtype=torch.long, device="meta")
    options: dict[str, Any] = {"devices": 8, "cluster": "h100", "compute_dtype": "bfloat16"}
    by_hand = []
    for full in (False, True):
        with torch.device("meta"):
            net = build(sizes)
        for layer in net.model.layers if full else ():
            sw.recompute(layer)
        graph = sw.capture(net, (ids, ids), compute_dtype=torch.bfloat16)
        for level in ZERO_LEVELS:
            by_hand.append(sw.plan(graph, **options, mode="data_parallel", hsdp={"level": level}))
    with torch.device("meta"):
        graph = sw.capture(build(sizes), (ids, ids), compute_dtype=torch.bfloat16)
    slowest = 0.0
    for limit in sorted({each.memory.peak for each in by_hand}, reverse=True):
        fitted = sw.plan(graph, **options, memory_limit=limit)
        assert fitted.step_time is not None and fitted.memory.peak <= limit
        textbook = [each.step_time or 0.0 for each in by_hand if each.memory.peak <= limit]
        assert fitted.step_time <= 1.01 * min(textbook)
        assert fitted.step_time >= 0.99 * slowest, "less memory is never faster"
        slowest = max(slowest, fitted.step_time)


@pytest.mark.parametrize("micro_batches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_any_limit_down_to_the_smallest_has_a_plan_and_less_is_never_faster(
    micro_batches: int,
) -> None:
    options: dict[str, Any] = {"mode": "recursive_programming", "cluster": "ascend910b"}
    options |= {"micro_batches": micro_batches, "stages": "auto"}
    free = plan(**options)
    with pytest.raises(sw.MemoryLimitError) as error:
        plan(**options, memory_limit=1)
    least = error.value.needed
    assert least < free.memory.peak
    fastest = 0.0
    for share in (1.0, 0.6, 0.2, 0.0):
        limit = int(least + share * (free.memory.peak - least))
        fitted = plan(**options, memory_limit=limit)
        assert fitted.step_time is not None and fitted.memory.peak <= limit
        assert fitted.step_time >= fastest
        fastest = fitted.step_time
    with pytest.raises(sw.MemoryLimitError, match=f"the smallest one needs .* \\({least:,} bytes"):
        plan(**options, memory_limit=least - 1)


def test_no_way_of_a_textbook_that_fits_is_faster() -> None:
    """Sharded data parallel with no, selective and full recomputation."""
    options: dict[str, Any] = {"cluster": "ascend910b", "micro_batches": 4}
    by_hand = []
    for recomputed in ("", "gelu", "all"):
        net = Stack()
        for layer in net.layers:
            if recomputed:
                sw.recompute(layer if recomputed == "all" else layer[1])
        graph = sw.capture(net, ARGS)
        for level in ZERO_LEVELS:
            by_hand.append(
                sw.plan(graph, devices=4, mode="data_parallel", hsdp={"level": level}, **options)
            )
    for limit in sorted({each.memory.peak for each in by_hand}):
        fitted = plan(**options, mode="recursive_programming", memory_limit=limit)
        fitting = [each.step_time for each in by_hand if each.memory.peak <= limit]
        assert fitted.step_time is not None and fitted.memory.peak <= limit
        assert all(each is not None and fitted.step_time <= 1.001 * each for each in fitting)


def test_whole_layers_are_recomputed_where_the_loss_over_a_vocabulary_needs_most() -> None:
    """Smaller blocks would need less while they are recomputed, and keep more during the loss."""
    sizes = Dimensions(
        family="llama",
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=192,
        vocab_size=2048,
        seq_length=512,
        norm_eps=1e-5,
    )
    ids = torch.empty(4, 512, dtype=torch.long, device="meta")
    with torch.device("meta"):
        net, marked = build(sizes), build(sizes)
    for layer in marked.model.layers:
        sw.recompute(layer)
    options: dict[str, Any] = {"devices": 4, "mode": "data_parallel", "hsdp": {"level": "level3"}}
    by_hand = sw.plan(sw.capture(marked, (ids, ids)), **options)
    graph = sw.capture(net, (ids, ids))
    fitted = sw.plan(graph, **options, memory_limit=by_hand.memory.peak)
    assert fitted.memory.peak <= by_hand.memory.peak < sw.plan(graph, **options).memory.peak


@pytest.mark.parametrize(
    ("cluster", "stages", "hsdp", "shape"),
    [
        ("h100", 1, None, (8, 256)),
        ("h100", 1, {"level": "level3"}, (8, 256)),
        ("ascend910b", 2, {"level": "level3"}, (16, 128)),
    ],
)
def test_stages_by_hand_with_all_layers_recomputed_are_never_faster(
    cluster: str, stages: int, hsdp: dict[str, str] | None, shape: tuple[int, int]
) -> None:
    """With four stages of two layers the best blocks are whole stages; with fewer they are
    layers."""
    sizes = Dimensions(
        family="llama",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=128,
        vocab_size=320,
        seq_length=shape[1],
        norm_eps=1e-5,
    )
    ids = torch.empty(shape, dtype=torch.long, device="meta")
    with torch.device("meta"):
        net, marked = build(sizes), build(sizes)
    for layer in marked.model.layers:
        sw.recompute(layer)
    options: dict[str, Any] = {"devices": 8, "cluster": cluster, "micro_batches": 4}
    said = {"mode": "data_parallel", "stages": stages, "hsdp": hsdp}
    by_hand = sw.plan(sw.capture(marked, (ids, ids)), **said, **options)
    graph = sw.capture(net, (ids, ids))
    fitted = sw.plan(graph, stages="auto", memory_limit=by_hand.memory.peak, **options)
    assert fitted.memory.peak <= by_hand.memory.peak
    assert fitted.step_time is not None and by_hand.step_time is not None
    assert fitted.step_time <= by_hand.step_time


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5])
def test_estimates_that_are_wrong_about_what_can_fit_change_nothing(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    options: dict[str, Any] = {"mode": "recursive_programming", "cluster": "ascend910b"}
    limit = int(share * plan(**options).memory.peak)

    def planned(sure: float) -> tuple[float | None, int]:
        monkeypatch.setattr(search, "MAX_PEAK_RATIO", sure)
        try:
            found = plan(**options, memory_limit=limit)
        except MemoryLimitError as error:
            return None, error.needed
        return found.step_time, found.memory.peak

    # All that may fit is believed to, or nothing is.
    assert planned(0.0) == planned(float("inf"))


def test_only_what_may_fit_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"mode": "recursive_programming", "cluster": "ascend910b"}
    aligned: list[Candidate] = []
    monkeypatch.setattr(candidate, "MAX_PARAMETER_AXES", 0)
    monkeypatch.setattr(candidate, "_align_candidate", lambda one: aligned.append(one) or one)
    with pytest.raises(MemoryLimitError) as error:
        plan(**options, memory_limit=1)
    assert aligned, "what needs least is, before it is measured"
    aligned.clear()
    limit = error.value.needed
    assert plan(**options, memory_limit=limit).memory.peak <= limit
    floors = [max(memory_lower_bounds(one.partitioned, "adamw")) for one in aligned]
    assert floors and max(floors) <= limit < max(memory_lower_bounds(plan().partitioned, "adamw"))


def test_what_is_known_to_fit_is_offered_when_the_search_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"mode": "recursive_programming", "cluster": "ascend910b"}
    limit = int(0.4 * plan(**options).memory.peak)
    found = plan(**options, memory_limit=limit)
    assert found.recompute

    def stopped(self: RecomputeSearch) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RecomputeSearch, "run", stopped)
    with pytest.raises(PlanInterrupted) as interrupted:
        plan(**options, memory_limit=limit)
    known = interrupted.value.plan()
    assert known.memory.peak <= limit
    assert found.step_time is not None and known.step_time >= found.step_time
