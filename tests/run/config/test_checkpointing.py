"""A resumed run does what its configuration says, whatever that said when it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import shardwright as sw
from shardwright.core.checkpoint.position import BEGINNING, Position
from shardwright.errors import CheckpointError
from shardwright.run.config import Run
from shardwright.run.config.training import train_rank
from shardwright.run.launch.process_group import World
from shardwright.run.loop.loop import train
from shardwright.run.loop.step_log import StepRecord

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG: dict[str, dict[str, Any]] = {
    "model": {"target": "run.config.resume_case:network"},
    "data": {"target": "run.config.resume_case:samples", "batch_size": 4},
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "train": {"epochs": 2, "checkpoint": {"every": 3}},
}
SAVED_AT = 3
Weights = dict[str, torch.Tensor]


def configured(folder: Path, changes: dict[str, dict[str, Any]]) -> Run:
    content = {key: {**section, **changes.get(key, {})} for key, section in CONFIG.items()}
    (folder / "run.yaml").write_text(yaml.safe_dump({"loss": "mse", **content}))
    return Run.from_file(folder / "run.yaml")


def trained(folder: Path, **changes: dict[str, Any]) -> list[StepRecord]:
    run, steps = configured(folder, changes), list[StepRecord]()
    train_rank(run, run.plan(1), World(0, 1, 0, 1), steps.append)
    return steps


def interrupted(folder: Path, **changes: dict[str, Any]) -> None:
    trained(folder, **{**changes, "train": {**changes.get("train", {}), "steps": SAVED_AT}})


def resumed(folder: Path, **changes: dict[str, Any]) -> list[StepRecord]:
    settings = {**CONFIG["train"], **changes.get("train", {}), "resume": True}
    return trained(folder, **{**changes, "train": settings})


def final_weights(folder: Path, step: int, dtype: torch.dtype = torch.float32) -> Weights:
    """Those of the final checkpoint."""
    checkpoints = sw.Checkpoints(folder / "checkpoints")
    assert checkpoints.newest() == step
    net = configured(folder, {}).model().to(dtype)
    checkpoints.load(net)
    return net.state_dict()


def never_interrupted(
    folder: Path, change: Callable[[torch.optim.Optimizer], None], **changes: dict[str, Any]
) -> Weights:
    """What a run comes to whose optimizer is changed after the step of the checkpoint."""
    before, after = configured(folder, {}), configured(folder, changes)
    net = before.model()
    optimizer = before.optimizer(net)
    places = [BEGINNING]
    where: dict[str, Any] = {"epochs": 2, "device": torch.device("cpu"), "on_step": lambda _: None}
    where["after_step"] = places.append
    train(net, optimizer, before.batches, max_steps=SAVED_AT, **where)
    change(optimizer)
    settings = after.config.optimizer
    last = after.last_step(places[-1])
    schedule = None if settings.schedule is None else after.rate(last)
    where |= {"rate": schedule, "clip_norm": settings.clip_norm}
    train(net, optimizer, after.batches, start=places[-1], **where)
    return net.state_dict()


def with_settings(**settings: Any) -> Callable[[torch.optim.Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[0].update(settings)


@pytest.mark.parametrize(
    ("changed", "change"),
    [
        ({"learning_rate": 1.0}, with_settings(lr=1.0)),
        ({"weight_decay": 0.5}, with_settings(weight_decay=0.5)),
        ({"betas": [0.5, 0.5]}, with_settings(betas=(0.5, 0.5))),
        ({"eps": 0.1}, with_settings(eps=0.1)),
        ({"clip_norm": 0.01}, with_settings()),
        ({"schedule": {"kind": "cosine", "warmup_steps": 5}}, with_settings()),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_changed_setting_of_the_optimizer_is_applied(
    tmp_path: Path, changed: dict[str, Any], change: Callable[[torch.optim.Optimizer], None]
) -> None:
    optimizer = {**CONFIG["optimizer"], **changed}
    wanted = never_interrupted(tmp_path, change, optimizer=optimizer)
    unchanged = never_interrupted(tmp_path, with_settings())
    interrupted(tmp_path)
    assert len(resumed(tmp_path, optimizer=optimizer)) == 10 - SAVED_AT
    found = final_weights(tmp_path, 10)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not torch.equal(found["net.0.weight"], unchanged["net.0.weight"])


def test_a_schedule_that_is_taken_away_leaves_the_rate_of_the_configuration(
    tmp_path: Path,
) -> None:
    schedule = {"kind": "linear", "warmup_steps": 2}
    interrupted(tmp_path, optimizer={**CONFIG["optimizer"], "schedule": schedule})
    resumed(tmp_path)
    groups = sw.Checkpoints(tmp_path / "checkpoints").select()[1].groups
    assert groups is not None and groups[0]["lr"] == 0.01


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_another_optimizer_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    interrupted(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"(?s)saved with AdamW.*use AdamW.*train\.load: .*step-"
    ):
        resumed(tmp_path, optimizer={"name": name})


def test_momentum_can_be_added(tmp_path: Path) -> None:
    interrupted(tmp_path, optimizer={"name": "sgd"})
    assert len(resumed(tmp_path, optimizer={"name": "momentum", "momentum": 0.9})) == 7
    groups = sw.Checkpoints(tmp_path / "checkpoints").select()[1].groups
    assert groups is not None and groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_another_dtype_is_that_of_what_is_trained_from_then_on(tmp_path: Path, dtype: str) -> None:
    interrupted(tmp_path)
    before = final_weights(tmp_path, SAVED_AT)
    rate = {**CONFIG["optimizer"], "learning_rate": 1e-9, "weight_decay": 0.0}
    resumed(tmp_path, train={"dtype": dtype}, optimizer=rate)
    found = final_weights(tmp_path, 10, getattr(torch, dtype))
    torch.testing.assert_close(
        found,
        {name: value.to(found[name].dtype) for name, value in before.items()},
        atol=1e-7,
        rtol=0,
    )
    reader = sw.core.checkpoint.storage.CheckpointReader(tmp_path / "checkpoints" / "step-10")
    saved = reader.read_metadata().state_dict_metadata
    for key in ("model.net.0.weight", "optimizer.net.0.weight.exp_avg"):
        assert saved[key].properties.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (4, 7), (4, 20), (5, 4), (4, 4)])
def test_another_batch_size_goes_on_at_the_next_sample(
    tmp_path: Path, before: int, after: int
) -> None:
    interrupted(tmp_path, data={"batch_size": before})
    done = SAVED_AT * before
    epoch, sample = divmod(done, 20) if before != 8 else (1, 8)  # 2 batches of 8 are an epoch
    steps = resumed(tmp_path, data={"batch_size": after})
    wanted = (20 - sample) // after + (1 - epoch) * (20 // after)
    assert len(steps) == wanted > 0
    places = [(step.epoch, step.step) for step in steps]
    assert places == sorted(set(places))
    final_weights(tmp_path, SAVED_AT + wanted)


def test_the_rest_of_an_epoch_is_the_same_samples_in_batches_of_any_size() -> None:
    batches = {
        size: sw.run.data.data.Batches((torch.arange(97),), size, seed=5) for size in (1, 3, 8, 20)
    }
    order = [int(rows[0]) for (rows,) in batches[1].epoch(1)]
    for sizes in ([8, 3, 20, 3, 8], [20, 20, 1, 8, 8], [3, 3, 3, 20, 20]):
        position, trained_samples = Position(7, 1), list[int]()
        for size in sizes:
            rows = next(batches[size].epoch(1, batches[size].first_sample(position)))[0]
            trained_samples += rows.tolist()
            position = batches[size].position_after(position)
        assert position == Position(12, 1, 5, sum(sizes))
        assert trained_samples == order[: sum(sizes)]
    assert batches[20].position_after(Position(12, 1, 4, 70)) == Position(13, 2, 0, 0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 1}, r"`data\.seed` is 1, but was 0"),
        ({"arguments": {"count": 28}}, "the number of samples is 28, but was 20"),
    ],
)
def test_another_order_is_refused_in_mid_epoch_and_taken_at_its_end(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    data = {**CONFIG["data"], **changed}
    interrupted(tmp_path)
    with pytest.raises(CheckpointError, match=f"{named} when .*step-3 was saved in the middle"):
        resumed(tmp_path, data=data)
    resumed(tmp_path, train={"steps": 5})
    assert len(resumed(tmp_path, data=data)) == (28 if "arguments" in changed else 20) // 4


def test_another_seed_draws_other_random_numbers(tmp_path: Path) -> None:
    ends = []
    for seed in (1, 1, 2):
        folder = tmp_path / str(len(ends))
        folder.mkdir()
        interrupted(folder)
        resumed(folder, train={"seed": seed})
        ends.append(final_weights(folder, 10)["net.0.weight"])
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_run_that_is_done_trains_nothing_more(tmp_path: Path) -> None:
    interrupted(tmp_path)
    assert resumed(tmp_path, train={"steps": 2}) == []
    assert resumed(tmp_path, data={"batch_size": 20}, train={"epochs": 1}) == []
    assert sw.Checkpoints(tmp_path / "checkpoints").steps() == [SAVED_AT]


def test_python_code_is_told_which_settings_the_checkpoint_replaces(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    sw.save_checkpoint(
        tmp_path, net, torch.optim.SGD(net.parameters(), lr=0.5), position=Position(1)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    with pytest.warns(
        UserWarning, match=r"SGD were restored: lr=0\.5 replaces 0\.25\nto use"
    ) as warned:
        sw.load_checkpoint(tmp_path, net, optimizer)
    # Without the warnings of PyTorch's own code.
    own = [each for each in warned if "were restored" in str(each.message)]
    assert {each.filename for each in own} == {__file__}
    with pytest.raises(CheckpointError, match="saved with SGD"):
        sw.load_checkpoint(tmp_path, net, torch.optim.AdamW(net.parameters()))


def test_a_run_resumes_without_the_initial_weights_that_its_checkpoint_has_replaced(
    tmp_path: Path,
) -> None:
    initial = configured(tmp_path, {}).model().state_dict()
    torch.save(initial, tmp_path / "initial.pt")
    interrupted(tmp_path, train={"load": "initial.pt"})
    (tmp_path / "initial.pt").unlink()
    with pytest.raises(CheckpointError, match=r"initial\.pt: no such file"):
        configured(tmp_path, {"train": {"load": "initial.pt"}}).checkpoint_policy.check()
    resumes = {"load": "initial.pt", "resume": True}
    configured(tmp_path, {"train": resumes}).checkpoint_policy.check()
    assert len(resumed(tmp_path, train={"load": "initial.pt"})) == 10 - SAVED_AT
