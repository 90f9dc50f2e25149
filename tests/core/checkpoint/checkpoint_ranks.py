"""What `test_checkpoint.py` runs on every rank: saves under one plan, loads under others.

    checkpoint_ranks.py VERB,VERB... FOLDER CASE...

A case is `plan:optimizer:norm`. Every rank of a launch follows the cases whose plan is for its
world. Pipeline stages see micro-batches, so that batch norm is not that of one device: they are
compared with layer norm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from random_plans import random_plan
from shardwright.core.checkpoint.checkpoint import Checkpoints
from shardwright.core.checkpoint.file_checksum import write_checksum
from shardwright.core.checkpoint.position import Position
from shardwright.core.parallel.module import ParallelModule

SAVED_AFTER, STEPS = 3, 5


class Tied(nn.Module):
    """A parameter under two names, and perhaps batch norm for the sake of its statistics."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm == "batch" else nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.hidden(self.embedding(tokens))))
        return nn.functional.cross_entropy(self.head(x), targets)


def model(seed: int, norm: str = "batch") -> Tied:
    torch.manual_seed(seed)
    return Tied(norm).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(16, (16,), generator=generator)
    return tokens, torch.randint(16, (16,), generator=generator)


Planning = Callable[[nn.Module], sw.Plan]


def searched(devices: int, **options: Any) -> tuple[int, Planning]:
    return devices, lambda net: sw.plan(net, batch(0), devices=devices, **options)


def at_random(devices: int, seed: int) -> tuple[int, Planning]:
    """Any cut of any operator, any storage of any parameter, axes in any order."""
    return devices, lambda net: random_plan(sw.capture(net, batch(0)), devices, seed)


PLANS = {
    "one": searched(1),
    "data2": searched(2, mode="data_parallel"),
    "stages2": searched(2, stages=2, micro_batches=4),
    "model4": searched(4, mem_coeff=10.0),
    "random4": at_random(4, 1),
    "stages4": searched(4, stages=2, micro_batches=2, mem_coeff=10.0),
    "data8": searched(8, mode="data_parallel"),
    "random8": at_random(8, 2),
    "stages8": searched(8, stages=4, micro_batches=4, hsdp={"threshold": 0}),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
}


@cache
def planned(name: str, norm: str) -> sw.Plan:
    return PLANS[name][1](model(0, norm))


def made(case: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, sw.Plan]:
    plan_name, optimizer, norm = case.split(":")
    plan = planned(plan_name, norm)
    net = sw.parallelize(model(seed, norm), plan)
    return net, OPTIMIZERS[optimizer](net), plan


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        if isinstance(net, ParallelModule):
            loss = net.train_step(*batch(step))
        else:
            loss = net(*batch(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def contents(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Everything that a checkpoint should bring back to this rank, whole."""
    for name, value in net.state_dict().items():
        yield name, whole(value)
    for name, parameter in net.named_parameters():
        first = "embedding.weight" if name == "head.weight" else name
        for key, value in optimizer.state[parameter].items():
            yield f"{first} {key}", whole(value)


def undisturbed(
    optimizer_name: str, norm: str = "batch"
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """On one device: the losses, and the contents when it is saved and at the end."""
    net = model(0, norm)
    optimizer = OPTIMIZERS[optimizer_name](net)
    first = train(net, optimizer, range(SAVED_AFTER))
    saved = {name: value.detach().clone() for name, value in contents(net, optimizer)}
    then = train(net, optimizer, range(SAVED_AFTER, STEPS))
    return first + then, [saved, dict(contents(net, optimizer))]


def save(folder: Path, case: str, asynchronous: bool = False) -> None:
    net, optimizer, plan = made(case, seed=0)
    train(net, optimizer, range(SAVED_AFTER))
    place = folder / case.replace(":", "-")
    with Checkpoints(place, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(net, optimizer, Position(SAVED_AFTER, epoch=1, batch=1), plan)
        # What is written must be what there was, whatever happens to it meanwhile.
        train(net, optimizer, range(SAVED_AFTER, STEPS))


def check_loads(folder: Path, saved_case: str, case: str) -> None:
    """Equal parameters, buffers and optimizer state, and the same losses from there."""
    plan_name, *others = case.split(":")
    losses, (wanted, final) = undisturbed(*others)
    net, optimizer, _ = made(case, seed=1)
    place = folder / saved_case.replace(":", "-")
    position = Checkpoints(place).load(net, optimizer)
    assert position == Position(SAVED_AFTER, epoch=1, batch=1)
    got = dict(contents(net, optimizer))
    assert got.keys() == wanted.keys() or (plan_name.startswith("stages") and got)
    mine = {name: wanted[name] for name in got}
    torch.testing.assert_close(got, mine, rtol=1e-11, atol=1e-13)
    then = train(net, optimizer, range(SAVED_AFTER, STEPS))
    torch.testing.assert_close(then, losses[SAVED_AFTER:], rtol=1e-11, atol=1e-13)
    mine = {name: final[name] for name in got}
    torch.testing.assert_close(dict(contents(net, optimizer)), mine, rtol=1e-9, atol=1e-12)


def check_random_numbers_go_on(folder: Path) -> None:
    """Dropout masks after loading are those that would have come."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double()
    x = torch.ones(16, 8, dtype=torch.float64)
    plan = sw.plan(net, (x,), devices=dist.get_world_size(), mode="data_parallel")
    parallel = sw.parallelize(net, plan, copy=True)
    for _ in range(2):
        parallel(x)
    sw.save_checkpoint(folder / "dropout", parallel, position=sw.Position(2), plan=plan)
    wanted = whole(parallel(x))
    torch.manual_seed(7)
    again = sw.parallelize(net, plan, copy=True)
    assert not torch.equal(whole(again(x)), wanted)
    assert sw.load_checkpoint(folder / "dropout", again) == sw.Position(2)
    assert torch.equal(whole(again(x)), wanted)


def check_files(folder: Path, case: str, other: str) -> None:
    """One file for the whole model, written under one plan and read under another."""
    net, optimizer, _ = made(case, seed=0)
    train(net, optimizer, range(SAVED_AFTER))
    wanted = {name: whole(value) for name, value in net.state_dict().items()}
    for name in ("whole.safetensors", "whole.pt"):
        sw.save_state_dict(net, folder / name)
        loaded, _, _ = made(other, seed=1)
        sw.load_state_dict(loaded, folder / name)
        got = {name: whole(value) for name, value in loaded.state_dict().items()}
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert loaded.head.weight is loaded.embedding.weight
    if dist.get_rank() == 0:
        torch.save(wanted, folder / "wanted.pt")


def check_damage_is_an_error_on_every_rank(folder: Path, case: str) -> None:
    """One rank verifies the file, but all of them read it."""
    net, _, _ = made(case, seed=0)
    path = folder / "damaged.safetensors"
    sw.save_state_dict(net, path)
    if dist.get_rank() == 0:
        write_checksum(path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    with pytest.raises(sw.CheckpointError, match="damaged"):
        sw.load_state_dict(net, path)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    verbs, folder, cases = sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3:]

    def passed(what: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"passed {what}.", flush=True)

    mine = [case for case in cases if PLANS[case.partition(":")[0]][0] == dist.get_world_size()]
    if "save" in verbs:
        for number, case in enumerate(mine):
            save(folder, case, asynchronous=number % 2 == 1)
            passed(f"{case} saved")
    if "load" in verbs:
        for case, saved_case in product(mine, cases):
            if saved_case.partition(":")[2] == case.partition(":")[2]:
                check_loads(folder, saved_case, case)
                passed(f"{saved_case} to {case}")
    if "others" in verbs:
        check_random_numbers_go_on(folder)
        passed("random numbers")
        check_files(folder, mine[0], mine[1])
        passed("files")
        check_damage_is_an_error_on_every_rank(folder, mine[0])
        passed("damage")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
