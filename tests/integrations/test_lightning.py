"""Models that `ShardwrightStrategy` and `FabricStrategy` have planned train as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

import torch

from integrations import lightning_ranks
from integrations.frameworks_cases import OneProcess
from torchrun import torchrun


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What two ranks print, and the folder in which they save."""
    folder = tmp_path_factory.mktemp("lightning")
    return torchrun(Path(lightning_ranks.__file__), 2, str(folder)), folder


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in lightning_ranks.CHECKS])
def test_on_two_ranks(ranks: tuple[str, Path], check: str) -> None:
    assert f"passed {check}\n" in ranks[0], ranks[0]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["one.ckpt", "folder", "stages", "stages.ckpt"])
def test_lightning_reads_the_checkpoints(ranks: tuple[str, Path], name: str) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    output, folder = ranks
    assert "passed resumes_under_another_plan" in output
    path = folder / name
    if path.is_file():
        checkpoint = torch.load(path, weights_only=False)
    else:
        checkpoint = _load_distributed_checkpoint(path)
    one_process = OneProcess(lightning_ranks.COUNT)
    wanted = one_process.epoch().state
    state = checkpoint["state_dict"]
    found = {name: state[f"net.{name}"] for name in wanted}
    torch.testing.assert_close(found, dict(wanted), rtol=1e-4, atol=1e-6)
