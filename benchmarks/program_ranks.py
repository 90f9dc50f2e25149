"""Runs training programs on one device and then on these ranks, and prints how each ended: exact,
refused by an error of Shardwright's, wrong, or with another error."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw
from benchmarks.bit_flips import RAW, REFUSED
from benchmarks.programs import PROGRAMS, Parallel, Program

EXACT, WRONG = "exact", "wrong"
ENDS = (EXACT, REFUSED, WRONG, RAW)
TOLERANCE = 1e-4

PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {"mode": "data_parallel"},
    "model parallel": {"mem_coeff": 1000.0},
}


def main(folder: str, names: Sequence[str]) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ends = []
    for name in names or PROGRAMS:
        alone = run(PROGRAMS[name], lambda net, *args: net)
        for plan, options in PLANS.items():
            # A group each: what one program leaves behind must not reach the next.
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/{name}-{plan}".replace(" ", "-"),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=20),
            )
            ends.append((name, plan, *outcome(PROGRAMS[name], alone, options)))
            dist.destroy_process_group()
    print(json.dumps({"ends": ends}), flush=True)


def outcome(
    program: Program, alone: tuple[list[float], dict[str, Tensor]], options: dict[str, Any]
) -> tuple[str, str]:
    """How a program ends under a plan, and why."""

    def parallel(net: nn.Module, *args: Any) -> nn.Module:
        plan = sw.plan(net, args, devices=dist.get_world_size(), **options)
        return sw.parallelize(net, plan, copy=True)

    try:
        numbers, state = run(program, parallel)
    except sw.ShardwrightError as error:
        return REFUSED, str(error)
    except Exception as error:
        return RAW, f"{type(error).__name__}: {error}"
    return compare(alone, (numbers, state))


def run(program: Program, parallel: Parallel) -> tuple[list[float], dict[str, Tensor]]:
    """The numbers that a program sees, and what it trained."""
    torch.manual_seed(0)
    training, numbers = program(parallel), []
    while True:
        try:
            numbers.append(next(training))
        except StopIteration as stop:
            state = stop.value.state_dict()
            return numbers, {
                key: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
                for key, t in state.items()
            }


def compare(
    alone: tuple[list[float], dict[str, Tensor]], planned: tuple[list[float], dict[str, Tensor]]
) -> tuple[str, str]:
    """Whether all numbers and the final state are the same."""
    if len(alone[0]) != len(planned[0]) or alone[1].keys() != planned[1].keys():
        return WRONG, "another number of losses or parameters"
    for place, (a, b) in enumerate(zip(alone[0], planned[0], strict=True)):
        if abs(a - b) > TOLERANCE * max(1.0, abs(a)):
            return WRONG, f"number {place} is {b}, on one device {a}"
    for key, value in alone[1].items():
        if not torch.allclose(value, planned[1][key], rtol=TOLERANCE, atol=TOLERANCE):
            return WRONG, f"{key} differs"
    return EXACT, ""


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1], sys.argv[2:])
