"""Runs that are stopped, killed or left hanging, from the command line."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from benchmarks.kills import kill_at_random

import shardwright as sw
from random_cases import first_seed
from shardwright import cli
from shardwright.core.checkpoint import folder_lock
from shardwright.run.config import Run
from shardwright.run.launch.launch import launch
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.rank_failure import RankFailedError

MODEL = """
import torch
from torch import nn

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    return x, torch.randint(4, (64,), generator=generator)

class Perceptron(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(16, 32, bias=False)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(32, 4)

    def forward(self, x):
        return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))
"""
CONFIG = """
model: {{target: "model_of_the_faults:Perceptron", arguments: {{dropout: {dropout}}}}}
data: {{target: "model_of_the_faults:data", batch_size: 8}}
optimizer: {{name: adamw, learning_rate: 0.003}}
train:
  {{epochs: 1000, steps: {steps}, dtype: float64, checkpoint: {{folder: {folder}, every: {every}}}}}
"""


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "model_of_the_faults", raising=False)
    (run_folder / "model_of_the_faults.py").write_text(MODEL)
    return run_folder


def configure(name: str, steps: int, every: int, dropout: float = 0.0) -> str:
    text = CONFIG.format(steps=steps, every=every, dropout=dropout, folder=name)
    Path(f"{name}.yaml").write_text(text)
    return f"{name}.yaml"


def train(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`shardwright train` in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["shardwright", "train", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def steps(logs: str) -> list[tuple[int, int, float]]:
    lines = (LogFolder(Path(logs)).steps(0)).read_text().splitlines()
    return [(s["epoch"], s["step"], s["loss"]) for s in map(json.loads, lines)]


def assert_same_steps(got: str, wanted: str, tolerance: float) -> None:
    """Each step once, in order, with equal losses."""
    mine, theirs = steps(got), steps(wanted)
    assert [place[:2] for place in mine] == [place[:2] for place in theirs]
    assert [loss for *_, loss in mine] == pytest.approx(
        [loss for *_, loss in theirs], rel=tolerance, abs=tolerance
    )


def final(config: str) -> dict[str, torch.Tensor]:
    """The parameters and buffers of the newest checkpoint."""
    run = Run.from_file(config)
    net = run.model()
    checkpoints = run.checkpoints()
    assert checkpoints is not None
    sw.load_checkpoint(checkpoints.folder, net)
    return net.state_dict()


def test_a_run_that_is_resumed_is_the_run_that_was_not_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the middle of an epoch, with dropout, and batch norm."""
    assert train(monkeypatch, configure("a", 20, 7, dropout=0.5), "--log-dir", "one") == 0
    assert train(monkeypatch, configure("b", 11, 7, dropout=0.5), "--log-dir", "two") == 0
    assert sorted(path.name for path in Path("b").iterdir()) == ["step-11", "step-7"]
    resumed = configure("b", 20, 7, dropout=0.5)
    capsys.readouterr()
    assert train(monkeypatch, resumed, "--log-dir", "two", "--resume") == 0
    assert capsys.readouterr().out.startswith("resuming after step 11\n")
    assert_same_steps("two", "one", tolerance=0)
    torch.testing.assert_close(final("b.yaml"), final("a.yaml"), rtol=0, atol=0)
    assert train(monkeypatch, resumed, "--log-dir", "two", "--resume") == 0
    assert_same_steps("two", "one", tolerance=0)


@pytest.mark.distributed
@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_whose_newest_checkpoint_is_damaged_resumes_from_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], devices: str
) -> None:
    on = ("--devices", devices)
    assert train(monkeypatch, configure("a", 20, 7), *on, "--log-dir", "one") == 0
    assert train(monkeypatch, configure("b", 11, 7), *on, "--log-dir", "two") == 0
    damaged = sorted(Path("b/step-11").glob("*.distcp"), key=lambda file: file.stat().st_size)[-1]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    capfd.readouterr()
    assert train(monkeypatch, configure("b", 20, 7), *on, "--log-dir", "two", "--resume") == 0
    first, second, *_ = capfd.readouterr().out.splitlines()
    assert first.startswith(f"warning: {damaged} is damaged: its checksum does not match")
    assert first.endswith("step-7 is used instead")
    assert second == "resuming after step 7"
    assert_same_steps("two", "one", tolerance=0)
    torch.testing.assert_close(final("b.yaml"), final("a.yaml"), rtol=0, atol=0)


def test_another_runs_checkpoints_are_neither_taken_nor_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure("a", 3, 2)
    assert train(monkeypatch, config) == 0
    capsys.readouterr()
    assert train(monkeypatch, config) == 2
    said = capsys.readouterr().err
    assert said == (
        "error: a already contains checkpoints of a run, up to step 3\n"
        "  resume that run with --resume, or set `train.checkpoint.folder` to another folder\n"
    )
    without = Path(config).read_text().replace(", checkpoint: {folder: a, every: 2}", "")
    Path("without.yaml").write_text(without)
    assert train(monkeypatch, "without.yaml", "--resume") == 2
    said = capsys.readouterr().err
    assert "nothing to resume: the key `train.checkpoint` is not set" in said
    assert "set it, for example `train: {checkpoint: " in said


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "shardwright", "train", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=-1
    )
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.distributed
def test_a_second_run_into_the_same_folders_is_refused_and_says_who_holds_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_lock, "MAX_WAIT_SECONDS", 0.1)
    config = configure("a", 10**6, 10)
    with running(config, "--log-dir", "logs") as process:
        wait_for_steps(process, "logs", 30)
        done = steps("logs")
        for logs, locked in (("logs", "logs"), ("other", "a")):
            assert train(monkeypatch, config, "--log-dir", logs, "--resume") == 2
            said = capsys.readouterr().err
            assert re.fullmatch(
                rf"error: \S+/{locked} is in use by process {process.pid} on .*\n  wait until .*\n",
                said,
            )
        assert not Path("other").exists()
        assert steps("logs")[: len(done)] == done


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """The ranks' processes, while the launching process is there."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        return [int(pid) for pid in children.read_text().split()]
    except FileNotFoundError:
        return []


def wait_for_steps(process: subprocess.Popen[str], logs: str, count: int) -> None:
    """Until so many steps are recorded that no later restart takes back."""
    path = LogFolder(Path(logs)).steps(0)
    while process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.01)


@pytest.mark.distributed
def test_a_killed_rank_costs_no_step_and_none_is_done_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(monkeypatch, configure("one", 120, 40), "--log-dir", "logs_one") == 0
    config = configure("two", 120, 40)
    arguments = (config, "--log-dir", "logs_two", "--devices", "2", "--max-restarts", "1")
    with running(*arguments) as process:
        wait_for_steps(process, "logs_two", 50)
        os.kill(ranks(process)[1], 9)
        output, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert "a rank failed: restart 1 of 1; its log: logs_two/1/rank.*/stderr.attempt-0" in output
    assert "resuming after step " in output
    assert_same_steps("logs_two", "logs_one", tolerance=1e-11)
    torch.testing.assert_close(final("two.yaml"), final("one.yaml"), rtol=1e-9, atol=1e-11)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("where", "named"),
    [
        pytest.param(
            "forward",
            r"in `inner_bias_output = all_to_all_dim1_to_dim0_a\(inner\)`",
            marks=pytest.mark.slow,
        ),
        pytest.param("call", "in the comparison of the ranks' calls", marks=pytest.mark.slow),
        pytest.param("stages", "in an exchange between pipeline stages", marks=pytest.mark.slow),
        pytest.param(
            "gradients",
            "in the comparison of the ranks' gradients of outputs",
            marks=pytest.mark.slow,
        ),
        (
            "backward",
            r"in the gradient of `outer_bias_output_1 = slice_dim0_a\(outer_bias_output\)`",
        ),
    ],
)
def test_a_rank_that_does_not_come_is_told_by_the_redistribution_that_waited(
    tmp_path: Path, where: str, named: str
) -> None:
    script = Path(__file__).with_name("hanging_ranks.py")
    logs, ready = LogFolder(tmp_path / "logs"), tmp_path / "ready"
    logs.clear(2)
    ready.mkdir()
    with pytest.raises(RankFailedError) as caught:
        launch([str(script), where, str(ready)], 2, logs)
    in_program = where in ("forward", "backward")
    place = named + (r" \(line \d+ of the program, (relu|square)\)" if in_program else "")
    first, second = str(caught.value).splitlines()
    assert re.match(r"rank 1 \(process \d+\) did not answer the other ranks; its log: .*", first)
    # Gloo says one or the other, as the pair of sockets or the operation ends first.
    reason = "(Timed out waiting 10000ms for |Application timeout caused pair closure)"
    assert re.match(rf"rank 0: communication failed {place}, as .*: {reason}", second)


@pytest.mark.slow
@pytest.mark.random
@pytest.mark.distributed
def test_kills_at_random_moments_leave_the_parameters_of_an_undisturbed_run(folder: Path) -> None:
    """Of ranks, of two at once and of launchers; while processes start, while they train, while
    files are written. With dropout, to the last bit."""
    report = kill_at_random(folder, 9, first_seed())
    assert len(report.kills) == 9
    assert report.is_undisturbed, report


@pytest.mark.slow
@pytest.mark.distributed
def test_it_goes_on_with_the_devices_that_are_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(monkeypatch, configure("one", 600, 20), "--log-dir", "logs_one") == 0
    config = configure("fewer", 600, 20)
    with running(config, "--log-dir", "logs_fewer", "--elastic", "2:4") as process:
        wait_for_steps(process, "logs_fewer", 100)
        os.kill(ranks(process)[3], 9)
        output, error = process.communicate(timeout=200)
    assert process.returncode == 0
    assert re.fullmatch(
        "(?s)all operators are replicated: no operator can be sharded over 3 devices .*\n", error
    )
    assert "was killed by SIGKILL; devices left: 3; continuing on 2" in output
    assert_same_steps("logs_fewer", "logs_one", tolerance=1e-9)
    torch.testing.assert_close(final("fewer.yaml"), final("one.yaml"), rtol=1e-8, atol=1e-10)
