"""The command `init` copies configurations, from a checkout and from a wheel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardwright as sw
from features.full_disk_ranks import no_file_above
from shardwright.cli import app

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny" / "llama2_7b.yaml"


def test_init_lists_every_configuration_and_example_with_its_description() -> None:
    lines = CliRunner().invoke(app, ["init"]).output.splitlines()
    assert max(map(len, lines)) <= 80
    entries = dict(line.split(maxsplit=1) for line in lines if not line.startswith(" "))
    assert entries["tiny/llama2_7b"] == "LLaMA 2 7B, tiny: trains on one machine"
    assert entries["examples/from_model_to_report.ipynb"] == "From a model to its report"
    names = entries.keys()
    configs = [name for name in names if not name.startswith("examples/")]
    assert len(configs) == len(list((ROOT / "configs").rglob("*.yaml"))) > 0
    examples = {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.*")}
    assert {"llama2_70b_auto", "tiny/llama2_7b", *examples} <= names


def test_init_copies_one_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = ["init", "tiny/llama2_7b"]
    assert CliRunner().invoke(app, copy).output == "written to llama2_7b.yaml\n"
    assert Path("llama2_7b.yaml").read_bytes() == TINY.read_bytes()
    Path("llama2_7b.yaml").write_text("mine")
    refused = CliRunner().invoke(app, copy).exception
    assert isinstance(refused, sw.ConfigError)
    assert "already exists" in str(refused)
    assert Path("llama2_7b.yaml").read_text() == "mine"
    assert CliRunner().invoke(app, [*copy, "--out", "other.yaml"]).exit_code == 0
    assert Path("other.yaml").read_bytes() == TINY.read_bytes()


def test_an_unknown_name_is_refused_with_those_that_contain_it() -> None:
    refused = CliRunner().invoke(app, ["init", "llama2_70b"]).exception
    assert isinstance(refused, sw.ConfigError)
    assert str(refused).endswith("llama2_70b_auto, llama2_70b_expert, tiny/llama2_70b")


@pytest.mark.parametrize("family", ["llama", "llama2", "qwen", "baichuan", "pangualpha"])
def test_a_family_is_its_smallest_configuration(family: str, tmp_path: Path) -> None:
    copy = tmp_path / "run.yaml"
    assert CliRunner().invoke(app, ["init", family, "--out", str(copy)]).exit_code == 0
    tiny = (ROOT / "configs" / "tiny").glob(f"{family}*.yaml")
    assert copy.read_bytes() in [file.read_bytes() for file in tiny]


@pytest.mark.slow
def test_an_installed_wheel_holds_the_configurations_and_all_data(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")

    def python(*arguments: str, path: str = "") -> str:
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    python(
        "-m", "pip", "install", "-q", "--no-deps", "--no-index", f"--target={target}", str(wheel)
    )
    package = target / "shardwright"
    files = {
        file.relative_to(ROOT / "src" / "shardwright")
        for file in (ROOT / "src" / "shardwright").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert [str(file) for file in sorted(files) if not (package / file).is_file()] == []
    copied = tmp_path / "copied.yaml"
    command = ["init", "tiny/llama2_7b", "--out", str(copied)]
    run = f"import sys, shardwright; sys.argv[1:] = {command}; print(shardwright.__file__)\n"
    run += "from shardwright.__main__ import run_command; run_command()"
    assert python("-c", run, path=str(target)).startswith(str(package))
    assert copied.read_bytes() == TINY.read_bytes()
    assert (package / "examples" / "demo.py").is_file()


def test_a_full_disk_leaves_no_part_of_a_copy(tmp_path: Path) -> None:
    copy = tmp_path / "run.yaml"
    with no_file_above(20):
        refused = CliRunner().invoke(app, ["init", "llama", "--out", str(copy)]).exception
    assert isinstance(refused, OSError)
    assert (refused.strerror, refused.filename) == ("File too large", str(copy))
    assert not copy.exists()
