"""What `test_optimizer_parallel.py` runs on every rank: real processes, gloo, real optimizers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from sample_models import Model, llama, mlp
from torchrun import run_checks

LEVELS: tuple[Any, ...] = (
    None,
    sw.OptimizerParallel("level1", threshold=0),
    sw.OptimizerParallel("level2", shard_size=2, threshold=0),
    sw.OptimizerParallel("level3", threshold=0),
)


def with_ignored_targets(model: Model) -> Model:
    """Micro-batches with very different numbers of valid targets."""
    net, args, kwargs = model
    labels = kwargs["labels"].clone()
    labels[0, 2:] = -100
    labels[5] = -100
    return net, args, {**kwargs, "labels": labels}


def train_one_device(model: Model, steps: int, clip: float) -> list[list[float]]:
    net, args, kwargs = model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    history = []
    for _ in range(steps):
        output = net(*args, **kwargs)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        history.append([loss.item(), norm.item()])
    return history


def train(net: Any, model: Model, steps: int, clip: float) -> list[list[float]]:
    _, args, kwargs = model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    history = []
    for _ in range(steps):
        loss = net.train_step(*args, **kwargs)
        norm = net.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        history.append([loss.item(), norm.item()])
    return history


MODES: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "recursive_programming": {"mem_coeff": 10.0},
}


def compare(mode: str, hsdp: Any, micro_batches: int) -> None:
    """Losses and norms of three steps with those of one device."""
    wanted = train_one_device(with_ignored_targets(llama(batch=16, layers=1)), 3, clip=0.5)
    net, args, kwargs = with_ignored_targets(llama(batch=16, layers=1))
    plan = sw.plan(
        net,
        args,
        kwargs,
        devices=4,
        mode=mode,
        hsdp=hsdp,
        micro_batches=micro_batches,
        bucket_mb=0.01,
        **MODES[mode],
    )
    got = train(sw.parallelize(net, plan, copy=True), (net, args, kwargs), 3, clip=0.5)
    torch.testing.assert_close(
        torch.tensor(got),
        torch.tensor(wanted),
        rtol=1e-4,
        atol=1e-5,
        msg=f"{mode} {hsdp} {micro_batches}: {got}, wanted {wanted}",
    )


def check_levels_and_micro_batches() -> None:
    """Ignored targets are spread unevenly; with tensor parallel axes, placements are mixed."""
    compare("data_parallel", None, 2)
    compare("data_parallel", LEVELS[1], 2)
    compare("recursive_programming", LEVELS[2], 2)
    compare("recursive_programming", LEVELS[3], 1)


def check_every_level() -> None:
    for mode in MODES:
        for hsdp in LEVELS:
            for micro_batches in (1, 2, 4):
                compare(mode, hsdp, micro_batches)


def check_gradients_accumulate_over_calls() -> None:
    """Two steps without an update give twice the gradient, whichever way they are made."""
    for hsdp in LEVELS[1:]:
        net, args, _ = mlp()
        plan = sw.plan(
            net, args, devices=4, mode="data_parallel", hsdp=hsdp, micro_batches=2, bucket_mb=0.002
        )
        parallel: Any = sw.parallelize(net, plan, copy=True)
        parallel.train_step(*args)
        parallel.train_step(*args)
        parallel(*args).backward()
        for _ in range(3):
            net(*args).backward()
        for name, parameter in parallel.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements
            wanted = net.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=1e-5, atol=1e-6)


def check_frozen_parameters() -> None:
    """Stored sharded too, without gradients."""
    for level in ("level1", "level3"):
        net, args, _ = mlp()
        for name, parameter in net.named_parameters():
            parameter.requires_grad_("1" in name)
        hsdp = sw.OptimizerParallel(level, threshold=0)
        plan = sw.plan(net, args, devices=4, mode="data_parallel", hsdp=hsdp, micro_batches=2)
        parallel: Any = sw.parallelize(net, plan, copy=True)
        loss = parallel.train_step(*args)
        expected = net(*args)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for name, parameter in parallel.named_parameters():
            assert parameter.to_local().numel() * 4 == parameter.numel(), name
            wanted = net.get_parameter(name).grad
            if wanted is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted)
        net.zero_grad()


def check_other_modes_and_batches() -> None:
    net, (x, y), _ = mlp(batch=8)
    for hsdp in LEVELS[2:]:
        plan = sw.plan(
            net,
            (x, y),
            devices=4,
            mode="data_parallel",
            hsdp=hsdp,
            micro_batches=2,
            bucket_mb=0.002,
        )
        parallel: Any = sw.parallelize(net, plan, copy=True)
        for size in (8, 6, 3):
            wanted = net(x[:size], y[:size]).detach()
            torch.testing.assert_close(parallel.train_step(x[:size], y[:size]), wanted)
            with torch.no_grad():
                torch.testing.assert_close(parallel.eval()(x[:size], y[:size]), wanted)
            parallel.train()


def compare_compiled(hsdp: Any) -> None:
    """Forward and backward, buckets included, in one graph without breaks."""
    net, args, kwargs = llama(layers=1)
    plan = sw.plan(net, args, kwargs, devices=4, mode="data_parallel", hsdp=hsdp)
    parallel: Any = sw.parallelize(net, plan, copy=True)
    wanted = parallel.train_step(*args, **kwargs)
    gradients = {n: p.grad.full_tensor() for n, p in parallel.named_parameters()}
    parallel.zero_grad()
    parallel.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(parallel.train_step(*args, **kwargs), wanted)
    for name, parameter in parallel.named_parameters():
        got = parameter.grad.full_tensor()
        torch.testing.assert_close(got, gradients[name], rtol=1e-4, atol=1e-5)


def check_compiled_levels() -> None:
    for hsdp in LEVELS:
        compare_compiled(hsdp)


CHECKS = (
    check_levels_and_micro_batches,
    check_gradients_accumulate_over_calls,
    check_frozen_parameters,
    check_other_modes_and_batches,
)
SLOW_CHECKS = (check_every_level, check_compiled_levels)


if __name__ == "__main__":
    run_checks(SLOW_CHECKS if "slow" in sys.argv else CHECKS)
