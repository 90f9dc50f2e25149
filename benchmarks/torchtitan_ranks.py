"""What `bench_frameworks.py` runs on every rank: trainings of torchtitan's `Trainer` under plans.

python -m benchmarks.torchtitan_ranks FOLDER PHASE..., with PHASE `save`, for four steps with a
checkpoint after two, or `resume`, for the last two steps from it. Rank 0 prints a line of JSON,
with the numbers of one process under `one process`.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.page import ROOT

sys.path.insert(0, str(ROOT / "tests"))

# Before all that imports torchtitan.
from integrations.torchtitan_cases import Seen, configuration, one_process, trained
from shardwright.integrations.torchtitan import parallelize_fn

BATCH, ACCUMULATED = 8, 2
PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {"mode": "data_parallel"},
    "tensor parallel": {"mode": "recursive_programming", "mem_coeff": 64.0},
    "level3": {"mode": "data_parallel", "hsdp": {"level": "level3", "threshold": 0}},
}


def numbers(seen: Seen) -> dict[str, list[float]]:
    """The columns of the table; validations are entries without a norm."""
    return {
        "loss": [entry[1] for entry in seen if len(entry) == 3],
        "norm": [entry[2] for entry in seen if len(entry) == 3],
        "evaluation": [entry[1] for entry in seen if len(entry) == 2],
    }


def train(plan: str, phase: str, folder: Path) -> dict[str, list[float]]:
    world = dist.get_world_size()
    # Ranks of one `tensor_parallel_degree` read the same samples.
    degree = min(2, world) if plan == "tensor parallel" else 1
    config = configuration(folder, local_batch=BATCH * degree // world, chunked=True)
    config.parallelism.tensor_parallel_degree = degree
    config.training.global_batch_size = ACCUMULATED * BATCH
    config.model_spec.parallelize_fn = parallelize_fn(**PLANS[plan])
    if phase == "resume":
        # The checkpoint of the fourth step, of `save`, stays as it is.
        config.checkpoint.load_step, config.checkpoint.interval = 2, 100
        config.checkpoint.last_save_model_only = True
    return numbers(trained(config)[0])


def main(folder: str, *phases: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen, _ = one_process(configuration(Path(folder)), BATCH, ACCUMULATED)
    last_steps = [entry for entry in seen if entry[0] > 2]
    found: dict[str, Any] = {
        phase: {f"torchtitan, {name}": train(name, phase, Path(folder, name)) for name in PLANS}
        for phase in phases
    }
    found["one process"] = [numbers(seen), numbers(last_steps)]
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
