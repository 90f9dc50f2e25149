"""Runs on two nodes: two hosts of network namespaces, each with the agent that starts its ranks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from benchmarks.namespaces import NEEDS, Host, can_be_made, two_hosts

import shardwright as sw
from markdown_fences import ROOT, fences
from shardwright.run.config import Run
from shardwright.run.launch.log_folder import LogFolder

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODEL = """
import os, time
import torch
from torch import nn

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    return x, torch.randint(4, (64,), generator=generator)

class Perceptron(nn.Sequential):
    def __init__(self, hidden=32, seconds=0.0):
        super().__init__(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4))
        # So long every step takes.
        self[0].weight.register_hook(lambda gradient: time.sleep(seconds))
"""
CONFIG = """
model: {{target: "model_of_the_nodes:Perceptron", arguments: {{seconds: {seconds}}}}}
data: {{target: "model_of_the_nodes:data", batch_size: 8}}
optimizer: {{name: adamw, learning_rate: {rate}}}
train:
  epochs: 1000
  steps: {steps}
  dtype: float64
  timeout_seconds: {timeout}
  checkpoint: {{folder: {folder}, every: 5}}
"""
PATIENCE = 240
TRAIN = (sys.executable, "-m", "shardwright", "train")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if not can_be_made():
        pytest.skip(NEEDS)
    with two_hosts() as pair:
        yield pair


@pytest.fixture
def folder(run_folder: Path) -> Path:
    (run_folder / "model_of_the_nodes.py").write_text(MODEL)
    return run_folder


def configure(name: str, **changes: object) -> str:
    """Writes a configuration; returns its name."""
    settings = {"seconds": 0.0, "rate": 0.003, "folder": f"of_{name}", "steps": 30, "timeout": 120}
    Path(name).write_text(CONFIG.format(**{**settings, **changes}))
    return name


def train(host: Host, rank: int, config: str, *options: str) -> subprocess.Popen[bytes]:
    """Starts the node of this rank on a host."""
    command = (*TRAIN, config, "--log-dir", "logs", "--node-rank", str(rank))
    where = ("--nnodes", "2", "--rdzv", "10.77.0.1:29400")
    devices = () if "--nproc-per-node" in options else ("--nproc-per-node", "2")
    return host.start(*command, *where, *devices, *options, output=Path(f"node{rank}.txt"))


def train_alone(host: Host, config: str) -> subprocess.Popen[bytes]:
    """Starts a run on one device of a host."""
    return host.start(*TRAIN, config, "--log-dir", "one", output=Path("one.txt"))


def ends(*nodes: subprocess.Popen[bytes]) -> list[int]:
    return [node.wait(PATIENCE) for node in nodes]


def printed(rank: int) -> list[str]:
    """The lines of a node, without what gloo and c10d warn of, and where in C++ that was."""
    lines = Path(f"node{rank}.txt").read_text().splitlines()
    return [
        line for line in lines if not line.startswith(("[W", "Exception raised from", "frame #"))
    ]


def steps(logs: str) -> list[tuple[int, int, float]]:
    lines = LogFolder(Path(logs)).steps(0).read_text().splitlines()
    return [(s["epoch"], s["step"], s["loss"]) for s in map(json.loads, lines)]


def wait_for(fact: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def at_step(number: int) -> bool:
    log = LogFolder(Path("logs")).steps(0)
    return log.exists() and len(log.read_text().splitlines()) >= number


def assert_like_one_device(host: Host, config: str) -> None:
    """Each step once, in order, with the losses and the parameters of one device."""
    assert ends(train_alone(host, configure("one.yaml"))) == [0]
    mine, theirs = steps("logs"), steps("one")
    assert [place[:2] for place in mine] == [place[:2] for place in theirs]
    torch.testing.assert_close([loss for *_, loss in mine], [loss for *_, loss in theirs])
    states = []
    for file in (config, "one.yaml"):
        run = Run.from_file(file)
        net, checkpoints = run.model(), run.checkpoints()
        assert checkpoints is not None
        sw.load_checkpoint(checkpoints.folder, net)
        states.append(net.state_dict())
    torch.testing.assert_close(*states)


def test_two_nodes_on_a_slow_link_train_as_one_device_does(
    hosts: tuple[Host, Host], folder: Path
) -> None:
    config = configure("run.yaml")
    for host in hosts:
        host.shape("100mbit")
    assert ends(*(train(host, rank, config) for rank, host in enumerate(hosts))) == [0, 0]
    assert_like_one_device(hosts[0], config)
    ranks = sorted(path.name for path in LogFolder(Path("logs")).run.iterdir())
    assert ranks == ["rank.0", "rank.1", "rank.2", "rank.3"]
    assert "rank 0: epoch: 0, step: 0, loss is " in "".join(printed(0))
    assert printed(1) == []


def test_a_link_that_is_cut_ends_both_nodes_within_the_time_out(
    hosts: tuple[Host, Host], folder: Path
) -> None:
    config = configure("run.yaml", seconds=1.0, timeout=30)
    nodes = [train(host, rank, config) for rank, host in enumerate(hosts)]
    wait_for(lambda: at_step(3))
    hosts[1].cut()
    started = time.monotonic()
    assert ends(*nodes) == [1, 1]
    assert time.monotonic() - started < 30 + 60, "the time-out, and what agents take to end"
    assert "communication failed in " in (first := printed(0)[-1]), first
    last = "\n".join(printed(1))
    assert "communication failed in " in last or "node 0 no longer answers at 10.77.0.1" in last


def test_a_node_that_is_killed_and_comes_back_loses_no_step_and_does_none_twice(
    hosts: tuple[Host, Host], folder: Path
) -> None:
    config = configure("run.yaml", seconds=0.3)
    first = train(hosts[0], 0, config, "--max-restarts", "1")
    second = train(hosts[1], 1, config)
    wait_for(lambda: at_step(7))
    hosts[1].kill()
    second.wait()
    assert not at_step(30)
    assert ends(first, train(hosts[1], 1, config)) == [0, 0]
    assert any(line.startswith("rank 0: resuming after step ") for line in printed(0))
    assert_like_one_device(hosts[0], config)


def test_a_run_goes_on_with_fewer_nodes_and_takes_another_in(
    hosts: tuple[Host, Host], folder: Path
) -> None:
    """Replanned for 2, 1 and 2 nodes of one device."""
    config = configure("run.yaml", seconds=0.5, steps=100_000)
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3")
    first, second = (train(host, rank, config, *options) for rank, host in enumerate(hosts))
    wait_for(lambda: LogFolder(Path("logs")).stdout(1).exists() and at_step(1))
    before = len(resumptions())
    done = len(steps("logs"))
    wait_for(lambda: at_step(done + 7))
    hosts[1].kill()
    second.wait()
    wait_for(lambda: len(resumptions()) == before + 1)
    alone = len(steps("logs"))
    wait_for(lambda: at_step(alone + 3))
    second = train(hosts[1], 1, config, *options)
    wait_for(lambda: len(resumptions()) == before + 2)
    together = len(steps("logs"))
    wait_for(lambda: at_step(together + 3))
    assert [first.poll(), second.poll()] == [None, None]
    assert printed(1) == []
    for host in hosts:
        host.kill()
    assert ends(train_alone(hosts[0], configure("one.yaml", steps=together))) == [0]
    mine, theirs = steps("logs")[:together], steps("one")
    assert [place[:2] for place in mine] == [place[:2] for place in theirs]
    torch.testing.assert_close([loss for *_, loss in mine], [loss for *_, loss in theirs])


def resumptions() -> list[str]:
    """What rank 0 has printed of them."""
    return [line for line in printed(0) if line.startswith("rank 0: resuming after step ")]


@pytest.mark.parametrize(
    ("rate", "options", "difference"),
    [
        (0.1, (), "optimizer.learning_rate: 0.1 for rank 2 on "),
        (0.003, ("--nproc-per-node", "1"), "ranks on the node: 1 for rank 2 on "),
    ],
)
def test_a_node_that_is_not_like_the_others_is_named_on_each_once(
    hosts: tuple[Host, Host], folder: Path, rate: float, options: tuple[str, ...], difference: str
) -> None:
    first = train(hosts[0], 0, configure("run.yaml"))
    other = configure("other.yaml", rate=rate, folder="of_run.yaml")
    assert ends(first, train(hosts[1], 1, other, *options)) == [2, 2]
    for rank in range(2):
        assert len(printed(rank)) == 1, printed(rank)
        (line,) = printed(rank)
        assert line.startswith(f"error: {difference}")
        assert line.endswith("; all ranks of a run need the same")


def test_a_second_node_of_a_rank_leaves_the_run_alone(
    hosts: tuple[Host, Host], folder: Path
) -> None:
    config = configure("run.yaml", seconds=0.3, steps=1000)
    nodes = [train(host, rank, config) for rank, host in enumerate(hosts)]
    wait_for(lambda: at_step(1))
    options = ("--nnodes", "2", "--rdzv", "10.77.0.1:29400", "--nproc-per-node", "2")
    again = (*TRAIN, config, "--log-dir", "again")
    for rank, host in enumerate(hosts):
        output = Path("again.txt")
        command = (*again, *options, "--node-rank", str(rank))
        assert ends(host.start(*command, output=output)) == [2]
        reason = "of_run.yaml is in use by process" if rank == 0 else "--node-rank 1 is taken by"
        assert reason in output.read_text()
    done = len(steps("logs"))
    wait_for(lambda: at_step(done + 3))
    assert [node.poll() for node in nodes] == [None, None]


def of_the_page(start: str) -> str:
    """The file of the page on clusters that starts with this."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (text,) = (fence.text for fence in fences(page) if fence.text.startswith(start))
    return text


def test_the_slurm_script_trains(hosts: tuple[Host, Host], folder: Path) -> None:
    """With the variables of its tasks, and stand-ins for `srun`, which runs the task of this node,
    and for `scontrol`, which names the nodes."""
    config = configure("run.yaml")
    stand_ins = {
        "scontrol": "".join(f"echo {host.address}\n" for host in hosts),
        "srun": 'shift; exec "$@"\n',
        "shardwright": f'exec {" ".join(TRAIN[:-1])} "$@"\n',
    }
    for name, text in stand_ins.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}")
        (folder / name).chmod(0o755)
    (folder / "train.sbatch").write_text(of_the_page("#!/bin/bash\n"))
    job = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "PER_NODE": "2",
    }
    nodes = [
        host.start(
            *("bash", "train.sbatch"),
            output=Path(f"node{rank}.txt"),
            environment={**job, "SLURM_NODEID": str(rank)},
        )
        for rank, host in enumerate(hosts)
    ]
    assert ends(*nodes) == [0, 0]
    Path("log_4711").rename("logs")
    assert_like_one_device(hosts[0], config)


def test_the_job_of_kubernetes_trains(hosts: tuple[Host, Host], folder: Path) -> None:
    """With the variables that the runtime of Kubeflow sets."""
    config = configure("run.yaml")
    trainer = yaml.safe_load(of_the_page("# trainjob.yaml\n"))["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    here = {"/data/run.yaml": config, "/data/logs": "logs"}
    arguments = [here.get(word, word) for word in trainer["args"]]
    job = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": hosts[0].address,
        "PET_MASTER_PORT": "29500",
    }
    nodes = [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run", *arguments),
            output=Path(f"node{rank}.txt"),
            environment={**job, "PET_NODE_RANK": str(rank)},
        )
        for rank, host in enumerate(hosts)
    ]
    assert ends(*nodes) == [0, 0]
    assert_like_one_device(hosts[0], config)
