"""The program of a layer against the module that it was made from, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import shardwright as sw
from benchmarks.one_gpu.llama import BlockLoss
from benchmarks.one_gpu.sizes import Sizes
from benchmarks.table import Table
from benchmarks.timing import paired
from shardwright.core.runtime.accelerator import seconds_of

WARM_UP = 2
STEPS = 3
"""One after another in a measurement: as in a training, a step is launched while the one before it
runs."""

GOAL = 1.02
TOLERANCE = 1e-3
"""Of the loss, relative: compiled kernels of bfloat16 round elsewhere."""


def program_against_module(device: torch.device, sizes: Sizes) -> Table:
    """Forward and backward of one layer in bfloat16, in turn, on the device's own clock."""
    block = sizes.block
    table = Table(
        f"A layer of width {block.width:,}, {sizes.batch} × {sizes.sequence:,} tokens, bfloat16,"
        f" forward and backward, {sizes.rounds} rounds",
        ("", "ms", "program / module", "TFLOP/s", "loss differs by"),
    )
    torch.manual_seed(0)
    net = BlockLoss(block).to(device, torch.bfloat16)
    x = torch.randn(sizes.batch, sizes.sequence, block.width, device=device).to(torch.bfloat16)
    modules = _modules(net, x, device)
    steps = {name: _step(module, x, device) for name, module in modules.items()}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    losses = {name: float(module(x).detach()) for name, module in modules.items()}
    flops = block.block_flops(sizes.batch, sizes.sequence)
    for kind in ("eager", "compiled"):
        names = [f"module, {kind}", f"program, {kind}", f"copy of the module, {kind}"]
        seconds, ratios = paired({name: steps[name] for name in names}, names[0], sizes.rounds)
        for name in names:
            ratio, loss = ratios.get(name), abs(losses[name] / losses["module, eager"] - 1)
            table.add(
                *(name, f"{1e3 * seconds[name].median:.3f}", ratio.ratio() if ratio else ""),
                *(f"{flops / seconds[name].median / 1e12:.3g}", f"{loss:.1e}"),
            )
            if loss > TOLERANCE:
                table.missed.append(f"{name}: the loss differs by {loss:.1e}")
        program, noise = ratios[names[1]].median, abs(ratios[names[2]].median - 1)
        if program > GOAL + noise:
            table.missed.append(f"{kind}: program / module is {program:.3f}, more than {GOAL}")
    return table


def _modules(net: nn.Module, x: Tensor, device: torch.device) -> dict[str, nn.Module]:
    plan = sw.plan(net, (x,), devices=1)
    modules: dict[str, nn.Module] = {}
    for kind in ("eager", "compiled"):
        program = sw.parallelize(copy.deepcopy(net), plan, device)
        own, other = copy.deepcopy(net), copy.deepcopy(net)
        if kind == "compiled":
            for module in (program, own, other):
                module.compile()
        names = ("module", "program", "copy of the module")
        modules |= dict(zip((f"{n}, {kind}" for n in names), (own, program, other), strict=True))
    return modules


def _step(net: nn.Module, x: Tensor, device: torch.device) -> Callable[[], float]:
    def steps() -> None:
        for _ in range(STEPS):
            net.zero_grad(set_to_none=True)
            net(x).backward()

    def step() -> float:
        return seconds_of(steps, device) / STEPS

    return step
