"""What long commands are doing is said on stderr: on a terminal, or where it is asked for."""

from pathlib import Path

from typer.testing import CliRunner

from shardwright.cli import app

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
