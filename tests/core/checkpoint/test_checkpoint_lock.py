"""Who may write into a folder of checkpoints."""

from pathlib import Path

import pytest
from torch import nn

import shardwright as sw
from core.checkpoint.lock_holder import FORK, holder
from shardwright.core.checkpoint import folder_lock
from shardwright.core.checkpoint.folder_lock import LOCK_FILE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]

HERE = sw.Position(step=3, epoch=1, batch=1)


def test_a_checkpoint_that_another_process_writes_is_not_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "MAX_WAIT_SECONDS", 0.1)
    partial = tmp_path / "step-2.partial"
    partial.mkdir()
    with holder(tmp_path) as other:
        said = rf"rank 0: .* is in use by process {other.pid} on "
        with pytest.raises(sw.CheckpointError, match=said):
            sw.save_checkpoint(tmp_path, nn.Linear(2, 2), position=HERE)
        assert partial.is_dir()
        assert not (tmp_path / "step-3").exists()
    sw.save_checkpoint(tmp_path, nn.Linear(2, 2), position=HERE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def save(folder: Path, net: nn.Module) -> None:
    folder_lock.MAX_WAIT_SECONDS = 0.1
    with pytest.raises(sw.CheckpointError, match="is in use by process "):
        sw.save_checkpoint(folder, net, position=HERE)


def test_a_folder_is_locked_from_the_first_save_until_the_run_ends(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    with sw.Checkpoints(tmp_path, asynchronous=True) as checkpoints:
        assert not (tmp_path / LOCK_FILE).exists()
        checkpoints.save(net, None, HERE)
        checkpoints.wait()
        # Its child may write; the child of a child is another run.
        between = FORK.Process(target=_in_a_child, args=(tmp_path, net))
        between.start()
        between.join(500)
        assert between.exitcode == 0
        checkpoints.save(net, None, sw.Position(step=4, epoch=1, batch=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]


def _in_a_child(folder: Path, net: nn.Module) -> None:
    process = FORK.Process(target=save, args=(folder, net))
    process.start()
    process.join(500)
    assert process.exitcode == 0
