"""What `test_total_norms.py` runs on each of four ranks: models in stages, in shards, and ordinary
ones, whose gradients are clipped by `torch.nn.utils` as those of one device."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from core.misuse.stage_ranks import batch, in_stages, model, sharded
from torchrun import run_checks

Pair = tuple[Any, nn.Module]
"""A model, and the same on one device."""


@cache
def models() -> dict[str, tuple[Any, nn.Module, tuple[Tensor, ...]]]:
    """Models by their kind, the same on one device, and their batches."""
    other_batch = tuple(x * 1.5 for x in batch())
    features = sw.plan(model(), batch(), devices=4, mode="recursive_programming")
    ordinary = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    alone = sw.WithLoss(ordinary, nn.MSELoss())
    return {
        "stages": (in_stages(4), model(), batch()),
        "other stages": (in_stages(4, seed=1), model(1), other_batch),
        "shards": (sharded(4, seed=2), model(2), other_batch),
        "replicas": (sw.parallelize(model(3), features), model(3), batch()),
        "ordinary": (copy.deepcopy(alone), alone, batch()),
    }


def with_gradients(kinds: Sequence[str]) -> list[Pair]:
    pairs = []
    for kind in kinds:
        net, alone, inputs = models()[kind]
        net.zero_grad()
        alone.zero_grad()
        net(*inputs).backward() if kind == "ordinary" else net.train_step(*inputs)
        alone(*inputs).backward()
        pairs.append((net, alone))
    return pairs


def parameters(pairs: Sequence[Pair]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Of the models, and of the same on one device."""
    mine = [p for net, _ in pairs for p in net.parameters()]
    return mine, [p for _, alone in pairs for p in alone.parameters()]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal_gradients(nets: Iterable[Pair]) -> None:
    for net, alone in nets:
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(full(parameter.grad), alone.get_parameter(name).grad)


Select = Callable[[nn.Module], Iterable[nn.Parameter]]

SELECTIONS: dict[str, Select] = {
    "all parameters": lambda net: net.parameters(),
    "a list": lambda net: [*net.parameters()],
    "a generator": lambda net: (p for p in net.parameters()),
    "by name": lambda net: [p for name, p in net.named_parameters() if "weight" in name],
    "a group of an optimizer": lambda net: torch.optim.SGD(
        [{"params": [p for p in net.parameters() if p.ndim > 1]}]
    ).param_groups[0]["params"],
    "a submodule in both stages": lambda net: net.net.parameters(),
    "a submodule with a tied parameter": lambda net: net.net.table.parameters(),
    "what one stage has": lambda net: [*net.net.one.parameters()],
    "another stage": lambda net: list(net.net.two.parameters()),
    "of no stage": lambda net: [],
}


def check_norms_over_stages_are_those_of_one_device() -> None:
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        for select in SELECTIONS.values():
            net, alone = stages()
            norm = clip_grad_norm_(select(net), 0.1, norm_type)
            wanted = clip_grad_norm_(select(alone), 0.1, norm_type)
            torch.testing.assert_close(full(norm), wanted)
            assert_equal_gradients([(net, alone)])


def stages() -> Pair:
    (pair,) = with_gradients(["stages"])
    return pair


def check_a_submodule_of_one_stage_is_clipped_by_its_norm() -> None:
    net, alone = stages()
    for half in ("one", "two"):
        norm = clip_grad_norm_(getattr(net.net, half).parameters(), 0.01)
        wanted = clip_grad_norm_(getattr(alone.net, half).parameters(), 0.01)
        is_owner = (half == "one") == (dist.get_rank() < 2)
        torch.testing.assert_close(full(norm), wanted if is_owner else torch.tensor(0.0))
    assert_equal_gradients([(net, alone)])


def check_one_parameter_is_clipped_by_its_own_norm_on_the_ranks_that_have_it() -> None:
    net, alone = stages()
    for name, parameter in net.named_parameters():
        wanted = clip_grad_norm_(alone.get_parameter(name), 0.01)
        torch.testing.assert_close(full(clip_grad_norm_(parameter, 0.01)), wanted)
    assert_equal_gradients([(net, alone)])


JOINT: tuple[Sequence[str], ...] = (
    ("stages", "ordinary"),
    ("stages", "shards", "ordinary"),
    ("ordinary", "stages", "other stages", "replicas", "shards"),
    ("shards", "ordinary"),
    ("replicas", "shards"),
    ("shards",),
    ("ordinary",),
)


def check_lists_made_before_planning_clip_the_planned_parameters() -> None:
    for stages in (1, 2):
        alone, net = model(), model()
        listed = list(net.parameters())
        sw.parallelize(net, sw.plan(net, batch(), devices=4, stages=stages, micro_batches=stages))
        for select in (slice(None), slice(1)):
            net.zero_grad()
            alone.zero_grad()
            net.train_step(*batch())
            alone(*batch()).backward()
            norm = clip_grad_norm_(listed[select], 0.1)
            wanted = clip_grad_norm_(list(alone.parameters())[select], 0.1)
            torch.testing.assert_close(full(norm), wanted)
            assert_equal_gradients([(net, alone)])
        clip_grad_value_(listed, 1e-3)
        clip_grad_value_(alone.parameters(), 1e-3)
        assert_equal_gradients([(net, alone)])


def check_models_of_all_kinds_are_clipped_by_one_call() -> None:
    for kinds in JOINT:
        for norm_type in (2.0, math.inf):
            nets = with_gradients(kinds)
            mine, its = parameters(nets)
            norm = clip_grad_norm_(mine, 0.1, norm_type, error_if_nonfinite=True)
            wanted = clip_grad_norm_(its, 0.1, norm_type)
            torch.testing.assert_close(full(norm), wanted)
            assert_equal_gradients(nets)


def check_a_norm_is_computed_and_applied_in_two_calls() -> None:
    nets = with_gradients([*models()])
    mine, its = parameters(nets)
    norm = get_total_norm([p.grad for p in mine])
    wanted = get_total_norm([p.grad for p in its])
    torch.testing.assert_close(norm, wanted)
    clip_grads_with_norm_(mine, 0.1, norm)
    clip_grads_with_norm_(its, 0.1, wanted)
    assert_equal_gradients(nets)
    for views in ([p.grad.detach() for p in mine], mine):
        alike = [p.grad for p in its] if views is not mine else its
        torch.testing.assert_close(get_total_norm(views), get_total_norm(alike))


def check_what_has_no_finite_norm_is_refused_on_all_ranks() -> None:
    net, _ = stages()
    if dist.get_rank() == 0:
        next(net.parameters()).grad.fill_(math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(net.parameters(), 0.1, error_if_nonfinite=True)
    with pytest.raises(sw.PlanError, match="positive"):
        clip_grad_norm_(net.parameters(), 0.1, 0.0)


def check_norms_of_local_shards_are_refused() -> None:
    net, _ = stages()
    with pytest.raises(sw.PlanError, match="pass the DTensors of parameters or gradients"):
        get_total_norm([p.grad.to_local() for p in net.parameters()])


CHECKS = (
    check_norms_over_stages_are_those_of_one_device,
    check_a_submodule_of_one_stage_is_clipped_by_its_norm,
    check_one_parameter_is_clipped_by_its_own_norm_on_the_ranks_that_have_it,
    check_lists_made_before_planning_clip_the_planned_parameters,
    check_models_of_all_kinds_are_clipped_by_one_call,
    check_a_norm_is_computed_and_applied_in_two_calls,
    check_what_has_no_finite_norm_is_refused_on_all_ranks,
    check_norms_of_local_shards_are_refused,
)


if __name__ == "__main__":
    run_checks(CHECKS)
