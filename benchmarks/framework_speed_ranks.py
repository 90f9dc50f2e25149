"""What `bench_frameworks.py` runs on every rank to time steps beside a framework's own sharding.

python -m benchmarks.framework_speed_ranks FRAMEWORK ROUNDS, with FRAMEWORK `lightning` or
`torchtitan`. All programs take turns in one launch. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.page import ROOT
from benchmarks.timing import paired

WARM_UP, STEPS = 3, 4
TOLERANCE = 1e-3
"""Largest relative difference of the losses after the same number of steps."""
LEVEL3: dict[str, Any] = {"mode": "data_parallel", "hsdp": {"level": "level3", "threshold": 0}}
TENSOR_PARALLEL: dict[str, Any] = {"mode": "recursive_programming", "mem_coeff": 64.0}

Step = Callable[[], float]
"""Trains one step and returns its loss."""

# Lightning

WIDTH, LENGTH, LOCAL_BATCH = 256, 64, 4


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4)


def lightning_steps() -> dict[str, tuple[str, Step]]:
    """Return a step of each program, and the name of the program that it is compared with."""
    from lightning import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from shardwright.integrations.fabric import FabricStrategy

    def shard(net: Any, mesh: Any) -> nn.Module:
        for module in (*net.layers, net):
            fully_shard(module, mesh=mesh["data_parallel"])
        return net

    def step_of(strategy: Any) -> Step:
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        net = fabric.setup_module(encoder())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-3))
        x = torch.randn(
            dist.get_world_size() * LOCAL_BATCH,
            LENGTH,
            WIDTH,
            generator=torch.Generator().manual_seed(1),
        ).chunk(dist.get_world_size())[dist.get_rank()]

        def step() -> float:
            loss = nn.functional.mse_loss(net(x), x.flip(1))
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            return float(fabric.all_reduce(loss.detach()))

        return step

    local = {"dataset_strategy": "data_parallel"}
    # FSDP2; `FSDPStrategy` itself is FSDP1, which needs an accelerator.
    fsdp2 = ModelParallelStrategy(shard, dist.get_world_size(), tensor_parallel_size=1)
    own = "Lightning, its FSDP2"
    return {
        own: ("", step_of(fsdp2)),
        "Lightning, plan of `level3`": (own, step_of(FabricStrategy(**local, **LEVEL3))),
        "Lightning, automatic plan": (own, step_of(FabricStrategy(**local))),
    }


# torchtitan


def torchtitan_steps() -> dict[str, tuple[str, Step]]:
    """Return a step of each program, and the name of the program that it is compared with."""
    sys.path.insert(0, str(ROOT / "tests"))
    # Before all that imports torchtitan.
    from integrations.torchtitan_cases import Trainer, configuration
    from shardwright.integrations.torchtitan import parallelize_fn

    def step_of(tensor_parallel: int, options: dict[str, Any] | None) -> Step:
        folder = Path(stack.name)
        config = configuration(folder, local_batch=LOCAL_BATCH * tensor_parallel)
        config.training.steps = 10**6
        config.checkpoint.enable = config.validator.enable = False
        config.parallelism.tensor_parallel_degree = tensor_parallel
        if options is not None:
            config.model_spec.parallelize_fn = parallelize_fn(**options)
        trainer = Trainer(config)
        losses: list[float] = []
        processor: Any = trainer.metrics_processor
        processor.should_log = lambda _: True
        processor.log = lambda _, loss, *__, **___: losses.append(float(loss))
        batches: Iterator[Any] = trainer.batch_generator(trainer.dataloader)

        def step() -> float:
            trainer.step += 1
            trainer.train_step(batches)
            return losses.pop()

        return step

    stack = TemporaryDirectory()
    steps: dict[str, tuple[str, Step]] = {}
    for name, tensor_parallel, options in (
        ("FSDP", 1, LEVEL3),
        ("tensor parallel", 2, TENSOR_PARALLEL),
    ):
        own = f"torchtitan, its {name}"
        # Planned first: from then on DTensors are initialized as on one device, also torchtitan's.
        planned = step_of(tensor_parallel, options)
        steps[own] = ("", step_of(tensor_parallel, None))
        steps[f"torchtitan, plan: {name}"] = (own, planned)
    return steps


# Times


def timed(step: Step) -> float:
    """Seconds of `STEPS` steps on all ranks."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    dist.barrier()
    return (time.perf_counter() - started) / STEPS


def main(framework: str, rounds: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    programs = lightning_steps() if framework == "lightning" else torchtitan_steps()
    losses: dict[str, list[float]] = {
        name: [step() for _ in range(WARM_UP)] for name, (_, step) in programs.items()
    }
    found = []
    for own in [name for name, (against, _) in programs.items() if not against]:
        group = {name: step for name, (base, step) in programs.items() if own in (name, base)}
        steps = {name: (lambda step=step: timed(step)) for name, step in group.items()}
        seconds, ratios = paired(steps, own, int(rounds))
        for name in group:
            difference = (
                (torch.tensor(losses[name]) / torch.tensor(losses[own]) - 1).abs().max().item()
            )
            if difference > TOLERANCE:
                raise RuntimeError(f"{name}: losses {losses[name]}, {own}: {losses[own]}")
            ratio = "—" if name == own else ratios[name].ratio()
            is_slower = name != own and ratios[name].quartiles[0] > 1
            found.append((name, seconds[name].milliseconds(), ratio, is_slower, difference))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
