"""What `test_uninitialized.py` runs on every rank: models that are built on the meta device."""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from torchrun import run_checks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.register_buffer("frequencies", torch.empty(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)) + 0.1)) * self.frequencies.cos()

    def init_weights(self) -> None:
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.up.weight, std=0.2)
        nn.init.zeros_(self.up.bias)
        nn.init.orthogonal_(self.down.weight)
        bound = 1 / math.sqrt(self.down.in_features)
        nn.init.uniform_(self.down.bias, -bound, bound)
        self.frequencies.copy_(torch.arange(len(self.frequencies)) / 10)


class Language(nn.Module):
    """Initialized after sharding, as torchtitan's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, padding_idx=3)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.scale = nn.Parameter(torch.empty(8))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @torch.no_grad()
    def init_weights(self) -> None:
        self.table.reset_parameters()
        for block in self.blocks:
            block.init_weights()
        nn.init.normal_(self.head.weight, std=0.5)
        self.head.weight[5].fill_(0.25)
        self.scale.copy_(torch.rand(8) + 1)


def reset_all(net: nn.Module) -> None:
    """As the documentation of FSDP2 does, and with draws that change places in the memory."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            module.reset_parameters()
    with torch.no_grad():
        net.scale.fill_(1.5)
        for block in net.blocks:
            block.frequencies.zero_()


def init_weights(net: Any) -> None:
    torch.manual_seed(0)
    net.init_weights()


def eager(initialize: Any = init_weights) -> Language:
    net = Language()
    initialize(net)
    return net


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(16, (8, 6), generator=generator) for _ in range(2))  # type: ignore[return-value]


def train(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.01)
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


def meta(options: dict[str, Any]) -> Any:
    """A model that is planned on the meta device."""
    with torch.device("meta"):
        net = Language()
    plan = sw.plan(net, batch(), devices=dist.get_world_size(), **options)
    assert sw.parallelize(net, plan) is net
    assert all(p.is_meta for p in net.parameters())
    return net


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_equal(net: nn.Module, wanted: nn.Module, exactly: bool = True) -> None:
    tensors = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
    for name, tensor in {**dict(net.named_parameters()), **dict(net.named_buffers())}.items():
        torch.testing.assert_close(
            whole(tensor.detach()),
            tensors[name].detach(),
            rtol=0 if exactly else 1e-4,
            atol=0 if exactly else 1e-5,
            msg=lambda text: f"{name}: {text}",  # noqa: B023
        )


def check_sequence_of_torchtitan() -> None:
    """Meta, parallelize, `to_empty`, the model's own initialization, train, save."""
    for options in OPTIONS:
        for initialize in (init_weights, reset_all):
            net, wanted = meta(options), eager(initialize)
            net.to_empty(device="cpu")
            initialize(net)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            if initialize is init_weights:
                assert all(type(p) is DTensor for p in net.parameters())
                check_equal(net, wanted)
                assert torch.equal(torch.rand(3), (eager(), torch.rand(3))[1])
            torch.testing.assert_close(train(net, optimizer), train(wanted), rtol=1e-5, atol=1e-6)
            check_equal(net, wanted, exactly=False)
            state = net.state_dict()
            assert all(type(tensor) in (DTensor, Tensor) for tensor in state.values())
            box = [tempfile.mkdtemp()]
            dist.broadcast_object_list(box)
            sw.save_checkpoint(box[0], net, optimizer, position=sw.Position(3))
            # Into a second model on the meta device, which needs no initialization.
            other = meta(OPTIONS[0])
            after = torch.optim.AdamW(other.parameters(), lr=0.01)
            sw.load_checkpoint(box[0], other, after)
            for block, source in zip(other.blocks, wanted.blocks, strict=True):
                block.frequencies.copy_(source.frequencies)  # It is not persistent.
            check_equal(other, wanted, exactly=False)
            torch.testing.assert_close(
                train(other, after), train(net, optimizer), rtol=1e-4, atol=1e-5
            )


def check_the_same_as_without_parameters() -> None:
    """`no_init_parameters` and the meta device give equal parameters."""
    for options in OPTIONS:
        with sw.no_init_parameters():
            deferred = Language()
            init_weights(deferred)
        plan = sw.plan(deferred, batch(), devices=dist.get_world_size(), **options)
        sw.parallelize(deferred, plan)
        net = meta(options).to_empty(device="cpu")
        init_weights(net)
        for (name, mine), other in zip(net.named_parameters(), deferred.parameters(), strict=True):
            assert torch.equal(mine.to_local(), other.to_local()), name


def check_seeded_apart() -> None:
    """All ranks have the values of rank 0."""
    net, wanted = meta(OPTIONS[1]).to_empty(device="cpu"), Language()
    torch.manual_seed(dist.get_rank())
    net.init_weights()
    torch.manual_seed(0)
    wanted.init_weights()
    # What is drawn into a tensor of its own comes from the record, too.
    check_equal(net, wanted)


def check_state_dict_is_loaded_without_initialization() -> None:
    for options in OPTIONS:
        net, wanted = meta(options), eager()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        net.load_state_dict(wanted.state_dict())
        for block, source in zip(net.blocks, wanted.blocks, strict=True):
            block.frequencies = source.frequencies.clone()
        torch.testing.assert_close(train(net, optimizer), train(wanted), rtol=1e-5, atol=1e-6)


class Recurrent(nn.Module):
    """PyTorch keeps a second list of its parameters, with weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.lstm(x)[0])
        return y.square().mean()

    def reset_parameters(self) -> None:
        torch.manual_seed(0)
        self.lstm.reset_parameters()
        # Draws again what is out of bounds, as often as the numbers require.
        nn.init.trunc_normal_(self.last.weight, std=0.2, a=-0.2, b=0.2)
        nn.init.zeros_(self.last.bias)


def check_recurrent_modules_and_hooks() -> None:
    """Hooks that were registered before the plan stay, with whole gradients."""
    x, wanted = torch.ones(8, 3, 4), Recurrent()
    with torch.device("meta"):
        net: Any = Recurrent()
    seen: list[torch.Size] = []
    for module in (net, wanted):
        module.last.weight.register_hook(lambda gradient: 3 * gradient)
        module.last.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    sw.parallelize(net, sw.plan(net, (x,), devices=dist.get_world_size(), **OPTIONS[0]))
    net.to_empty(device="cpu")
    for module in (net, wanted):
        module.reset_parameters()
        module(x).backward()
    check_equal(net, wanted)
    assert seen == [torch.Size([1])] * 2
    for name, parameter in net.named_parameters():
        gradient = wanted.get_parameter(name).grad
        torch.testing.assert_close(whole(parameter.grad), gradient, msg=name)


def check_uninitialized_memory_is_refused() -> None:
    def fill(net: Any) -> None:
        for block in net.blocks:
            block.init_weights()

    for prepare in (lambda net: None, lambda net: net.to_empty(device="cpu"), fill):
        net = meta(OPTIONS[0])
        if prepare is fill:
            net.to_empty(device="cpu")
        prepare(net)
        for _ in range(2):
            try:
                net(*batch())
            except sw.PlanError as error:
                assert "are uninitialized" in str(error)
                assert "table.weight" in str(error)
                assert "net.to_empty(device=...)" in str(error)
                assert ("blocks.0.up.weight" in str(error)) is (prepare is not fill), str(error)
            else:
                raise AssertionError("trained on uninitialized memory")


CHECKS = (
    check_sequence_of_torchtitan,
    check_the_same_as_without_parameters,
    check_seeded_apart,
    check_state_dict_is_loaded_without_initialization,
    check_recurrent_modules_and_hooks,
    check_uninitialized_memory_is_refused,
)

if __name__ == "__main__":
    run_checks(CHECKS)
