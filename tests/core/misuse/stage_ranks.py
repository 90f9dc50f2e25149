"""What `test_stage_parameters.py` runs on each of two ranks: a stage each, or shards."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from torchrun import run_checks

STAGES = {"net.table": 0, "net.one": 0, "net.two": 1, "net.head": 1}


class Halves(nn.Module):
    """Two halves, at the ends of which is one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(8, 8, bias=False)
        self.one = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.two = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight
        self.shift = nn.Buffer(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.table(x) + self.shift)))


def model(seed: int = 0) -> sw.WithLoss:
    torch.manual_seed(seed)
    return sw.WithLoss(Halves(), nn.MSELoss())


def batch() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    return x, x.flip(0)


def in_stages(devices: int = 2, seed: int = 0) -> Any:
    plan = sw.plan(model(), batch(), devices=devices, micro_batches=2, stage_config=STAGES)
    return sw.parallelize(model(seed), plan)


def sharded(devices: int = 2, seed: int = 0) -> Any:
    hsdp = {"level": "level3", "threshold": 0}
    plan = sw.plan(model(), batch(), devices=devices, mode="data_parallel", hsdp=hsdp)
    return sw.parallelize(model(seed), plan)


def trained(net: Any) -> torch.optim.Optimizer:
    """After a step of training."""
    optimizer = torch.optim.AdamW(net.parameters())
    net.train_step(*batch())
    optimizer.step()
    return optimizer


def values(net: nn.Module) -> dict[str, Tensor]:
    """Of all parameters, on all ranks."""
    with sw.whole(net) as whole:
        return {name: value.clone() for name, value in whole.state_dict().items()}


@contextmanager
def common_folder() -> Iterator[Path]:
    with TemporaryDirectory() as own:
        box = [own]
        dist.broadcast_object_list(box)
        yield Path(box[0])
        dist.barrier()


def check_the_state_of_one_rank_is_not_saved() -> None:
    for net in (in_stages(), sharded()):
        optimizer = trained(net)
        for content in (
            net.state_dict(),
            {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
            optimizer.state_dict(),
            {name: value.cpu().half() for name, value in net.state_dict().items()},
        ):
            file = io.BytesIO()
            with pytest.raises(
                sw.PlanError, match=r"(?s)stage_ranks\.py:\d+\).* `sw\.save_state_dict"
            ):
                torch.save(content, file)


def check_the_complete_model_is_saved() -> None:
    net, other, alone = in_stages(), sharded(seed=1), model(seed=1)
    trained(net)
    wanted = values(net)
    with common_folder() as folder:
        for name in ("net.safetensors", "net.pt"):
            sw.save_state_dict(net, folder / name)
            sw.load_state_dict(other, folder / name)
            torch.testing.assert_close(values(other), wanted, rtol=0, atol=0)
        alone.load_state_dict(torch.load(folder / "net.pt"))
        dist.barrier()
        sw.save_state_dict(other, folder / "net.pt")
        sw.load_state_dict(net, folder / "net.pt")
    for saved in (alone.state_dict(), values(net)):
        torch.testing.assert_close(dict(saved), wanted, rtol=0, atol=0)


def check_a_wrapper_of_the_model_is_like_it() -> None:
    net = sw.AutoParallel(sw.Pipeline(model(), 2, STAGES))
    net.train_step(*batch())
    with pytest.raises(sw.PlanError, match=r"sw\.save_state_dict"):
        torch.save(net.state_dict(), io.BytesIO())
    with common_folder() as folder:
        sw.save_state_dict(net, folder / "net.pt")
        torch.testing.assert_close(torch.load(folder / "net.pt"), dict(model().state_dict()))


def check_distributed_checkpoints_have_all_ranks() -> None:
    for build in (in_stages, sharded):
        net = build()
        trained(net)
        with common_folder() as folder:
            dcp.save(net.state_dict(), checkpoint_id=folder)
            other = build(seed=1)
            state = other.state_dict()
            dcp.load(state, checkpoint_id=folder)
            other.load_state_dict(state)
        torch.testing.assert_close(values(other), values(net), rtol=0, atol=0)


def check_an_optimizer_of_an_iterator_that_has_been_read_warns() -> None:
    parameters, messages = iter(in_stages().parameters()), list[str]()
    trained = torch.optim.SGD(parameters, lr=0.1)
    assert trained.param_groups[0]["params"]
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    torch.optim.SGD(parameters, lr=0.1)
    logging.getLogger("shardwright").removeHandler(handler)
    assert "`SGD`" in messages[0] and "not an iterator that has been read" in messages[0]


def check_a_stage_without_parameters_has_an_optimizer() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softmax(-1))
    eager, net = (sw.WithLoss(deepcopy(layers), nn.MSELoss()) for _ in range(2))
    stages = {"net.0": 0, "net.1": 1, "net.2": 1}
    plan = sw.plan(net, batch(), devices=2, micro_batches=2, stage_config=stages)
    planned = sw.parallelize(net, plan)
    optimizers = [torch.optim.AdamW(eager.parameters()), torch.optim.AdamW(planned.parameters())]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    for _ in range(2):
        eager(*batch()).backward()
        planned.train_step(*batch())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(values(planned), dict(eager.state_dict()))
    with common_folder() as folder:
        sw.save_checkpoint(folder, planned, optimizers[1], position=sw.Position(2))
        sw.load_checkpoint(folder, planned, torch.optim.AdamW(planned.parameters()))
    with pytest.raises(sw.PlanError, match=r"`LBFGS`"):
        torch.optim.LBFGS(planned.parameters()).step(lambda: 0.0)


def check_ranks_collect_their_stages() -> None:
    net = in_stages()
    wanted, states = values(net), [{}, {}]
    dist.all_gather_object(states, net.state_dict())
    merged = states[0] | states[1]
    torch.testing.assert_close(merged, wanted, rtol=0, atol=0)
    assert all(type(value) is Tensor for value in merged.values())


def check_an_optimizer_of_other_parameters_does_not_load_that_of_a_stage() -> None:
    net, other = in_stages(), sharded()
    of_stage, of_all = trained(net), trained(other)
    for optimizer, state in ((of_all, of_stage.state_dict()), (of_stage, of_all.state_dict())):
        with pytest.raises(sw.PlanError, match=r"AdamW has \d, as with .*\n.*load_checkpoint"):
            optimizer.load_state_dict(state)
    of_stage.load_state_dict(of_stage.state_dict())


class Scaled(torch.optim.Optimizer):
    """Gradient descent with a step of length one."""

    def __init__(self, params: Any, norm: Any) -> None:
        super().__init__(params, {})
        self.norm = norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        listed = [p for group in self.param_groups for p in group["params"]]
        norm = self.norm([p.grad for p in listed])
        for parameter in listed:
            parameter.sub_(parameter.grad / norm)


def check_norms_over_the_parameters_of_an_optimizer_are_of_all_stages() -> None:
    eager, planned = model(), in_stages()
    for net in (eager, planned):
        optimizer = Scaled(net.parameters(), nn.utils.get_total_norm)
        for _ in range(2):
            optimizer.zero_grad()
            if net is eager:
                eager(*batch()).backward()
            else:
                planned.train_step(*batch())
            optimizer.step()
    torch.testing.assert_close(values(planned), dict(eager.state_dict()))
    own = Scaled(planned.parameters(), lambda gs: sum((g**2).sum() for g in gs) ** 0.5)
    with pytest.raises(
        sw.PlanError, match=r"`Scaled` \(.*combines several parameters.*\n.*get_total"
    ):
        own.step()


def own_norm(net: nn.Module) -> float:
    """Of the gradients of one stage."""
    return float(sum((p.grad**2).sum() for p in net.parameters() if p.grad is not None) ** 0.5)


def check_options_and_steps_that_depend_on_one_stage_are_an_error() -> None:
    def set_rate(net: nn.Module, optimizer: Any) -> bool:
        optimizer.param_groups[0]["lr"] /= own_norm(net)
        return True

    def set_decay(net: nn.Module, optimizer: Any) -> bool:
        optimizer.param_groups[0]["weight_decay"] /= own_norm(net)
        return True

    for change, named in (
        (set_rate, r"learning rates of pipeline stages.*\n.*get_total_norm"),
        (set_decay, r"options of optimizers that were equal.*\n.*get_total_norm"),
        (lambda net, _: dist.get_rank() == 0, r"numbers of optimizer steps over.*: 0 on rank 1"),
    ):
        net = in_stages()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
        with pytest.raises(sw.DataError, match=named):
            for _ in range(2):
                net.train_step(*batch())
                if change(net, optimizer):
                    optimizer.step()


def check_rates_of_each_layer_are_no_error() -> None:
    net = in_stages()
    # As many groups on both ranks, the first of which has the tied weight.
    optimizer = torch.optim.SGD([{"params": [p]} for p in list(net.parameters())[:3]], lr=0.1)
    for _ in range(3):
        net.train_step(*batch())
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + float(group["params"][0].grad.norm()))
        optimizer.step()
        optimizer.zero_grad()


def check_gradients_and_updates_that_are_scaled_by_one_stage_warn() -> None:
    messages = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    for clip in (nn.utils.clip_grad_norm_, None):
        net = in_stages()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net.train_step(*batch())
            norm = own_norm(net)
            for parameter in net.parameters() if clip is None else ():
                parameter.grad *= 0.1 / norm
            if clip is not None:
                clip(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert bool(messages) == (clip is None), messages
    net = in_stages()
    for _ in range(3):
        net.train_step(*batch())
        norm = own_norm(net)
        for parameter in net.parameters():
            parameter.data -= 0.1 / norm * parameter.grad
        net.zero_grad()
    logging.getLogger("shardwright").removeHandler(handler)
    assert len(messages) == 2, messages
    assert "gradients were multiplied by" in messages[0] and "get_total_norm" in messages[0]
    assert "parameters were changed without an optimizer" in messages[1]


def check_tensors_of_other_stages_are_refused_by_name() -> None:
    net = in_stages()
    path = "net.two.0" if dist.get_rank() == 0 else "net.one.0"
    refused = pytest.raises(sw.PlanError, match=rf"'{path}\.weight' of .* another.*\n.*sw\.whole")
    for module in (net, deepcopy(net)):
        with refused:
            module.get_submodule(path).weight.normal_()
    with sw.whole(net):
        for each in ("net.two.0", "net.one.0"):
            net.get_submodule(each).weight.data.fill_(0.5)
    assert values(net)[f"{path}.weight"].unique().tolist() == [0.5]
    with refused:
        net.get_submodule(path).weight.sum()


def check_a_stage_loads_its_part_of_a_full_state_but_not_the_reverse() -> None:
    net, full = in_stages(), model(seed=3)
    net.load_state_dict(state_dict=full.state_dict())
    torch.testing.assert_close(values(net), dict(full.state_dict()))
    with pytest.raises(sw.PlanError, match=r"stage_ranks\.py:\d+\): the state.*\n.*load_check"):
        full.load_state_dict(net.state_dict())
    net.load_state_dict(net.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        full.load_state_dict({"unknown": torch.ones(1)})


def check_zip_pairs_each_time_models_with_the_same_stages() -> None:
    def average(first: nn.Module, second: nn.Module) -> int:
        pairs = zip(first.parameters(), second.parameters(), strict=False)
        return sum(p.numel() + q.numel() for p, q in pairs)

    net = in_stages()
    average(net, deepcopy(net))
    outer, full = nn.Sequential(nn.Sequential(net)), nn.Sequential(nn.Sequential(model()))
    average(outer, deepcopy(outer))
    for pair in ((net, model()), (model(), net), (outer, full), (full, outer)):
        with pytest.raises(sw.PlanError, match=r"`zip` \(.*stage_ranks\.py:\d+\) pairs"):
            average(*pair)


CHECKS = (
    check_options_and_steps_that_depend_on_one_stage_are_an_error,
    check_rates_of_each_layer_are_no_error,
    check_gradients_and_updates_that_are_scaled_by_one_stage_warn,
    check_tensors_of_other_stages_are_refused_by_name,
    check_a_stage_loads_its_part_of_a_full_state_but_not_the_reverse,
    check_zip_pairs_each_time_models_with_the_same_stages,
    check_norms_over_the_parameters_of_an_optimizer_are_of_all_stages,
    check_an_optimizer_of_other_parameters_does_not_load_that_of_a_stage,
    check_the_state_of_one_rank_is_not_saved,
    check_the_complete_model_is_saved,
    check_a_wrapper_of_the_model_is_like_it,
    check_distributed_checkpoints_have_all_ranks,
    check_ranks_collect_their_stages,
    check_a_stage_without_parameters_has_an_optimizer,
    check_an_optimizer_of_an_iterator_that_has_been_read_warns,
)


if __name__ == "__main__":
    run_checks(CHECKS)
