"""Checkpoints: on one device here, on four devices in one launch, a matrix of plans (slow)."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import shardwright as sw
from core.checkpoint.checkpoint_ranks import (
    OPTIMIZERS,
    PLANS,
    SAVED_AFTER,
    STEPS,
    Tied,
    check_loads,
    contents,
    model,
    save,
    train,
    undisturbed,
)
from shardwright.core.checkpoint.manifest import INFO_FILE
from torchrun import torchrun

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HERE = sw.Position(step=3, epoch=1, batch=1)


def launch(ranks: int, verbs: str, folder: Path, cases: list[str]) -> str:
    script = Path(__file__).with_name("checkpoint_ranks.py")
    return torchrun(script, ranks, verbs, str(folder), *cases, timeout=1000)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder and the output of a launch that finds the checkpoint of one device."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder, "one:adamw:batch")
    cases = ["model4:adamw:batch", "random4:adamw:batch", "one:adamw:batch"]
    yield folder, launch(4, "save,load,others", folder, cases)


@pytest.mark.distributed
@pytest.mark.parametrize("saved", ["model4", "random4", "one"])
@pytest.mark.parametrize("loaded", ["model4", "random4"])
def test_four_devices_go_on_from_what_another_plan_saved(
    four_ranks: tuple[Path, str], saved: str, loaded: str
) -> None:
    case = f"passed {saved}:adamw:batch to {loaded}:adamw:batch."
    assert case in four_ranks[1], four_ranks[1]


@pytest.mark.distributed
@pytest.mark.parametrize("saved", ["model4:adamw:batch", "random4:adamw:batch"])
def test_one_device_goes_on_from_what_four_saved(four_ranks: tuple[Path, str], saved: str) -> None:
    folder, output = four_ranks
    assert (folder / saved.replace(":", "-") / "step-3").is_dir(), output
    check_loads(folder, saved, "one:adamw:batch")


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["random numbers", "files", "damage"])
def test_four_devices_bring_back(four_ranks: tuple[Path, str], what: str) -> None:
    assert f"passed {what}." in four_ranks[1], four_ranks[1]


@pytest.mark.distributed
def test_an_ordinary_model_loads_the_files_that_four_devices_wrote(
    four_ranks: tuple[Path, str],
) -> None:
    folder, output = four_ranks
    assert (folder / "wanted.pt").exists(), output
    wanted = torch.load(folder / "wanted.pt")
    net = model(seed=1)
    net.load_state_dict(torch.load(folder / "whole.pt"))
    torch.testing.assert_close(net.state_dict(), wanted, rtol=0, atol=0)
    net = model(seed=1)
    safetensors.torch.load_model(net, folder / "whole.safetensors")
    torch.testing.assert_close(net.state_dict(), wanted, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.distributed
def test_every_plan_goes_on_from_what_every_plan_saved(tmp_path: Path) -> None:
    """9 plans × 9 plans × 2 optimizers, on 1, 2, 4 and 8 devices, in 1, 2 and 4 stages."""
    cases = [f"{plan}:{optimizer}:layer" for plan in PLANS for optimizer in OPTIMIZERS]
    worlds = sorted({world for world, _ in PLANS.values()})
    output = "".join(launch(world, "save", tmp_path, cases) for world in worlds)
    assert all(f"passed {case} saved." in output for case in cases), output
    output = "".join(launch(world, "load", tmp_path, cases) for world in worlds)
    for optimizer in OPTIMIZERS:
        for saved in PLANS:
            for loaded in PLANS:
                case = f"passed {saved}:{optimizer}:layer to {loaded}:{optimizer}:layer."
                assert case in output, f"not {case}\n{output}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_device_goes_on_from_its_own(
    tmp_path: Path, optimizer: str, asynchronous: bool
) -> None:
    case = f"one:{optimizer}:batch"
    save(tmp_path, case, asynchronous)
    check_loads(tmp_path, case, case)


def test_a_module_without_a_plan_is_saved_and_loaded_too(tmp_path: Path) -> None:
    losses, (wanted, _) = undisturbed("adamw")
    net = model(0)
    optimizer = OPTIMIZERS["adamw"](net)
    train(net, optimizer, range(SAVED_AFTER))
    sw.save_checkpoint(tmp_path, net, optimizer, position=HERE)
    other = model(1)
    optimizer = OPTIMIZERS["adamw"](other)
    assert sw.load_checkpoint(tmp_path, other, optimizer) == HERE
    torch.testing.assert_close(dict(contents(other, optimizer)), wanted, rtol=0, atol=0)
    assert train(other, optimizer, range(SAVED_AFTER, STEPS)) == losses[SAVED_AFTER:]


def test_pytorchs_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(8, 4)
    sw.save_checkpoint(tmp_path, net, position=HERE)
    wanted = net(x)
    net(x)
    sw.load_checkpoint(tmp_path, net)
    assert torch.equal(net(x), wanted)


def test_settings_of_the_optimizers_groups_are_restored(tmp_path: Path) -> None:
    def made(net: Tied, rate: float) -> torch.optim.Optimizer:
        first, *others = net.parameters()
        groups = [{"params": [first], "weight_decay": 0.5}, {"params": others}]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.5, 0.75))

    net = model(0)
    optimizer = made(net, 0.1)
    train(net, optimizer, range(1))
    sw.save_checkpoint(tmp_path, net, optimizer, position=HERE)
    other = model(0)
    restored = made(other, 0.2)
    sw.load_checkpoint(tmp_path, other, restored)
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.1]
    assert [group["weight_decay"] for group in restored.param_groups] == [0.5, 0.01]
    assert restored.param_groups[0]["betas"] == (0.5, 0.75)
    with pytest.raises(sw.CheckpointError, match="has 2 parameter groups, but this AdamW has 1"):
        sw.load_checkpoint(tmp_path, other, OPTIMIZERS["adamw"](other))


def test_a_parameter_that_has_no_state_yet_has_none_after_loading(tmp_path: Path) -> None:
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.AdamW(net.parameters())
    net[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sw.save_checkpoint(tmp_path, net, optimizer, position=HERE)
    restored = torch.optim.AdamW(net.parameters())
    sw.load_checkpoint(tmp_path, net, restored)
    used, unused = net[0].weight, net[1].weight
    assert torch.equal(restored.state[used]["exp_avg"], optimizer.state[used]["exp_avg"])
    assert not restored.state[unused]


def test_the_newest_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    net = model(0)
    for step in (8, 9, 10, 11):
        sw.save_checkpoint(tmp_path, net, position=sw.Position(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11"]
    assert sw.load_checkpoint(tmp_path, net).step == 11
    assert sw.load_checkpoint(tmp_path, net, step=10).step == 10


@pytest.mark.parametrize("keep", [0, -1])
def test_a_number_of_checkpoints_that_keeps_none_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(sw.CheckpointError, match=f"keep={keep} .*\n.*at least 1, or None"):
        sw.save_checkpoint(tmp_path, model(0), position=HERE, keep=keep)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path, model(0), position=HERE)
    sw.save_checkpoint(tmp_path, model(1), position=HERE)
    net = model(2)
    sw.load_checkpoint(tmp_path, net)
    assert torch.equal(net.hidden.weight, model(1).hidden.weight)


def test_it_says_which_plan_it_was_saved_under(tmp_path: Path) -> None:
    plan = PLANS["one"][1](model(0))
    sw.save_checkpoint(tmp_path, model(0), position=HERE, plan=plan)
    about = json.loads((tmp_path / "step-3" / INFO_FILE).read_text())
    assert (about["fingerprint"], about["devices"], about["version"]) == (plan.fingerprint, 1, 2)


def crash(*arguments: object) -> None:
    raise OSError("no space")


@pytest.mark.parametrize("where", ["write_data", "finish"])
def test_a_crash_leaves_nothing_that_looks_complete(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model(0)
    sw.save_checkpoint(tmp_path, net, position=sw.Position(1))
    with monkeypatch.context() as patch:
        patch.setattr(f"torch.distributed.checkpoint.filesystem.FileSystemWriter.{where}", crash)
        with pytest.raises(
            sw.CheckpointError, match=r"step-2: rank 0 cannot .*: OSError: no space"
        ):
            sw.save_checkpoint(tmp_path, net, position=sw.Position(2))
    assert (tmp_path / "step-2.partial").is_dir()
    assert sw.load_checkpoint(tmp_path, net).step == 1
    sw.save_checkpoint(tmp_path, net, position=sw.Position(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_after_a_crash_between_its_renames_the_earlier_checkpoint_of_a_step_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, net = Path.rename, model(2)
    sw.save_checkpoint(tmp_path, model(0), position=HERE)

    def crash_at_partial(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            crash()
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash_at_partial)
        with pytest.raises(sw.CheckpointError, match="no space"):
            sw.save_checkpoint(tmp_path, model(1), position=HERE)
    assert not (tmp_path / "step-3").exists()
    assert sw.load_checkpoint(tmp_path, net).step == 3
    assert torch.equal(net.hidden.weight, model(0).hidden.weight)
    sw.save_checkpoint(tmp_path, net, position=sw.Position(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]


def test_what_went_wrong_in_the_background_is_raised_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", crash)
    checkpoints = sw.Checkpoints(tmp_path, asynchronous=True)
    checkpoints.save(model(0), None, HERE)
    with pytest.raises(sw.CheckpointError, match=r"rank 0 cannot .*: OSError: no space"):
        checkpoints.wait()
    checkpoints.wait()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.save` does not tell it."""

    def fail(*_: Any) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", fail)
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    message = r"step-3: rank 0 cannot .*: no space left \(100 bytes are free\): RuntimeError: unexp"
    with pytest.raises(sw.CheckpointError, match=message):
        sw.Checkpoints(tmp_path).save(model(0), None, HERE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden": nn.Linear(8, 9)},
            r"'hidden\.weight' has shape \(8, 8\) in .*, \(9, 8\) in the model",
        ),
        ({"extra": nn.Linear(1, 1)}, r"the model has 'extra\.weight', the checkpoint does not"),
        ({"norm": nn.Identity()}, r"the checkpoint has 'norm\.weight', the model does not"),
    ],
)
def test_another_model_is_refused_by_its_first_parameter_that_differs(
    tmp_path: Path, change: dict[str, nn.Module], message: str
) -> None:
    sw.save_checkpoint(tmp_path, model(0), position=HERE)
    net = model(1)
    for name, module in change.items():
        net.add_module(name, module)
    before = net.embedding.weight.detach().clone()
    with pytest.raises(sw.CheckpointError, match=f"step-3 belongs to another model: {message}"):
        sw.load_checkpoint(tmp_path, net)
    assert torch.equal(net.embedding.weight, before)


def test_what_cannot_be_loaded_or_saved_is_said(tmp_path: Path) -> None:
    net = model(0)
    with pytest.raises(sw.CheckpointError, match="contains no complete checkpoint"):
        sw.load_checkpoint(tmp_path, net)
    sw.save_checkpoint(tmp_path, net, position=HERE)
    with pytest.raises(sw.CheckpointError, match="step-3 was saved without an optimizer"):
        sw.load_checkpoint(tmp_path, net, OPTIMIZERS["adamw"](net))
    with pytest.raises(sw.CheckpointError, match="step-4: the checkpoint folder does not exist"):
        sw.load_checkpoint(tmp_path, net, step=4)
    with pytest.raises(sw.CheckpointError, match=r"SGD has a parameter of shape \(16, 8\) that"):
        sw.save_checkpoint(tmp_path, net, OPTIMIZERS["momentum"](model(0)), position=HERE)
    (tmp_path / "step-3" / INFO_FILE).write_text('{"version": 9}')
    with pytest.raises(sw.CheckpointError, match="unsupported checkpoint version 9"):
        sw.load_checkpoint(tmp_path, net)


@pytest.mark.parametrize("name", ["step-3", "step-3.partial", "step-1.removed", "step-3.replaced"])
@pytest.mark.parametrize("kind", ["file", "pipe", "link to nothing"])
def test_what_is_not_a_folder_of_a_checkpoint_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = tmp_path / name
    if kind == "file":
        path.write_text("precious")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "nothing")
    with pytest.raises(sw.CheckpointError, match=f"{name} is not a folder.*\n.*another folder"):
        sw.save_checkpoint(tmp_path, model(0), position=HERE)
    assert sorted({each.name for each in tmp_path.iterdir()} - {".lock"}) == [name]
    assert kind != "file" or path.read_text() == "precious"


@pytest.mark.parametrize("step", [2, 3])
def test_of_a_checkpoint_that_was_moved_and_linked_only_the_link_is_removed(
    tmp_path: Path, step: int
) -> None:
    """Step 3 is saved: it replaces the link, or removes it as too old."""
    folder, moved = tmp_path / "run", tmp_path / "large disk"
    sw.save_checkpoint(folder, model(0), position=sw.Position(step))
    (folder / f"step-{step}").rename(moved)
    (folder / f"step-{step}").symlink_to(moved)
    sw.save_checkpoint(folder, model(1), position=HERE, keep=1)
    assert [path.name for path in folder.iterdir()] == ["step-3"]
    assert (moved / ".metadata").is_file()


@pytest.mark.parametrize("name", ["step-007", "step-٧", "step-7\n", "step--7"])
def test_folders_that_no_step_is_written_to_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    net = model(0)
    sw.save_checkpoint(tmp_path, net, position=sw.Position(1))
    (tmp_path / name).mkdir()
    assert sw.load_checkpoint(tmp_path, net) == sw.Position(1)


@pytest.mark.parametrize("name", ["step-final.removed", "step-٣.partial", "step-x.replaced"])
def test_a_folder_with_a_name_of_ones_own_is_no_leftover(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("precious")
    sw.save_checkpoint(tmp_path, model(0), position=HERE)
    assert (tmp_path / name / "notes.txt").read_text() == "precious"
