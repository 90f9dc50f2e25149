"""The command line, on small models that the tests write; real runs start two processes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwright as sw
from forked import python
from shardwright import cli

MODEL = """
import torch
from torch import nn

def data(samples=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 16, generator=generator)
    return x, torch.randint(4, (samples,), generator=generator)

class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

class Activated(Perceptron):
    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

class Branching(Perceptron):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return super().forward(x)
"""
CONFIG = """
model: {target: "small_models_of_the_cli:Perceptron"}
data: {target: "small_models_of_the_cli:data", batch_size: 8}
optimizer: {name: momentum, learning_rate: 0.1, momentum: 0.9}
train: {epochs: 2, log_every: 4, dtype: float64}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_models_of_the_cli.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> "Command":
    return Command(monkeypatch, capfd)


class Command:
    """Runs `shardwright` in this process: its exit status, stdout and stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd
        # Modules of an earlier test's folder must not answer for this one's.
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "small_models_of_the_cli", raising=False)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = self._capfd.readouterr()
        return int(caught.value.code or 0), output.out, output.err


def losses(folder: Path) -> list[float]:
    lines = (folder / "1" / "rank.0" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_version_is_the_packages_and_stands_beside_torchs(command: Command) -> None:
    status, out, err = command("--version")
    assert (status, err) == (0, "")
    release = torch.__version__.partition("+")[0]  # what follows names the build's CUDA
    assert out.startswith(f"shardwright {sw.__version__} (torch {release}")


def test_plan_prints_a_table_or_json_and_saves(command: Command, folder: Path) -> None:
    planned = ("plan", "config.yaml", "--devices", "4")
    status, out, err = command(*planned, "--full", "--out", "plan.json")
    assert (status, err) == (0, "")
    assert "net.first" in out and "net.second" in out
    assert "Data parallel 4." in command(*planned)[1]
    status, out, _ = command("plan", "config.yaml", "--devices", "4", "--json")
    assert status == 0
    saved = json.loads((folder / "plan.json").read_text())
    assert json.loads(out)["cuts"] == saved["cuts"] != {}


def test_plan_shows_the_best_of_each_kind(command: Command) -> None:
    planned = ("plan", "config.yaml", "--devices", "4", "--top", "2")
    status, out, err = command(*planned, "--cluster", "a100")
    assert (status, err) == (0, "")
    assert out.startswith("4 devices of a100, ") and "unsharded" in out
    figures = json.loads(command(*planned, "--cluster", "a100", "--json")[1])
    assert 1 <= len(figures["plans"]) <= 2
    status, _, err = command(*planned)
    assert status == 2 and "name a cluster" in err
    status, _, err = command(*planned, "--cluster", "a100", "--out", "plan.json")
    assert status == 2 and "--top compares plans" in err


def test_graphs_are_saved_before_and_after_planning(command: Command, folder: Path) -> None:
    arguments = ("plan", "config.yaml", "--devices", "4", "--save-graphs", "graphs")
    assert command(*arguments)[0] == 0
    files = sorted((folder / "graphs").iterdir())
    assert [f.name for f in files] == ["1_graph.txt", "2_plan.txt", "3_program_rank0.txt"]
    graph, plan, program = (f.read_text() for f in files)
    assert "net.first: aten.linear(x, net.first.weight) -> float64 [8, 32]" in graph
    assert "cuts" not in graph
    assert plan.startswith("plan for 4 devices: dp 4")
    assert program.startswith("def program(")
    assert command(*arguments)[0] == 0
    assert [f.read_text() for f in files] == [graph, plan, program]


def test_of_a_model_that_cannot_be_planned_the_graph_and_the_error_are_saved(
    command: Command, folder: Path
) -> None:
    arguments = ("--devices", "3", "--save-graphs", "graphs")
    assert command("plan", "config.yaml", "--devices", "4", "--save-graphs", "graphs")[0] == 0
    text = CONFIG + "parallel: {mode: data_parallel}"
    (folder / "config.yaml").write_text(text)
    status, _, err = command("plan", "config.yaml", *arguments)
    assert status == 2
    files = sorted((folder / "graphs").iterdir())
    assert [f.name for f in files] == ["1_graph.txt", "2_error.txt"]
    message = err.removeprefix("error: ").replace("\n  ", "\n")
    assert files[1].read_text() == f"StrategyError: {message}"
    (folder / "config.yaml").write_text(text.replace("Perceptron", "Branching"))
    assert command("plan", "config.yaml", *arguments)[0] == 2
    (file,) = (folder / "graphs").iterdir()
    assert file.read_text().startswith("CaptureError: ")


def test_graphs_are_saved_where_the_configuration_says(command: Command, folder: Path) -> None:
    (folder / "config.yaml").write_text(CONFIG + "parallel: {save_graphs: texts}")
    assert command("plan", "config.yaml", "--devices", "4")[0] == 0
    names = [file.name for file in sorted((folder / "texts").iterdir())]
    assert names == ["1_graph.txt", "2_plan.txt", "3_program_rank0.txt"]


def test_mem_coeff_overrides_the_configuration(command: Command) -> None:
    def cuts(*options: str) -> object:
        return json.loads(command("plan", "config.yaml", "--devices", "4", "--json", *options)[1])

    assert cuts("--mem-coeff", "1000") != cuts("--mem-coeff", "0.0001")


def test_mem_coeff_is_a_positive_number_or_auto(folder: Path, command: Command) -> None:
    arguments = ["plan", "config.yaml", "--devices", "4", "--json", "--mem-coeff"]
    for wrong in ("0", "nan", "many"):
        assert command(*arguments, wrong)[0] == 2
    assert "set memory_limit" in command(*arguments, "auto")[2]
    (folder / "config.yaml").write_text(CONFIG + "parallel: {memory_limit: 1GB}")
    assert command(*arguments, "auto")[0] == 0


def test_a_memory_limit_overrides_the_configuration(folder: Path, command: Command) -> None:
    arguments = ["plan", "config.yaml", "--devices", "2", "--json", "--memory-limit"]
    for wrong in ("0", "many", "-1GiB"):
        status, _, err = command(*arguments, wrong)
        assert status == 2 and "is not a memory limit" in err
    (folder / "config.yaml").write_text(CONFIG + "parallel: {memory_limit: 1GB, stages: 1}")
    found = json.loads(command(*arguments, "1TB")[1])
    assert found["memory_limit"] == 10**12
    status, _, err = command(*arguments, "1KiB")
    assert status == 2 and "fits into memory_limit=1.0 KiB; the smallest one needs" in err


SMALL_CLUSTER = """
name: small
device: {memory: MEMORY, rates: {float64: 1 TFLOP/s}, memory_bandwidth: 1 TB/s}
levels: [{name: link, bandwidth: 10 GB/s, latency: 1 us}]
"""


def test_the_memory_of_a_named_cluster_is_the_default_limit(folder: Path, command: Command) -> None:
    def planned(*options: str) -> tuple[int, str, str]:
        return command("plan", "config.yaml", "--devices", "2", "--json", *options)

    def peak(*options: str) -> int:
        memory = sw.Plan.from_json(planned(*options)[1]).known_memory
        assert memory is not None
        return memory.peak

    for name, memory in (("small", 15_000), ("tiny", 1_000)):
        (folder / f"{name}.yaml").write_text(SMALL_CLUSTER.replace("MEMORY", f"{memory} B"))
    free = peak("--cluster", "tiny.yaml", "--memory-limit", "none")
    assert free > 15_000
    assert peak("--cluster", "small.yaml") <= 15_000
    assert peak("--cluster", "small.yaml", "--memory-limit", "1GB") > 15_000
    status, out, err = planned("--cluster", "tiny.yaml")
    assert (status, out) == (2, "")
    line, remedy = err.splitlines()
    assert line.startswith(
        "error: no plan for 2 devices fits into memory_limit=1000 B; the smallest"
    )
    assert "the device memory of cluster 'small'" in remedy


def test_every_command_has_that_limit_and_the_configuration_may_drop_it(
    folder: Path, command: Command
) -> None:
    (folder / "tiny.yaml").write_text(SMALL_CLUSTER.replace("MEMORY", "1 kB"))
    (folder / "config.yaml").write_text(CONFIG + "parallel: {cluster: tiny.yaml}")
    reading = [("plan",), ("check",), ("explain", "net.first")]
    commands = [*reading, ("report",), ("train",), ("rehearse",)]
    for name, *arguments in commands:
        status, _, err = command(name, "config.yaml", *arguments, "--devices", "2")
        assert status == 2, name
        assert "the device memory of cluster" in err, name
    text = CONFIG + "parallel: {cluster: tiny.yaml, memory_limit: none}"
    (folder / "config.yaml").write_text(text)
    for name, *arguments in reading:
        assert command(name, "config.yaml", *arguments, "--devices", "2")[0] == 0, name


def test_the_mode_may_be_exact(folder: Path, command: Command) -> None:
    (folder / "config.yaml").write_text(CONFIG + "parallel: {mode: exact, cluster: a100}")
    found = json.loads(command("plan", "config.yaml", "--devices", "4", "--json")[1])
    assert found["mode"] == "exact"


def test_log_costs_tells_each_decision_on_stderr(folder: Path) -> None:
    arguments = ["plan", "config.yaml", "--devices", "2", "--log-costs", "--json"]
    done = python("-m", "shardwright", *arguments)
    assert "If the I-axis is cut, the op-cost is" in done.errors[0]
    assert json.loads(done.printed[0])["devices"] == 2


def test_explain_says_how_an_operator_is_cut(command: Command) -> None:
    status, out, _ = command("explain", "config.yaml", "net.first", "--devices", "4")
    assert status == 0
    assert "net.first" in out


def test_check_compares_with_one_device(command: Command) -> None:
    status, out, _ = command("check", "config.yaml", "--devices", "4")
    assert status == 0
    assert "loss" in out and "gradient" in out


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "config.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs", "epoch", r"config\.yaml: train\.epoch: unknown key; did you mean epochs\?"),
        (":Perceptron", ":Perceptrn", r"model\.target: .*did you mean Perceptron\?"),
        (":Perceptron", ":data", r"model\.target: .* not an nn\.Module"),
        (":data", ":Perceptron", r"data\.target: .* not a tuple of tensors"),
        ("batch_size: 8", "batch_size: 65", "the dataset has only 64 samples, less than"),
        ('{target: "small_models_of_the_cli:data"', "{name: mnist, path: absent", "no such folder"),
        (":Perceptron", ":Branching", r"small_models_of_the_cli\.py"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_mistake_in_the_input_is_one_message_and_status_2(
    command: Command, folder: Path, verb: str, old: str, new: str, message: str
) -> None:
    edit(folder, old, new)
    status, out, err = command(verb, "config.yaml", "--devices", "2")
    assert (status, out) == (2, "")
    assert re.match(f"error: .*{message}", err), err
    assert "Traceback" not in err


@pytest.mark.parametrize("devices", ["0", "-3"])
def test_a_number_of_devices_that_cannot_be_is_an_error(command: Command, devices: str) -> None:
    status, _, err = command("plan", "config.yaml", "--devices", devices)
    assert status == 2
    assert err.startswith("error: ") and devices in err


def test_a_plan_for_another_number_of_devices_is_refused_before_the_start(
    command: Command, folder: Path
) -> None:
    command("plan", "config.yaml", "--devices", "2", "--out", "plan.json")
    status, _, err = command("train", "config.yaml", "--devices", "4", "--plan", "plan.json")
    assert status == 2
    assert err == (
        "error: plan.json is a plan for 2 devices, not for 4\n"
        "  use --devices 2, or leave out --plan to search for a new plan\n"
    )
    assert not (folder / "log_output").exists()


def test_a_plan_for_another_model_is_refused(command: Command, folder: Path) -> None:
    command("plan", "config.yaml", "--devices", "1", "--out", "plan.json")
    edit(folder, "Perceptron", "Activated")
    status, _, err = command("train", "config.yaml", "--plan", "plan.json")
    assert status == 2
    assert "the plan was made for another model" in err
    assert "is 'net.tanh' (aten.tanh) in the model, 'net.relu' (aten.relu) in the plan" in err


def test_a_plan_trains_with_another_batch_size(command: Command, folder: Path) -> None:
    command("plan", "config.yaml", "--devices", "1", "--out", "plan.json")
    edit(folder, "batch_size: 8", "batch_size: 16")
    status, _, err = command("train", "config.yaml", "--plan", "plan.json")
    assert (status, err) == (0, "")


def test_a_world_size_other_than_the_plans_is_refused_without_a_process_group(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("plan", "config.yaml", "--devices", "2", "--out", "plan.json")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    status, _, err = command("train", "config.yaml", "--plan", "plan.json")
    assert status == 2
    assert re.match("error: the plan is for 2 devices, but there are 4 processes", err)


def test_one_device_trains_in_this_process(command: Command, folder: Path) -> None:
    status, out, err = command("train", "config.yaml")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    places = [re.match(r"epoch: (\d), step: (\d), loss is (\d\.\d+)$", line) for line in lines]
    assert [place and place.groups()[:2] for place in places] == [
        ("0", "0"), ("0", "4"), ("1", "0"), ("1", "4"),
    ]  # fmt: skip
    steps = losses(folder / "log_output")
    assert len(steps) == 16
    assert [place and float(place[3]) for place in places] == pytest.approx(steps[::4], rel=1e-6)
    assert steps[-1] < steps[0]


@pytest.mark.distributed
def test_two_processes_train_as_one_device_does(command: Command, folder: Path) -> None:
    command("train", "config.yaml", "--log-dir", "one")
    status, out, err = command("train", "config.yaml", "--devices", "2", "--log-dir", "two")
    assert (status, err) == (0, "")
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), abs=1e-12)
    assert len(out.splitlines()) == 4
    assert (folder / "two" / "1" / "rank.0" / "stdout").read_text() == out
    assert (folder / "two" / "1" / "rank.1" / "stdout").read_text() == ""
    assert json.loads((folder / "two" / "1" / "plan.json").read_text())["cuts"]


@pytest.mark.distributed
def test_under_torchrun_it_joins_the_processes_that_are_there(
    command: Command, folder: Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    started = python(*torchrun, "-m", "shardwright", "train", "config.yaml")
    assert started.status == 0, started.errors
    assert len(started.printed[0].splitlines()) == 4
    command("train", "config.yaml", "--log-dir", "one")
    assert losses(folder / "log_output") == pytest.approx(losses(folder / "one"), abs=1e-12)


@pytest.mark.distributed
def test_a_rank_killed_in_mid_step_ends_the_run(folder: Path) -> None:
    edit(folder, "epochs: 2", "epochs: 1000000")
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "train", "config.yaml", "--devices", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("epoch: 0, step: 0, loss is ")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    # It would go on for a million epochs.
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    killed = r"error: rank 1 \(process \d+\) was killed by SIGKILL; its log: .*\n"
    assert re.fullmatch(f"{killed}the kernel kills processes when memory .*\n", err)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.distributed
@pytest.mark.parametrize("receiver", ["the launcher", "rank 1"])
def test_a_signal_ends_all_ranks_with_a_checkpoint_from_which_the_run_goes_on(
    command: Command, folder: Path, receiver: str
) -> None:
    steps = "train: {steps: 400, checkpoint: {folder: %s, every: 1000}, "
    edit(folder, "train: {epochs: 2", steps % "saved" + "epochs: 1000")
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "train", "config.yaml", "--devices", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("epoch: 0, step: 0, loss is ")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    stopped = process.pid if receiver == "the launcher" else int(children[1])
    os.kill(stopped, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    said = re.fullmatch(
        r"error: stopped by SIGTERM; rank [01] received the signal, and all ranks saved a"
        r" checkpoint after"
        r" step (\d+)\nuse --resume to continue from this checkpoint\n",
        err,
    )
    assert said and process.returncode == 128 + signal.SIGTERM, err
    assert (folder / "saved" / f"step-{said[1]}").exists() and 0 < int(said[1]) < 400
    status, _, err = command("train", "config.yaml", "--resume", "--log-dir", "resumed")
    assert (status, err) == (0, "")
    edit(folder, "folder: saved", "folder: other")
    command("train", "config.yaml", "--log-dir", "one")
    resumed, one = losses(folder / "resumed"), losses(folder / "one")
    assert resumed == pytest.approx(one[-len(resumed) :], abs=1e-9)


def test_a_file_of_strategies_pins_the_model_of_a_configuration(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    said = {"version": 1, "strategies": {"net.first": {"in_strategy": [[1, 2], [1, 2]]}}}
    (folder / "pins.json").write_text(json.dumps(said))
    with (folder / "config.yaml").open("a") as file:
        file.write("parallel: {mode: sharding_propagation, strategies: pins.json}\n")
    status, out, _ = command("plan", "config.yaml", "--devices", "2", "--full")
    assert status == 0
    assert "((1,2),(1,2)) pinned" in out
    status, out, _ = command("check", "config.yaml", "--devices", "2")
    assert (status, out.splitlines()[-1]) == (0, "equal")
    (folder / "pins.json").write_text(json.dumps(said).replace("first", "frst"))
    status, _, err = command("plan", "config.yaml", "--devices", "2")
    assert status == 2
    assert "pins.json" in err and "net.first" in err


def test_a_full_disk_to_which_stdout_is_redirected_is_named() -> None:
    command = f"{shlex.quote(sys.executable)} -m shardwright --version >/dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        "error: stdout: No space left on device",
    )
