"""What `test_pipeline_execution.py` runs on each of four or eight ranks: real stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from core.parallel.pipeline_models import (
    Alternating,
    Dropping,
    EarlyLoss,
    FrozenStart,
    MixedCrossing,
    Orphans,
    Tied,
    Twice,
    batch,
)
from core.parallel.test_simulate_pipeline import staged_plan, trained_net
from sample_models import llama
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.partition.schedules import SCHEDULES as SCHEDULE_SPECS
from shardwright.core.partition.schedules import ScheduleSpec
from shardwright.core.plan import make_plan
from shardwright.core.runtime.micro_batches import num_micro_batches_of_call
from shardwright.core.torch_internals.pipelining import OWN_SCHEDULES, TorchAction
from torchrun import run_checks

SCHEDULES = (
    (2, "1f1b"),
    (4, "gpipe"),
    (4, "1f1b"),
    (2, "interleaved_1f1b"),
    (2, "zero_bubble_v"),
    (4, "zero_bubble_v"),
    (2, "interleaved_zero_bubble"),
    (2, "dualpipe_v"),
    (2, "looped_bfs"),
)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def built(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model in double precision, twice."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(make().double())
    return nets[0], nets[1]


def loss_of(net: nn.Module, args: Any, kwargs: Any) -> Tensor:
    output = net(*args, **kwargs)
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.loss


def reference_step(net: nn.Module, args: Any, kwargs: Any, pieces: int) -> Tensor:
    """One device's step: the sum of the losses of equal pieces of the batch."""
    losses = []
    batches = zip(*(x.chunk(pieces) for x in args), strict=True) if args else [()]
    for piece in batches:
        losses.append(loss_of(net, piece, kwargs))
        losses[-1].backward()
    return torch.stack(losses).sum().detach()


def summed_pieces(plan: sw.Plan) -> int:
    return 1 if plan.pipeline.averages_micro_batches else plan.pipeline.micro_batches


def check_training(
    nets: tuple[nn.Module, nn.Module],
    plan: sw.Plan,
    args: Any,
    kwargs: Any | None = None,
    near: float = 1e-9,
) -> ParallelModule:
    """Losses, norms, final parameters and buffers of five steps."""
    kwargs = kwargs or {}
    net, other = nets
    parallel = sw.parallelize(net, plan, copy=True)
    assert isinstance(parallel, ParallelModule)
    # Random stages may have no parameters, of which there is no optimizer.
    own = [*parallel.parameters()] or [nn.Parameter(torch.zeros(1))]
    mine = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    its = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        loss = parallel.train_step(*args, **kwargs)
        wanted = reference_step(other, args, kwargs, summed_pieces(plan))
        torch.testing.assert_close(loss, wanted, rtol=near, atol=near)
        norm = parallel.clip_grad_norm_(0.5)
        wanted = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        torch.testing.assert_close(norm, wanted, rtol=near, atol=near)
        for optimizer in (mine, its):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in parallel.named_parameters():
        expected = other.get_parameter(name)
        torch.testing.assert_close(whole(parameter), expected, rtol=10 * near, atol=10 * near)
    for name, buffer in parallel.named_buffers():
        torch.testing.assert_close(buffer, other.get_buffer(name), rtol=10 * near, atol=10 * near)
    return parallel


def planned(net: nn.Module, args: Any, stages: int, schedule: str, **options: Any) -> sw.Plan:
    options = {"devices": dist.get_world_size(), "mem_coeff": 10.0, **options}
    batch_norm = any(isinstance(m, nn.BatchNorm1d) for m in net.modules())
    number, config = options.pop("micro_batches", 4), options.pop("stage_config", None)
    reduction = "sum" if batch_norm else "mean"
    pipeline = sw.Pipeline(net, number, config, loss_reduction=reduction)
    return sw.plan(pipeline, args, stages=stages, schedule=schedule, **options)


def check_schedules(schedules: Sequence[tuple[int, str]] = SCHEDULES[:1]) -> None:
    for number, (stages, schedule) in enumerate(schedules):
        nets, args = built(partial(Tied, batch_norm=number % 2 == 0)), batch()
        plan = planned(nets[0], args, stages, schedule)
        parallel = check_training(nets, plan, args)
        held = {name for name, _ in parallel.named_parameters()}
        every: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(every, held)
        assert set.union(*every) == {name for name, _ in nets[0].named_parameters()}
        assert all(len(names) < len(set.union(*every)) for names in every), every


def check_every_schedule() -> None:
    check_schedules(SCHEDULES[1:])


class VBreadthFirst(ScheduleZBVZeroBubble):
    """The schedule that CONTRIBUTING.md adds."""

    def _calculate_single_rank_operations(self, rank: int) -> list[TorchAction | None]:
        chunks, pieces = (rank, self.num_stages - 1 - rank), range(self._n_microbatches)
        forward = [TorchAction.from_str(f"{c}F{m}") for c in chunks for m in pieces]
        backward = [TorchAction.from_str(f"{c}B{m}") for c in chunks[::-1] for m in pieces]
        return [*forward, *backward]


def check_a_schedule_of_ones_own() -> None:
    spec = ScheduleSpec("v_bfs", "VBreadthFirst", min_chunks=2, max_chunks=2, v_shaped=True)
    own = patch.dict(OWN_SCHEDULES, VBreadthFirst=VBreadthFirst)
    with own, patch.dict(SCHEDULE_SPECS, v_bfs=spec):
        nets, args = built(Tied), batch()
        plan = planned(nets[0], args, 2, "zero_bubble_v")
        pipeline = replace(plan.pipeline, schedule="v_bfs")
        partitioned = replace(plan.partitioned, pipeline=pipeline)
        plan = make_plan(partitioned, mode="own", options={}, search_seconds=0.0, training=True)
        check_training(nets, plan, args)


def check_parameters_in_unusual_places() -> None:
    for make in (Orphans, FrozenStart, Twice):
        for schedule in (
            "zero_bubble_v",
            "dualpipe_v",
            "interleaved_1f1b",
            "interleaved_zero_bubble",
        ):
            nets, args = built(make), batch()
            names = ["one", "two", "three", "last"]
            turn = [0, 1, 1, 0] if schedule in ("zero_bubble_v", "dualpipe_v") else [0, 1, 0, 1]
            config = {**dict(zip(names, turn, strict=True)), "table": 0, "mid": 1, "norm": 1}
            config = {name: s for name, s in config.items() if hasattr(nets[0], name)}
            plan = planned(nets[0], args, 1, schedule, stage_config=config)
            check_training(nets, plan, args)


def check_submodules_that_alternate() -> None:
    nets, args = built(Alternating), batch()
    check_training(nets, planned(nets[0], args, 2, "1f1b"), args)


def check_a_loss_before_the_last_stage() -> None:
    nets, args = built(EarlyLoss), batch()
    plan = planned(nets[0], args, 1, "1f1b", stage_config={"one": 0, "two": 0, "three": 1})
    parallel = check_training(nets, plan, args)
    with torch.no_grad():
        for mine, its in zip(parallel(*args), nets[1](*args), strict=True):
            torch.testing.assert_close(mine, its)


def check_bfloat16(schedules: Sequence[tuple[int, str]] = SCHEDULES[:1]) -> None:
    """Computed in bfloat16, close to float32."""
    for stages, schedule in schedules:
        nets = tuple(net.float() for net in built(FrozenStart))
        plan = planned(nets[0], batch(), stages, schedule, compute_dtype="bfloat16")
        check_training((nets[0], nets[1]), plan, batch(), near=3e-2)


def check_bfloat16_in_every_schedule() -> None:
    check_bfloat16(SCHEDULES[1:])


def check_own_parts_of_the_batch() -> None:
    """Each device of a stage passes a local batch, and gets the outputs of its samples."""
    nets, args = built(EarlyLoss), batch(16)
    config = {"one": 0, "two": 0, "three": 1}
    own = {"dataset_strategy": "data_parallel", "micro_batches": 2, "stage_config": config}
    parallel = sw.parallelize(nets[0], planned(nets[0], args, 1, "1f1b", **own), copy=True)
    of_stage = dist.get_world_size() // 2
    mine = [x.chunk(of_stage)[dist.get_rank() % of_stage] for x in args]
    loss = parallel.train_step(*mine)
    wanted = loss_of(nets[1], args, {})
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for name, parameter in parallel.named_parameters():
        gradient = nets[1].get_parameter(name).grad
        if gradient is not None:
            torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        for got, expected in zip(parallel(*mine), nets[1](*args), strict=True):
            own_samples = (
                expected.chunk(of_stage)[dist.get_rank() % of_stage] if expected.ndim else expected
            )
            torch.testing.assert_close(got, own_samples)


def check_random_models() -> None:
    for seed in (1, 2):
        nets = []
        for _ in range(2):
            net, args = trained_net(seed)
            nets.append(net.double())
        args = tuple(x.double() for x in args)
        graph = sw.capture(nets[0], tuple(x[:1] for x in args))
        stages = staged_plan(graph, 1, seed).pipeline.stages
        plan = staged_plan(graph, 8 // stages, seed)
        check_training((nets[0], nets[1]), plan, args)


def check_only_what_is_planned_is_sent() -> None:
    """Stages send back gradients of trained values only, not of integers or frozen ones."""
    names = ["frozen", "one", "two", "three", "last"]
    for schedule, turn in (
        ("1f1b", [0, 0, 1, 1, 1]),
        ("interleaved_zero_bubble", [0, 0, 1, 0, 1]),
        ("dualpipe_v", [0, 0, 1, 1, 0]),
        ("looped_bfs", [0, 0, 1, 0, 1]),
    ):
        nets, args = built(MixedCrossing), batch()
        config = dict(zip(names, turn, strict=True))
        plan = planned(nets[0], args, 1, schedule, stage_config=config)
        parallel = check_training(nets, plan, args)
        assert any(0 < row.backward_bytes < row.forward_bytes for row in plan.crossings), plan
        with patch.object(dist, "P2POp", wraps=dist.P2POp) as messages:
            parallel.train_step(*args)
        operations = [call.args for call in messages.call_args_list]
        sent = [tensor.nbytes for kind, tensor, *_ in operations if kind is dist.isend]
        stage = parallel.execution.devices.stage
        wanted = sum(row.forward_bytes for row in plan.crossings if row.stage == stage)
        wanted += sum(row.backward_bytes for row in plan.crossings if row.to_stage == stage)
        assert sum(sent) == wanted * plan.pipeline.micro_batches, (schedule, sent, plan.crossings)


def check_language_model() -> None:
    """With names of stages, and the loss summed. It computes in single precision inside."""
    nets = [llama(layers=4)[0].double() for _ in range(2)]
    _, args, kwargs = llama(layers=4)
    config = {
        "model.embed_tokens": 0,
        **{f"model.layers.{i}": i // 2 for i in range(4)},
        "model.norm": 1,
        "lm_head": 1,
    }
    pipeline = sw.Pipeline(nets[0], 2, config, loss_reduction="sum")
    devices = dist.get_world_size()
    plan = sw.plan(pipeline, args, kwargs, devices=devices)
    loss = sw.parallelize(pipeline, plan, copy=True).train_step(*args, **kwargs)
    torch.testing.assert_close(loss, 2 * nets[1](*args, **kwargs).loss, rtol=1e-6, atol=1e-6)
    plan = sw.plan(nets[0], args, kwargs, devices=devices, micro_batches=2, stage_config=config)
    check_training((nets[0], nets[1]), plan, args, kwargs, near=1e-5)


def check_outputs_reach_every_rank() -> None:
    for number, (stages, schedule) in enumerate(SCHEDULES[2:]):
        nets, args = built(partial(Tied, batch_norm=number % 2 == 0)), batch()
        plan = planned(nets[0], args, stages, schedule)
        parallel = sw.parallelize(nets[0], plan, copy=True)
        parallel.train_step(*args)
        reference_step(nets[1], args, {}, summed_pieces(plan))
        for net in (parallel, nets[1]):
            net.eval()
        for rows in (8, 6, 5):
            with torch.no_grad():
                loss, logits = parallel(*batch(rows))
                _, wanted = nets[1](*batch(rows))
                summed = 1
                if not plan.pipeline.averages_micro_batches:
                    summed = num_micro_batches_of_call(batch(rows), plan.pipeline)
                pieces = zip(*(x.chunk(summed) for x in batch(rows)), strict=True)
                losses = [loss_of(nets[1], piece, {}) for piece in pieces]
            torch.testing.assert_close(loss, torch.stack(losses).sum())
            torch.testing.assert_close(logits, wanted)
        for net in (parallel, nets[1]):
            net.train()
        smaller = batch(6)
        loss = parallel.train_step(*smaller)
        pieces = 1 if plan.pipeline.averages_micro_batches else 3
        torch.testing.assert_close(loss, reference_step(nets[1], smaller, {}, pieces))


class Returning(nn.Module):
    """Returns values of samples, of the batch, and of all inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden)
        right = logits.argmax(1) == y
        return {
            "loss": F.cross_entropy(logits, y),
            "logits": logits,
            "mean": logits.mean(0),
            "hidden": hidden.sum(0),
            "accuracy": right.double().mean(),
            "right": right.sum(),
            "valid": (y > 1).sum(),
            "spread of inputs": x.std(),
            "positions": torch.arange(len(x)),
            "reversed": x.flip(0),
            # Dtypes that gloo does not know.
            "codes": (9 * logits.detach()).to(torch.int16),
            "octets": hidden.detach().to(torch.float8_e5m2),
            "spread": logits.std(),
        }


def check_outputs_are_those_of_the_batch() -> None:
    nets = built(Returning)
    args = (torch.randn(8, 8, dtype=torch.float64), torch.arange(8) % 5)
    parallel = sw.parallelize(nets[0], planned(nets[0], args, 2, "1f1b"), copy=True)
    with torch.no_grad():
        outputs, wanted = parallel(*args), nets[1](*args)
    # Micro-batches do not determine it.
    spread, _ = outputs.pop("spread"), wanted.pop("spread")
    with pytest.raises(sw.PlanError, match=r"'std.*' .* mixes samples"):
        spread + 1
    assert torch.equal(outputs.pop("octets").float(), wanted.pop("octets").float())
    torch.testing.assert_close(outputs, wanted)


def check_compiled() -> None:
    nets, args = built(Tied), batch()
    parallel = sw.parallelize(nets[0], planned(nets[0], args, 2, "interleaved_1f1b"), copy=True)
    parallel.compile(backend="aot_eager")
    loss = parallel.train_step(*args)
    torch.testing.assert_close(loss, reference_step(nets[1], args, {}, 1))
    for name, parameter in parallel.named_parameters():
        wanted = nets[1].get_parameter(name).grad
        if wanted is not None:
            torch.testing.assert_close(whole(parameter.grad), wanted, rtol=1e-8, atol=1e-8)


def check_dropout() -> None:
    """One mask for each micro-batch, operator and step; the same after the same seed."""
    x = torch.ones(8, 8, dtype=torch.float64)
    losses = []
    for seed in (5, 5, 6):
        net, _ = built(Dropping)
        torch.manual_seed(seed)
        plan = planned(net, (x,), 2, "1f1b", stage_config={"one": 0, "two": 0, "three": 1})
        parallel = sw.parallelize(net, plan, copy=True)
        losses.append([float(parallel.train_step(x)) for _ in range(2)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1] and losses[0] != losses[2]


def check_what_is_refused() -> None:
    net, _ = built(Tied)
    parallel = sw.parallelize(net, planned(net, batch(), 2, "1f1b"), copy=True)
    other, x = built(Dropping)[0], torch.ones(8, 8, dtype=torch.float64)
    config = {"one": 0, "two": 0, "three": 1}
    dropping = sw.parallelize(
        other, planned(other, (x,), 2, "1f1b", stage_config=config), copy=True
    )
    for call, message in (
        (lambda: parallel(*batch()), "train it with `net.train_step"),
        (lambda: parallel.train_step(batch()[0]), "missing a required argument"),
        (lambda: dict(zip(net.parameters(), parallel.parameters(), strict=True)), "pairs the"),
        (lambda: parallel.requires_grad_(False).train_step(*batch()), "`requires_grad` of "),
        (
            lambda: sw.parallelize(net, sw.plan(net, batch(), devices=2), copy=True),
            "for 2 devices, but ",
        ),
        (
            lambda: dropping.train_step(x.requires_grad_()),
            "requires a gradient, which a model in pipeline stages does not return",
        ),
    ):
        try:
            call()
        except sw.PlanError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"not refused: {message}")


CHECKS = (
    check_schedules,
    check_submodules_that_alternate,
    check_a_loss_before_the_last_stage,
    check_bfloat16,
    check_own_parts_of_the_batch,
    check_only_what_is_planned_is_sent,
    check_language_model,
    check_dropout,
    check_what_is_refused,
    check_outputs_are_those_of_the_batch,
)
SLOW_CHECKS = (
    check_every_schedule,
    check_a_schedule_of_ones_own,
    check_bfloat16_in_every_schedule,
    check_parameters_in_unusual_places,
    check_random_models,
    check_compiled,
    check_outputs_reach_every_rank,
)
"""Checks that simulated stages cover as well, or that differ from `CHECKS` in the schedule only."""


if __name__ == "__main__":
    run_checks(SLOW_CHECKS if "slow" in sys.argv else CHECKS)
