"""What long commands are doing is said on stderr: on a terminal, or where it is asked for."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright.cli.options import check_output

OWN = """
model: {name: llama2_7b_tiny, arguments: {num_layers: 1}}
data: {name: text, seq_length: 32, batch_size: 8}
"""


def parts(stderr: str) -> list[str]:
    """What each line says, without its seconds."""
    return [line.split(" s  ", 1)[1] for line in stderr.splitlines() if " s  " in line]


def test_plan_says_each_part_on_stderr_and_leaves_stdout_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OWN)
    command = ["plan", str(path), "--devices", "2"]
    quiet = CliRunner().invoke(app, command)
    told = CliRunner().invoke(app, [*command, "--progress"])
    assert quiet.stderr == ""
    assert told.stdout.splitlines()[:-5] == quiet.stdout.splitlines()[:-5]
    assert "search: mem_coeff=0.1 (1 of 100)" in parts(told.stderr)


def test_tune_counts_its_values(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OWN)
    result = CliRunner().invoke(app, ["tune", str(path), "--devices", "2", "--progress"])
    said = parts(result.stderr)
    assert "mem_coeff 0.00625: search: mem_coeff=0.00625 (1 of 11)" in said
    last = said[-1].partition(",")[0]
    assert last == "mem_coeff 6553.6: memory (11 of 11"
    assert said[-1].endswith(" s left)")


def test_out_overwrites_neither_an_input_nor_a_file_of_another_kind(tmp_path: Path) -> None:
    config, plan, link = (tmp_path / name for name in ("run.yaml", "plan.json", "link.json"))
    config.write_text(OWN)
    plan.write_text("{}")
    link.symlink_to(config)
    command = ["plan", str(config), "--devices", "2", "--out"]
    for out, problem in ((config, "overwrite a file that"), (link, "overwrite a file that")):
        refused = CliRunner().invoke(app, [*command, str(out)]).exception
        assert isinstance(refused, sw.ConfigError) and problem in str(refused)
    refused = CliRunner().invoke(app, ["report", str(plan), "--out", str(config)]).exception
    assert isinstance(refused, sw.ConfigError)
    assert str(refused).endswith(
        f"not a .html file\nchoose another file, such as {tmp_path}/run.html"
    )
    assert config.read_text() == OWN


@pytest.mark.parametrize("name", ["plan.json", "PLAN.JSON", "plan", "new.txt"])
def test_out_may_be_a_file_of_the_same_kind_or_a_new_one(tmp_path: Path, name: str) -> None:
    if name != "new.txt":
        (tmp_path / name).touch()
    check_output(tmp_path / name, (".json",), tmp_path / "run.yaml", "h100", None)
