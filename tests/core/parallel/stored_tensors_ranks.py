"""What `test_stored_tensors.py` runs on every rank: planned in place, as frameworks expect it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from torchrun import run_checks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8, padding_idx=0)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.listed = [self.norm.weight]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.recurrent(self.table(ids))[0][:, -1])
        return nn.functional.cross_entropy(self.head(hidden), labels)

    def parameters_in_all(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(16, (8, 5)), torch.randint(16, (8,))


def train(net: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = net(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIONS: tuple[dict[str, Any], ...] = (
    {"mode": "data_parallel", "hsdp": {"level": "level3", "threshold": 0}},
    {"mem_coeff": 1000.0},
)


class Wrapper(nn.Module):
    """Keeps the module that it was given, as Fabric's does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.forward_module = self.original_module = module

    def forward(self, *args: Any) -> Any:
        return self.forward_module(*args)


def check_a_wrapper_that_keeps_the_module_it_was_given() -> None:
    for options in OPTIONS:
        eager = Net()
        wrapper = Wrapper(Net())
        given = wrapper.original_module

        def parallelize_fn(module: nn.Module) -> nn.Module:
            plan = sw.plan(module, batch(), devices=dist.get_world_size(), **options)  # noqa: B023
            return sw.parallelize(module, plan)

        returned = parallelize_fn(given)
        assert returned is given is wrapper.forward_module
        assert isinstance(given, Net)
        assert given.parameters_in_all() == eager.parameters_in_all()
        assert given.head.weight is given.table.weight
        assert given.listed[0] is given.norm.weight
        assert all(isinstance(parameter, DTensor) for parameter in given.parameters())
        torch.testing.assert_close(train(wrapper), train(eager), rtol=1e-5, atol=1e-6)
        saved, wanted = wrapper.original_module.state_dict(), eager.state_dict()
        assert saved.keys() == wanted.keys()
        for name, tensor in saved.items():
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)


def check_a_copy_leaves_the_given_model() -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    planned = sw.parallelize(
        net, sw.plan(net, batch(), devices=dist.get_world_size(), mode="data_parallel"), copy=True
    )
    assert type(net) is Net
    assert planned is not net
    reference = net(*batch())
    torch.testing.assert_close(planned(*batch()), reference)
    train(planned)
    buffers = dict(net.named_buffers())
    for name, tensor in net.state_dict().items():
        assert name in buffers or torch.equal(tensor, before[name])


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except sw.PlanError as error:
        return str(error)
    raise AssertionError("taken")


def check_a_model_that_is_distributed_already_is_refused() -> None:
    world = dist.get_world_size()
    net = Net()
    plan = sw.plan(net, batch(), devices=world, mode="data_parallel")
    wrapped = nn.parallel.DistributedDataParallel(Net())
    assert "wrapped by DistributedDataParallel" in refused(lambda: sw.parallelize(wrapped, plan))
    sharded = torch.distributed.fsdp.fully_shard(Net())
    assert "sharded by fully_shard" in refused(lambda: sw.parallelize(sharded, plan))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sw.parallelize(net, plan)
    for again in (net, nn.Sequential(net)):
        for copied in (False, True):
            message = refused(lambda: sw.parallelize(again, plan, copy=copied))  # noqa: B023
            assert "is planned already" in message
            assert "net = sw.parallelize(net, sw.plan(net, batch" in message
    for planned in (net, nn.Sequential(net)):
        assert "is planned already" in refused(
            lambda: sw.plan(planned, batch(), devices=world)  # noqa: B023
        )
    net(*batch()).backward()
    assert "sw.adopt(optimizer, net)" in refused(optimizer.step)
    sw.adopt(optimizer, net).step()


CHECKS = (
    check_a_wrapper_that_keeps_the_module_it_was_given,
    check_a_copy_leaves_the_given_model,
    check_a_model_that_is_distributed_already_is_refused,
)

if __name__ == "__main__":
    run_checks(CHECKS)
