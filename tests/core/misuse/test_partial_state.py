"""What one rank has of a model or an optimizer is not saved as if it were all."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import shardwright as sw
from core.misuse.stage_ranks import batch, in_stages, model, sharded
from shardwright.core.api.lone_rank import fake_process_group
from shardwright.errors import PlanError

PLANS: dict[str, Callable[[], Any]] = {
    "a stage of one device": in_stages,
    "a stage of two devices": lambda: in_stages(4),
    "shards": sharded,
}
DEVICES = {"a stage of two devices": 4}


@pytest.fixture(scope="module", params=PLANS)
def planned(request: pytest.FixtureRequest) -> tuple[Any, torch.optim.Optimizer]:
    """What a rank has of a model, and of its optimizer after a step."""
    with fake_process_group(0, DEVICES.get(request.param, 2)):
        net = PLANS[request.param]()
        optimizer = torch.optim.AdamW(net.parameters())
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return net, optimizer


def saved(content: object, **options: Any) -> None:
    torch.save(content, io.BytesIO(), **options)


def sent(content: object) -> None:
    one, other = multiprocessing.Pipe()
    with one, other:
        one.send(content)


REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "the state dict": lambda net, _: saved(net.state_dict()),
    "in the old format": lambda net, _: saved(
        net.state_dict(), _use_new_zipfile_serialization=False
    ),
    "beside the optimizer": lambda net, o: saved({"net": net.state_dict(), "o": o.state_dict()}),
    "the state of the optimizer": lambda _, o: saved(o.state_dict()),
    "a copy of it": lambda _, o: saved(copy.deepcopy(o.state_dict())),
    "the optimizer": lambda _, o: saved(o),
    "the model": lambda net, _: saved(net),
    "the model that is wrapped": lambda net, _: saved(net.net),
    "a list of parameters": lambda net, _: saved([*net.parameters()]),
    "parameters by name": lambda net, _: saved(net.state_dict(keep_vars=True)),
    "a part of the state dict": lambda net, _: saved(net.net.state_dict()),
    "a copy of the state dict": lambda net, _: saved(copy.deepcopy(net.state_dict())),
    "another dict": lambda net, _: saved({n: v.cpu() for n, v in net.state_dict().items()}),
    "other tensors": lambda net, _: saved([v.detach().half() for v in net.state_dict().values()]),
    "pickled": lambda net, _: pickle.dumps(net.state_dict()),
    "sent to a process": lambda net, _: sent(net.state_dict()),
    "a tensor of the state": lambda net, _: saved(net.state_dict()["net.one.0.weight"]),
}


@pytest.mark.parametrize("save", REFUSED.values(), ids=REFUSED)
def test_state_of_one_rank_is_not_saved(planned: Any, save: Callable[[Any, Any], object]) -> None:
    with pytest.raises(PlanError, match=r"sw\.save_state_dict\(net, path\)"):
        save(*planned)


SAFETENSORS: dict[str, Callable[[Any, Path], object]] = {
    "save_file": lambda net, file: safetensors.torch.save_file(net.state_dict(), file),
    "save": lambda net, _: safetensors.torch.save(dict(net.state_dict())),
    "save_model": lambda net, file: safetensors.torch.save_model(net, str(file)),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("save", SAFETENSORS.values(), ids=SAFETENSORS)
def test_safetensors_of_one_rank_are_not_saved(planned: Any, save: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"(?s)test_partial_state\.py:\d+\).* `sw\.save_state_dict"):
        save(planned[0], tmp_path / "net.safetensors")
    assert not [*tmp_path.iterdir()]


def test_copies_are_made_and_loaded_as_ever(planned: Any) -> None:
    net, optimizer = planned
    state = net.state_dict()
    for copied in (
        copy.copy(state),
        copy.deepcopy(state),
        {n: v.clone() for n, v in state.items()},
    ):
        assert all(torch.equal(local(copied[name]), local(v)) for name, v in state.items())
        net.load_state_dict(copied)
    for value in state.values():
        assert torch.equal(local(copy.copy(value)), local(value))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert {type(v) for s in optimizer.state.values() for v in s.values()} <= {Tensor, DTensor}
    other = copy.deepcopy(net)
    with pytest.raises(PlanError, match=r"sw\.save_state_dict"):
        saved(other.state_dict())
    optimizer.step()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_what_is_complete_on_this_rank_is_saved(tmp_path: Path) -> None:
    with fake_process_group(0, 2):
        net = in_stages()
        half = net.net.one.state_dict()
        assert all(type(value) is Tensor for value in half.values())
        torch.save(half, tmp_path / "one.pt")
        safetensors.torch.save_model(net.net.one, str(tmp_path / "one.safetensors"))
        for read in (torch.load, safetensors.torch.load_file):
            suffix = "pt" if read is torch.load else "safetensors"
            torch.testing.assert_close(dict(read(tmp_path / f"one.{suffix}")), dict(half))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        saved([optimizer.state_dict(), scheduler.state_dict()])


def test_replicated_parameters_are_saved_as_before() -> None:
    with fake_process_group(0, 2):
        net = sw.parallelize(model(), sw.plan(model(), batch(), devices=2, mode="data_parallel"))
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        net.load_state_dict(torch.load(file))


def test_other_tensors_are_saved_as_before() -> None:
    with fake_process_group(0, 2):
        sharded()
        mesh = init_device_mesh("cpu", (2,))
        mine = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        saved([mine, nn.Linear(2, 2).state_dict(), nn.Linear(2, 2)])
