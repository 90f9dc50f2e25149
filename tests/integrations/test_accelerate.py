"""A model that `prepare` has planned trains under Accelerate as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from integrations import accelerate_ranks
from integrations.frameworks_cases import (
    OneProcess,
    assert_equal_runs,
    classifier,
    loader,
    optimizer_of,
    schedule_of,
)
from shardwright.errors import CheckpointError
from shardwright.integrations import accelerate
from torchrun import torchrun


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What two ranks print, and the folder in which they save."""
    folder = tmp_path_factory.mktemp("accelerate")
    return torchrun(Path(accelerate_ranks.__file__), 2, str(folder)), folder


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in accelerate_ranks.CHECKS])
def test_on_two_ranks(ranks: tuple[str, Path], check: str) -> None:
    assert f"passed {check}\n" in ranks[0], ranks[0]


@pytest.mark.distributed
def test_accelerate_on_one_process_reads_the_saved_state(ranks: tuple[str, Path]) -> None:
    output, folder = ranks
    assert "passed resumes_under_another_plan" in output
    one_process = OneProcess(accelerate_ranks.COUNT)
    one_process.epoch()
    wanted = one_process.epoch()
    try:
        accelerator = Accelerator(cpu=True)
        net = classifier(7)
        optimizer = optimizer_of(net)
        schedule = schedule_of(optimizer)
        prepared = accelerator.prepare(net, optimizer, loader(accelerate_ranks.COUNT), schedule)
        accelerator.load_state(str(folder / "tensor_parallel"))
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    one_process.net.load_state_dict(prepared[0].state_dict())
    one_process.optimizer.load_state_dict(prepared[1].optimizer.state_dict())
    one_process.schedule.load_state_dict(schedule.state_dict())
    assert_equal_runs(one_process.epoch(), wanted)
    assert (folder / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("content", ["[1, 2]", "[[1]]", "{}", "[[1, [2]]]", "text", ""])
def test_damaged_random_states_are_one_error(content: str, tmp_path: Path) -> None:
    (tmp_path / accelerate.RANDOM_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=accelerate.RANDOM_FILE):
        accelerate._load_model_shards([], str(tmp_path))
