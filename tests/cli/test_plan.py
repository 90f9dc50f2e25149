"""What `shardwright plan` prints beside the plan itself."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from config.mindformers.files import small
from shardwright.cli import app


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the MindFormers shape."""
    path = tmp_path_factory.mktemp("published") / "small.yaml"
    path.write_text(str(small(model__model_config__num_layers=1)))
    return path


def test_the_plan_of_a_published_file_says_how_its_batch_comes_about(published: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(published), "--devices", "8"])
    assert "global batch 8 = batch_size 2 · data_parallel 4 · " in result.stderr
    assert "global batch of 8 sequences of 32 tokens" in result.stdout


def test_every_shows_also_the_operators_that_only_follow(published: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(published), "--devices", "8"])
    silent = re.search(r"(\d+) more operators follow", result.stdout)
    assert silent is not None
    every = CliRunner().invoke(app, ["plan", str(published), "--devices", "8", "--every"])
    assert "more operators follow" not in every.stdout
    rows = [line for line in every.stdout.splitlines() if line.startswith("│ ")]
    assert len(rows) > int(silent[1])
