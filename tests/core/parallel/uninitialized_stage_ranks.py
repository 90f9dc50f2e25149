"""What `test_uninitialized_tensors.py` runs on every rank: pipeline stages from the meta device."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from core.parallel.uninitialized_ranks import Block, batch, check_equal
from torchrun import run_checks


class Staged(nn.Module):
    """A table that the first and the last stage read, a running statistic, positions in a buffer,
    and an initialization that writes to all of them."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.empty(8))
        self.frozen = nn.Parameter(torch.empty(8), requires_grad=False)
        self.register_buffer("shift", torch.empty(8))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.scale + self.frozen)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @torch.no_grad()
    def init_weights(self) -> None:
        self.scale.copy_(torch.rand(8) + 1)
        self.table.reset_parameters()
        for block in self.blocks:
            block.init_weights()
        self.table.weight[5].fill_(0.25)
        if self.head.weight is not self.table.weight:
            nn.init.normal_(self.head.weight)
        nn.init.normal_(self.frozen)
        # Replaced, as torchtitan does with rotary frequencies.
        self.shift = torch.linspace(0, 1, 8)


def init_weights(net: Any) -> None:
    torch.manual_seed(0)
    net.init_weights()


def initialize_modules(net: Any) -> None:
    """As Fabric does: memory and values of one submodule after another."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    with torch.no_grad():
        for tensor in (net.scale, net.frozen):
            if tensor.is_meta:
                net.to_empty(device="cpu", recurse=False)
            tensor.fill_(0.5)
        net.shift = torch.zeros(8)
        for block in net.blocks:
            block.frequencies = torch.ones(8)


def eager(initialize: Callable[[Any], None] = init_weights, **options: Any) -> Staged:
    net = Staged(**options)
    initialize(net)
    return net


def meta(local: bool = False, **options: Any) -> Any:
    """Planned in stages on the meta device.

    Args:
        local: whether each block is a `local_map`.
    """
    with torch.device("meta"):
        net = Staged(**options)
    for block in net.blocks if local else ():
        sw.local_map(block, "b _s _h -> b _s _h")
    plan = sw.plan(
        sw.Pipeline(net, 2), batch(), devices=dist.get_world_size(), stages=2, mem_coeff=1000.0
    )
    assert sw.parallelize(net, plan) is net
    return net


def own_names(net: Any) -> set[str]:
    stage = net.execution.devices.stage
    return {v.name for values in net.execution.partitioned.tensors_of(stage) for v in values}


def train(
    net: Any, optimizer: torch.optim.Optimizer | None = None, batch: Any = batch
) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        if hasattr(net, "train_step"):
            loss = net.train_step(*batch())
        else:
            loss = net(*batch())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_has_own_stage_only(net: Any) -> None:
    """Each rank has the tensors of its stage, as ordinary ones, and no others."""
    kinds = {type(parameter) for parameter in net.parameters()}
    assert kinds in ({DTensor}, {nn.Parameter}), kinds
    names = {name for name, _ in (*net.named_parameters(), *net.named_buffers())}
    assert own_names(net) <= names
    every: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(every, names)
    template = net.execution.template
    all_names = {name for name, _ in (*template.named_parameters(), *template.named_buffers())}
    assert set.union(*every) == all_names
    assert all(len(of_rank) < len(all_names) for of_rank in every), every


def check_sequence_of_torchtitan() -> None:
    for tied in (True, False):
        net, wanted = meta(tied=tied), eager(tied=tied)
        net.to_empty(device="cpu")
        init_weights(net)
        check_has_own_stage_only(net)
        assert not tied or net.head.weight is net.table.weight
        check_equal(net, wanted)
        assert torch.equal(torch.rand(3), (eager(tied=tied), torch.rand(3))[1])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        torch.testing.assert_close(train(net, optimizer), train(wanted), rtol=1e-5, atol=1e-6)
        check_equal(net, wanted, exactly=False)
        box = [tempfile.mkdtemp()]
        dist.broadcast_object_list(box)
        sw.save_checkpoint(box[0], net, optimizer, position=sw.Position(3))
        sw.save_state_dict(net, f"{box[0]}/whole.pt")
        reloaded = Staged(tied=tied)
        reloaded.load_state_dict(torch.load(f"{box[0]}/whole.pt"))
        for name, tensor in reloaded.named_parameters():
            torch.testing.assert_close(tensor, wanted.get_parameter(name), rtol=1e-4, atol=1e-5)
        check_loaded_without_initialization(box[0], net, optimizer, wanted, tied)


def check_loaded_without_initialization(
    folder: str, net: Any, optimizer: torch.optim.Optimizer, wanted: Staged, tied: bool
) -> None:
    other, third = meta(tied=tied), meta(tied=tied)
    after = torch.optim.AdamW(other.parameters(), lr=0.01)
    sw.load_checkpoint(folder, other, after)
    sw.load_state_dict(third, f"{folder}/whole.pt")
    for loaded in (other, third):
        for block, source in zip(loaded.blocks, wanted.blocks, strict=True):
            if block.frequencies is not None:
                block.frequencies.copy_(source.frequencies)  # It is not persistent.
        check_has_own_stage_only(loaded)
        check_equal(loaded, wanted, exactly=False)
    torch.testing.assert_close(train(other, after), train(net, optimizer), rtol=1e-4, atol=1e-5)


def check_one_module_after_another() -> None:
    """Initialized where nothing says that it has ended: replayed by the first step."""
    net, wanted = meta(local=True), eager(initialize_modules)
    # Made before the parameters have values; those of other stages are in it, too.
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    initialize_modules(net)
    torch.testing.assert_close(train(net, optimizer), train(wanted), rtol=1e-5, atol=1e-6)
    check_has_own_stage_only(net)
    check_equal(net, wanted, exactly=False)


def check_seeded_apart() -> None:
    """All stages have the values of rank 0, also of what they share."""
    net, wanted = meta().to_empty(device="cpu"), Staged()
    torch.manual_seed(dist.get_rank())
    net.init_weights()
    init_weights(wanted)
    check_equal(net, wanted)


def check_state_dict_and_copies_before() -> None:
    """They have the tensors of this stage only, whether these have values or not."""
    net = meta()
    keys = set(net.state_dict())
    assert keys < set(Staged().state_dict()), keys
    copied = deepcopy(net)
    assert set(copied.state_dict()) == keys
    net.to_empty(device="cpu")
    assert set(net.state_dict()) == keys
    init_weights(net)
    assert set(net.state_dict()) == keys
    check_equal(deepcopy(net), eager())
    with sw.whole(net) as model:
        check_equal(model, eager())


def check_uninitialized_memory_is_refused() -> None:
    def fill(net: Any) -> None:
        net.to_empty(device="cpu")
        for block in net.blocks:
            block.init_weights()

    for prepare in (lambda net: None, lambda net: net.to_empty(device="cpu"), fill):
        net = meta()
        prepare(net)
        for _ in range(2):
            try:
                net.train_step(*batch())
            except sw.PlanError as error:
                assert "are uninitialized" in str(error), error
                assert "net.to_empty(device=...)" in str(error)
            else:
                raise AssertionError("trained on uninitialized memory")
        init_weights(net.to_empty(device="cpu"))
        check_equal(net, eager())


CHECKS = (
    check_sequence_of_torchtitan,
    check_one_module_after_another,
    check_seeded_apart,
    check_state_dict_and_copies_before,
    check_uninitialized_memory_is_refused,
)

if __name__ == "__main__":
    run_checks(CHECKS)
