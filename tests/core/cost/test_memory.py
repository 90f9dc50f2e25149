"""Predicted memory is what PyTorch's allocator counts, and adds up as it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from benchmarks.allocations import peak_of_later_steps

import shardwright as sw
from sample_models import Model, bert, encoder, gpt2, llama, mlp, resnet
from shardwright.core.cost.memory import Memory, StageMemory, bytes_text, memory
from shardwright.core.cost.memory_bounds import memory_lower_bounds
from shardwright.core.graph.graph import Graph, WholeBatch
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES

SIZES = {"batch": 8, "sequence": 64, "width": 64, "vocabulary": 512, "layers": 2}


def of_plan(plan: sw.Plan, optimizer: str = "adamw") -> Memory:
    assert plan.graph is not None
    return memory(plan.partitioned, optimizer)


@cache
def llama_graph(layers: int, micro_batches: int = 1, dtype: str = "float32") -> Graph:
    """Of one of so many micro-batches, whose mean loss is that of the batch."""
    sizes = {**SIZES, "layers": layers, "batch": SIZES["batch"] // micro_batches}
    net, args, kwargs = llama(**sizes)
    graph = sw.capture(net, args, kwargs, None if dtype == "float32" else torch.bfloat16)
    return replace(graph, whole_batch=WholeBatch())


def measured(model: Model, plan: sw.Plan, optimizer: type[torch.optim.Optimizer]) -> int:
    """The peak of the second step on one device, in this process."""
    net, args, kwargs = model

    def prepare() -> Callable[[], None]:
        inputs = [t.clone() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        parallel = sw.parallelize(net, plan, "cpu", copy=True)
        updating = optimizer(parallel.parameters(), lr=1e-3)

        def step() -> None:
            parallel.train_step(*args, **kwargs)
            updating.step()
            updating.zero_grad()
            assert inputs

        return step

    return peak_of_later_steps(prepare)


@pytest.mark.parametrize(
    ("build", "tolerance"),
    [
        (lambda: mlp(batch=256, sizes=(64, 256, 256, 8)), 0.02),
        # Convolutions take some memory inside, which only the allocator sees.
        (lambda: resnet(batch=8, blocks=(1, 1)), 0.08),
        (lambda: encoder(batch=16, sequence=32, width=64), 0.02),
        (lambda: llama(**SIZES), 0.02),
        (lambda: gpt2(**SIZES), 0.02),
        (lambda: bert(**SIZES), 0.02),
    ],
    ids=["mlp", "resnet", "encoder", "llama", "gpt2", "bert"],
)
def test_the_prediction_is_what_the_allocator_counts(
    build: Callable[[], Model], tolerance: float
) -> None:
    net, args, kwargs = build()
    plan = sw.plan(net, args, kwargs, devices=1, mode="stand_alone")
    found = measured((net, args, kwargs), plan, torch.optim.AdamW)
    assert of_plan(plan).peak == pytest.approx(found, rel=tolerance)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_are_predicted_too(micro_batches: int, dtype: str | None) -> None:
    net, args, kwargs = llama(**SIZES)
    options = {"micro_batches": micro_batches, "compute_dtype": dtype}
    plan = sw.plan(net, args, kwargs, devices=1, mode="stand_alone", **options)
    found = measured((net, args, kwargs), plan, torch.optim.SGD)
    assert of_plan(plan, "sgd").peak == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_holds_one_cast_of_its_parameters(schedule: str) -> None:
    staged = {"stages": 2, "micro_batches": 8, "schedule": schedule}
    plan = sw.plan(llama_graph(2, 8, "bfloat16"), devices=2, **staged)
    for stage in of_plan(plan, "sgd").stages:
        assert stage.gathered == stage.parameters // 2


@pytest.mark.parametrize(("devices", "mode"), [(1, "stand_alone"), (2, "data_parallel")])
def test_gradients_of_casts_are_added_up_one_by_one(devices: int, mode: str) -> None:
    net, args, kwargs = mlp(batch=16, sizes=(64,) * 9)
    options = {"micro_batches": 4, "compute_dtype": "bfloat16"}
    plan = sw.plan(net, args, kwargs, devices=devices, mode=mode, **options)
    (stage,) = of_plan(plan, "sgd").stages
    held = stage.parameters + stage.gradients + stage.gathered + stage.inputs
    passes = [size for name, size in stage.curve if name.startswith("backward")]
    assert len(passes) == 4
    assert held < max(passes) < held + stage.gradients // 4


def test_recomputed_layers_are_predicted_too() -> None:
    net, args, kwargs = llama(**SIZES)
    whole = of_plan(sw.plan(net, args, kwargs, devices=1, mode="stand_alone")).peak
    sw.recompute(net.model.layers)
    plan = sw.plan(net, args, kwargs, devices=1, mode="stand_alone")
    found = measured((net, args, kwargs), plan, torch.optim.AdamW)
    assert of_plan(plan).peak == pytest.approx(found, rel=0.02)
    assert of_plan(plan).peak < 0.7 * whole


@pytest.fixture(scope="module")
def graph() -> Graph:
    return llama_graph(SIZES["layers"])


def test_a_cut_batch_cuts_activations_and_not_parameters(graph: Graph) -> None:
    one, four = (
        of_plan(sw.plan(graph, devices=n, mode=mode)).stages[0]
        for n, mode in ((1, "stand_alone"), (4, "data_parallel"))
    )
    assert four.parameters == one.parameters
    assert four.activations == pytest.approx(one.activations / 4, rel=0.01)


def test_each_level_of_optimizer_parallel_needs_less(graph: Graph) -> None:
    peaks, stored = [], []
    for level in (None, "level1", "level2", "level3"):
        hsdp = None if level is None else OptimizerParallel(level, threshold=0)
        plan = sw.plan(graph, devices=4, mode="data_parallel", hsdp=hsdp, bucket_mb=0.1)
        # Shapes of the graph are those of one of its micro-batches.
        plan = replace(plan, pipeline=PipelineSpec(micro_batches=2))
        found = of_plan(plan).stages[0]
        peaks.append(found.peak)
        stored.append(found.parameters + found.optimizer)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    assert stored[1] == stored[2] == stored[3] < 0.3 * stored[0]


def test_gpipe_keeps_more_than_1f1b_and_the_first_stage_more_than_the_last() -> None:
    graph, found = llama_graph(4, micro_batches=8), {}
    for schedule in ("gpipe", "1f1b"):
        plan = sw.plan(
            graph,
            devices=2,
            mode="stand_alone",
            stages=2,
            micro_batches=8,
            schedule=schedule,
        )
        found[schedule] = of_plan(plan).stages
    assert found["gpipe"][0].activations > 3 * found["1f1b"][0].activations
    assert found["1f1b"][0].activations > 1.5 * found["1f1b"][1].activations


def test_received_tensors_do_not_grow_with_the_number_of_micro_batches() -> None:
    few, many = (
        of_plan(sw.plan(llama_graph(4, 8), devices=2, stages=2, micro_batches=n)) for n in (4, 8)
    )
    for stage, longer in zip(few.stages, many.stages, strict=True):
        assert longer.peak - stage.peak == longer.inputs - stage.inputs


def test_one_stage_can_be_asked_for(graph: Graph) -> None:
    plan = sw.plan(graph, devices=2, mode="stand_alone", stages=2, micro_batches=2)
    every = of_plan(plan)
    one = memory(plan.partitioned, stages={1})
    assert one.stages == every.stages[1:] and one.optimizer == every.optimizer


def test_a_model_without_a_loss_is_predicted_from_its_outputs() -> None:
    net = torch.nn.Linear(64, 32, bias=False)
    found = of_plan(sw.plan(net, (torch.zeros(16, 64),), devices=1, mode="stand_alone"), "sgd")
    (stage,) = found.stages
    assert (stage.parameters, stage.inputs) == (64 * 32 * 4, 16 * 64 * 4)
    # Output, its gradient, and that of the weight.
    assert found.peak == stage.parameters + stage.inputs + 2 * 16 * 32 * 4 + 64 * 32 * 4


def test_so_is_the_last_stage_of_a_model_without_a_loss() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    plan = sw.plan(net, (torch.zeros(16, 64),), devices=2, stages=2, micro_batches=4)
    first, last = of_plan(plan, "sgd").stages
    assert first.parameters == last.parameters == 64 * 64 * 4
    assert first.gradients == last.gradients == 64 * 64 * 4


def test_the_table_shows_every_stage_and_sizes_in_binary_units() -> None:
    stage = StageMemory(0, 1024, 2048, 0, 0, 3 * 2**20, 5, 0, "backward of micro-batch 0")
    found = Memory((stage, replace(stage, stage=1, temporary=2**30)), "adamw")
    assert found.peak == 1024 + 2048 + 3 * 2**20 + 5 + 2**30
    text = str(found)
    for part in ("with adamw", "1.0 KiB", "2.0 KiB", "3.0 MiB", "1.0 GiB", "micro-batch 0"):
        assert part in text
    assert bytes_text(1536) == "1.5 KiB"


def test_the_largest_tensors_at_the_peak_have_the_names_of_operators() -> None:
    nn = torch.nn
    net = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 16), nn.Tanh())
    batch = torch.empty(1024, 16), torch.empty(1024, 16)
    loss = sw.WithLoss(net, nn.MSELoss())
    plan = sw.plan(loss, batch, devices=2, mode="data_parallel")
    (stage,) = of_plan(plan, "sgd").stages
    assert stage.moment == "backward of micro-batch 0"
    # Each device has 512 of the rows; what Tanh returns is kept, what it reads is not.
    assert stage.largest[0] == ("net.1", "activations", 4 * 512 * 512)
    assert {name for name, *_ in stage.largest} <= {row.name for row in plan.operators}
    assert max(size for _, size in stage.curve) == stage.peak
    kinds = [name.split()[0] for name, _ in stage.curve]
    assert kinds == ["begin", "forward", "backward", "end", "optimizer"]


@pytest.mark.parametrize("level", [None, "level1", "level2", "level3"])
@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [*((each, "float32") for each in (None, *SCHEDULES)), ("1f1b", "bfloat16")],
)
def test_no_plan_needs_less_than_the_bound_that_takes_no_dry_run(
    schedule: str | None, level: str | None, dtype: str
) -> None:
    hsdp = None if level is None else OptimizerParallel(level, threshold=0)
    staged = {} if schedule is None else {"schedule": schedule, "stages": 2, "micro_batches": 4}
    graph = llama_graph(4, 1 if schedule is None else 4, dtype)
    for mode, entries in (
        ("data_parallel", "data_parallel"),
        ("recursive_programming", "full_batch"),
    ):
        options = {"mode": mode, "hsdp": hsdp, "dataset_strategy": entries, **staged}
        plan = sw.plan(graph, devices=4, **options)
        assert plan.graph is not None
        parts = Partitioned(plan.graph, plan.mesh, plan.decisions, plan.pipeline)
        bounds = zip(
            memory_lower_bounds(parts, "adamw"), memory(parts, "adamw").stages, strict=True
        )
        for least, stage in bounds:
            assert stage.parameters + stage.optimizer < least <= stage.peak


@pytest.mark.parametrize("level", ["level1", "level2"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_bound_counts_what_a_single_micro_batch_gathers_for_its_backward_pass(
    level: str, is_recomputed: bool
) -> None:
    net, args, kwargs = llama(**SIZES)
    for layer in net.get_submodule("model.layers").children() if is_recomputed else ():
        sw.recompute(layer)
    hsdp = OptimizerParallel(level, threshold=0)
    plan = sw.plan(net, args, kwargs, devices=4, mode="data_parallel", hsdp=hsdp)
    (least,), (stage,) = memory_lower_bounds(plan.partitioned, "adamw"), of_plan(plan).stages
    weights = [m.weight.nbytes for m in net.modules() if isinstance(m, torch.nn.Linear)]
    assert stage.parameters + stage.optimizer + sum(weights) < least <= stage.peak
