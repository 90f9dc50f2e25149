"""All code that the page for users of MindSpore gives as a counterpart runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import shardwright as sw
from markdown_fences import ROOT
from mindformers.files import small
from shardwright.cli import app
from shardwright.run.config import parse
from test_docs import check_spelling

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
MODEL = "model: {name: llama2_7b_tiny}\n"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(784, 512)
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.relu1(self.layer1(x)))


def with_loss() -> nn.Module:
    return sw.WithLoss(Network(), nn.L1Loss())


def counterparts() -> Iterator[str]:
    """The code of the right columns of the tables on MindSpore."""
    section = PAGE[PAGE.index("## MindSpore") : PAGE.index("## Megatron-LM")]
    for line in section.splitlines():
        if line.startswith("| ") and not line.endswith("| Shardwright |"):
            _, right = re.fullmatch(r"\| (.*?) \| (.*) \|", line).groups()  # type: ignore[union-attr]
            yield from re.findall("`([^`]+)`", right)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.yaml").write_text(MODEL)
    (tmp_path / "mindformers.yaml").write_text(json.dumps(small()))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    x, y = torch.randn(32, 784), torch.randn(32, 8)
    staged, batch = sw.Pipeline(with_loss(), 4), (x, y)
    names = {"torch": torch, "sw": sw, "Network": Network, "x": x, "y": y, "batch": batch}
    names |= {"batches": [batch], "dataset": TensorDataset(*batch), "model": with_loss()}
    return {**names, "planned": sw.parallelize(staged, sw.plan(staged, batch, devices=1))}


@pytest.mark.distributed
def test_the_counterparts_of_calls_of_mindspore_run(names: dict[str, Any]) -> None:
    found = [*counterparts()]
    assert len(found) > 60
    for code in found:
        if code.startswith("shardwright train"):
            check_spelling(shlex.split(code))
        elif code.startswith("shardwright "):
            result = CliRunner().invoke(app, shlex.split(code)[1:], catch_exceptions=False)
            assert result.exit_code == 0, f"{code}\n{result.output}"
        elif re.match(r"(parallel|data|train): \{", code):
            assert parse(MODEL + code)
        # Names alone, such as that of a method of the user's.
        elif not re.fullmatch(r"\w+", code):
            exec(code, names)


def test_options_after_a_script_are_the_scripts(names: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["launch", "train.py", "--devices", "8"])
    assert result.exit_code == 2
    assert "shardwright launch --devices 8 train.py" in re.sub(r"\W*\n\W*", " ", result.output)
