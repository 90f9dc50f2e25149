"""What `bench_structures.py` runs on every rank: training steps of two plans, in turn."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import shardwright as sw
from benchmarks.data_parallel_ranks import Step, seconds_of, with_update

Model = tuple[nn.Module, dict[str, Any]]
ALONE = "one device"
ROWS = 500_000
"""Of each table."""


def mixture() -> Model:
    """Four layers of 16 experts each, of which a token chooses two."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=16,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=2,
    )
    ids = torch.randint(512, (16, 64))
    return transformers.Qwen3MoeForCausalLM(config), {"input_ids": ids, "labels": ids}


class Recommender(nn.Module):
    """A small DLRM (Naumov et al., 2019)."""

    def __init__(self, rows: int = ROWS, width: int = 64, tables: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(8, width), nn.ReLU())
        self.top = nn.Linear((tables + 1) * width, 1)

    def forward(self, dense: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        scores = self.top(torch.cat([self.bottom(dense), *looked_up], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, clicked)


def recommender() -> Model:
    ids = torch.randint(ROWS, (512, 4, 3))
    return Recommender(), {"dense": torch.randn(512, 8), "ids": ids, "clicked": torch.rand(512)}


MODELS: dict[str, Callable[[], Model]] = {"experts": mixture, "recommender": recommender}


def planned(make: Callable[[], Model], **options: Any) -> tuple[Step, dict[str, Any]]:
    """The step of a plan, with the plan, its mesh and its bytes."""
    net, kwargs = make()
    devices = dist.get_world_size()
    plan = sw.plan(net, (), kwargs, devices=devices, **options)
    parallel: Any = sw.parallelize(net, plan, "cpu", release=True)
    step = with_update(parallel, lambda: parallel.train_step(**kwargs))
    axes = zip(plan.mesh.alias_names, plan.mesh.device_matrix, strict=True)
    mesh = " · ".join(f"{name} {size}" for name, size in axes)
    return step, {"plan": plan.to_json(), "mesh": mesh, "planned": plan.bytes}


def alone(make: Callable[[], Model]) -> Step:
    """On rank 0, while the others wait."""
    if dist.get_rank() > 0:
        return lambda: torch.zeros(())
    net, kwargs = make()

    def forward_and_backward() -> Tensor:
        result = net(**kwargs)
        loss: Tensor = result if isinstance(result, Tensor) else result.loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return with_update(net, forward_and_backward)


def print_seconds(steps: dict[str, Step], facts: dict[str, dict[str, Any]], rounds: int) -> None:
    """Run the steps in turn, and print on rank 0 the seconds of each with its facts, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in sorted(steps, reverse=number % 2 == 1):
            seconds[name].append(seconds_of(steps[name]))
    if dist.get_rank() == 0:
        print(json.dumps({name: {"seconds": seconds[name], **facts[name]} for name in steps}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=MODELS, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    make = MODELS[asked.only]
    steps: dict[str, Step] = {ALONE: alone(make)}
    facts: dict[str, dict[str, Any]] = {ALONE: {}}
    for name, options in {
        "data parallel": {"mode": "data_parallel"},
        "automatic": {"cluster": "local"},
    }.items():
        torch.manual_seed(0)
        steps[name], facts[name] = planned(make, **options)
    for _ in range(2):
        for step in steps.values():
            step()
    print_seconds(steps, facts, asked.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
