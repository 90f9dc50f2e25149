"""What `test_whole.py` runs on each of four ranks: the user's own class, split and whole."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from core.parallel.whole_models import Language, Loss, batch, language
from random_plans import random_plan
from torchrun import run_checks


def planned(seed: int = 0) -> Language:
    net = language()
    parallel = sw.parallelize(net, random_plan(sw.capture(net, batch()), 4, seed), copy=True)
    assert isinstance(parallel, Language)
    return parallel


def in_stages() -> Language:
    net = language(Loss)
    plan = sw.plan(sw.Pipeline(net, micro_batches=2), batch(), devices=4, stages=2)
    parallel = sw.parallelize(net, plan, copy=True)
    assert isinstance(parallel, Loss)
    return parallel


def check_methods_of_the_model_train_it_as_one_device_does() -> None:
    eager, parallel = language(), planned()
    assert parallel.kind == eager.kind
    assert parallel.config == eager.config
    for net in (eager, parallel):
        optimizer = net.configure_optimizers(1e-2)
        for _ in range(3):
            loss = net(*batch())[1]
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with sw.whole(parallel) as whole:
        torch.testing.assert_close(dict(whole.state_dict()), dict(eager.state_dict()))
    assert torch.equal(parallel.generate(batch()[0], 3), eager.generate(batch()[0], 3))


def check_inside_of_whole_the_model_is_the_original() -> None:
    for seed, net in enumerate((planned(1), planned(2), in_stages())):
        eager = language(Loss if seed == 2 else Language)
        with sw.whole(net) as whole:
            assert whole is net
            assert type(net) is type(eager)
            assert net.head.weight is net.embed.weight
            assert not any(isinstance(p, DTensor) for p in net.parameters())
            torch.testing.assert_close(dict(net.state_dict()), dict(eager.state_dict()))
            if seed < 2:
                assert torch.equal(net.generate(batch()[0], 3), eager.generate(batch()[0], 3))
            assert torch.equal(net.embedding_of(batch()[0]), eager.embedding_of(batch()[0]))
        assert isinstance(net.embed.weight, DTensor) or net.embed.weight is None


def check_the_shards_are_back_and_have_what_was_written() -> None:
    net, eager = planned(3), language()
    before = list(net.parameters())
    for model in (net, eager):
        with sw.whole(model), torch.no_grad():
            model.embed.weight.mul_(2)
            model.blocks[1].up.bias[3] = 7.0
            model.blocks[0].down.weight.data.mul_(3)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    torch.testing.assert_close(net(*batch())[1], eager(*batch())[1])
    with sw.whole(net):
        torch.testing.assert_close(dict(net.state_dict()), dict(eager.state_dict()))


def check_hooks_are_called_inside_and_outside() -> None:
    net = language()
    calls = []
    handle = net.register_forward_hook(lambda _, __, outputs: (outputs[0], outputs[1] * 3))
    net.register_forward_hook(lambda _, __, outputs: (outputs[0], outputs[1] * 2))
    net.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    parallel = sw.parallelize(net, sw.plan(net, batch(), devices=4), copy=True)
    parallel.register_forward_hook(lambda *_: calls.append("own"))
    handle.remove()
    eager = net(*batch())[1]
    torch.testing.assert_close(parallel(*batch())[1], eager)
    with sw.whole(parallel):
        torch.testing.assert_close(parallel(*batch())[1], eager)
    torch.testing.assert_close(parallel(*batch())[1], eager)
    assert calls == ["own"] * 3


def check_only_rank_0_holds_what_only_it_asks_for() -> None:
    for net in (planned(4), in_stages()):
        with sw.whole(net, rank0_only=True, device="cpu"):
            if dist.get_rank() == 0:
                torch.testing.assert_close(dict(net.state_dict()), dict(language().state_dict()))
            else:
                assert all(p.is_meta for p in net.parameters())


def check_training_inside_is_refused() -> None:
    net = planned(5)
    with sw.whole(net):
        loss = net(*batch())[1]
        assert loss is not None
        with pytest.raises(sw.PlanError, match=r"cannot be trained inside `sw.whole`"):
            loss.backward()
        with pytest.raises(sw.PlanError, match=r"cannot be trained inside `sw.whole`"):
            net.train_step(*batch())  # type: ignore[operator]
    loss = net(*batch())[1]
    assert loss is not None
    loss.backward()
    optimizer = torch.optim.AdamW(net.parameters())
    refused = pytest.raises(
        sw.PlanError, match=r"an optimizer changed .*\ncall `optimizer\.step\(\)` outside"
    )
    with refused, sw.whole(net):
        optimizer.step()


def check_a_replaced_parameter_is_refused() -> None:
    net = planned(6)
    with pytest.raises(sw.PlanError, match=r"'embed\.weight' was replaced inside"), sw.whole(net):
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())
        net.embed.weight = net.head.weight
    refused = pytest.raises(sw.PlanError, match=r"was written inside .*rank0_only")
    with refused, sw.whole(net, rank0_only=True), torch.no_grad():
        net.embed.weight.zero_()
    torch.testing.assert_close(net(*batch())[1], language()(*batch())[1])


def check_a_part_that_is_called_by_itself_says_what_to_do() -> None:
    net = language()
    parallel = sw.parallelize(net, sw.plan(net, batch(), devices=4, mem_coeff=10.0), copy=True)
    with pytest.raises(
        sw.PlanError, match=r"submodule `Embedding` .* called directly[\s\S]*whole\(net"
    ):
        parallel.embedding_of(batch()[0])  # type: ignore[operator]


def check_a_model_inside_is_pickled_as_the_original() -> None:
    for net, original in ((planned(), language()), (in_stages(), language(Loss))):
        file = io.BytesIO()
        with sw.whole(net) as model:
            torch.save(model, file)
            file.seek(0)
            for same in (torch.load(file, weights_only=False), copy.deepcopy(model)):
                assert type(same) is type(original)
                torch.testing.assert_close(same(*batch()), original(*batch()))
                assert not hasattr(same, "train_step")
        # None of Shardwright: the file is read where it is not installed.
        assert saved_classes(file) == saved_classes(original)


def saved_classes(saved: io.BytesIO | nn.Module) -> set[str]:
    if isinstance(saved, nn.Module):
        file = io.BytesIO()
        torch.save(saved, file)
    else:
        file = saved
    file.seek(0)
    return {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}


class Scaled(nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class SharedScale(nn.Module):
    """Two layers with one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        scale = torch.rand(8)
        self.first, self.second = Scaled(scale), Scaled(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def check_a_buffer_with_two_names_is_complete_on_all_stages() -> None:
    eager, net, x = SharedScale(), SharedScale(), torch.linspace(-1, 1, 64).view(8, 8)
    sw.parallelize(net, sw.plan(net, (x,), devices=4, stages=2, micro_batches=2))
    with sw.whole(net):
        assert net.first.scale is net.second.scale
        assert torch.equal(net(x), eager(x))


CHECKS = (
    check_a_buffer_with_two_names_is_complete_on_all_stages,
    check_a_model_inside_is_pickled_as_the_original,
    check_methods_of_the_model_train_it_as_one_device_does,
    check_inside_of_whole_the_model_is_the_original,
    check_the_shards_are_back_and_have_what_was_written,
    check_hooks_are_called_inside_and_outside,
    check_only_rank_0_holds_what_only_it_asks_for,
    check_training_inside_is_refused,
    check_a_replaced_parameter_is_refused,
    check_a_part_that_is_called_by_itself_says_what_to_do,
)


if __name__ == "__main__":
    run_checks(CHECKS)
