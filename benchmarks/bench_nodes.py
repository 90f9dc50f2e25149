"""Nodes

Two hosts on one machine: network namespaces that a pair of virtual interfaces joins, with two
processes each; a token bucket bounds what each sends to 100 Mbit/s. A perceptron of four layers of
1,024 is trained with 32 samples a step, as planned without a cluster and with a cluster file of the
link. A step is the median of five; what it waits for the link is the share by which the same plan
is faster when nothing bounds it. Goal: the plan that knows the link is faster.

A cut link is seen by the time-out of 20 s; it is joined again and both nodes are started anew with
`--resume`. A killed node is started anew while the other waits for it (`--max-restarts 1`). Times
hold what processes take to start, which is most of them. Needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.namespaces import NEEDS, Host, can_be_made, two_hosts
from benchmarks.size import Size
from benchmarks.table import Table
from shardwright.run.launch.log_folder import LogFolder

RATE, FREE, SAMPLES = "100mbit", "100gbit", 32
SHAPED, STEPS, TIMEOUT, PATIENCE = 7, 16, 20, 600

MODEL = f"""
import torch
from torch import nn

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn({4 * SAMPLES}, 1024, generator=generator)
    return x, torch.randint(16, ({4 * SAMPLES},), generator=generator)

def perceptron():
    layers = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 16))
"""
CONFIG = f"""
model: {{target: "model_of_the_nodes:perceptron"}}
data: {{target: "model_of_the_nodes:data", batch_size: {SAMPLES}}}
optimizer: {{name: sgd, learning_rate: 0.01}}
"""
LINK = """
name: two nodes of two processes, 100 Mbit/s
device: {memory: 4 GB, rates: {float32: 20 GFLOP/s}, memory_bandwidth: 5 GB/s, overhead: 20 us}
levels:
  - {name: node, devices: 2, bandwidth: 500 MB/s, latency: 100 us, collectives: gloo}
  - {name: network, bandwidth: 6 MB/s, latency: 500 us, collectives: gloo}
"""


def run(size: Size = Size.DEFAULT) -> list[Table]:
    if not can_be_made():
        skipped = Table("Skipped", ("why",))
        skipped.add(NEEDS)
        return [skipped]
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        for name, text in (("model_of_the_nodes.py", MODEL), ("link.yaml", LINK)):
            (Path(folder) / name).write_text(text)
        tables = size.of((plans,), full=(plans, recoveries))
        return [table(hosts, Path(folder)) for table in tables]


@dataclass(frozen=True)
class Nodes:
    """A run on both hosts.

    Args:
        name: of its files and folders.
        settings: lines of its configuration.
    """

    hosts: Sequence[Host]
    folder: Path
    name: str
    settings: str

    @property
    def logs(self) -> LogFolder:
        return LogFolder(self.folder / f"{self.name}_logs")

    @property
    def steps(self) -> int:
        """Steps done so far."""
        log = self.logs.steps(0)
        return len(log.read_text().splitlines()) if log.exists() else 0

    def start(self, rank: int, *options: str) -> subprocess.Popen[bytes]:
        config = self.folder / f"{self.name}.yaml"
        config.write_text(CONFIG + self.settings)
        command = ("-m", "shardwright", "train", str(config), "--log-dir", str(self.logs.root))
        where = ("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2")
        rdzv = ("--rdzv", f"{self.hosts[0].address}:29400")
        output = self.folder / f"{self.name}.{rank}.txt"
        python = (sys.executable, *command, *where, *rdzv, *options)
        paths = os.pathsep.join((*sys.path, str(self.folder)))
        return self.hosts[rank].start(*python, output=output, environment={"PYTHONPATH": paths})

    def start_all(self, *options: str) -> list[subprocess.Popen[bytes]]:
        return [self.start(rank, *options) for rank in range(len(self.hosts))]

    def wait_for_steps(self, number: int) -> None:
        wait_for(lambda: self.steps >= number)


def wait_for(fact: Callable[[], bool]) -> None:
    """Raises: TimeoutError: after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError("a run of two nodes does not go on")
        time.sleep(0.05)


def step_seconds(nodes: Nodes) -> tuple[float, float]:
    """The median of the steps over the slow link, and of those after its bound was taken away.

    Raises:
        RuntimeError: a node fails.
    """
    for host in nodes.hosts:
        host.shape(RATE)
    processes = nodes.start_all()
    nodes.wait_for_steps(SHAPED)
    for host in nodes.hosts:
        host.shape(FREE)
    ends = [process.wait(PATIENCE) for process in processes]
    if any(ends):
        raise RuntimeError((nodes.folder / f"{nodes.name}.0.txt").read_text()[-4000:])
    lines = nodes.logs.steps(0).read_text().splitlines()
    seconds = [SAMPLES / json.loads(line)["samples_per_second"] for line in lines]
    return median(seconds[2:SHAPED]), median(seconds[SHAPED + 2 :])


def plans(hosts: Sequence[Host], folder: Path) -> Table:
    """Steps of the plan that knows the link and of that which does not."""
    train = f"train: {{epochs: {STEPS}, steps: {STEPS}}}\n"
    table = Table(
        "A step of 4 processes on two nodes",
        ("plan", "100 Mbit/s", "not bounded", "waits for the link"),
    )
    times = []
    for name, more in (("without", ""), ("with", "parallel: {cluster: link.yaml}\n")):
        shaped, free = step_seconds(Nodes(hosts, folder, name, train + more))
        waits = f"{max(0.0, 1 - free / shaped):.0%}"
        table.add(f"{name} the cluster file", f"{shaped:.3f} s", f"{free:.3f} s", waits)
        times.append(shaped)
    if times[1] >= times[0]:
        table.missed.append("the plan that knows the link is not faster")
    return table


def recoveries(hosts: Sequence[Host], folder: Path) -> Table:
    """What it takes until training goes on after a fault."""
    settings = (
        "parallel: {cluster: link.yaml}\n"
        f"train: {{epochs: 100000, timeout_seconds: {TIMEOUT},"
        " checkpoint: {folder: FOLDER, every: 20, keep: 2}}\n"
    )
    table = Table("Faults", ("fault", "both nodes have ended", "trains again"))

    cut = Nodes(hosts, folder, "cut", settings.replace("FOLDER", "saved_cut"))
    processes = cut.start_all()
    cut.wait_for_steps(40)
    hosts[1].cut()
    started = time.monotonic()
    for process in processes:
        process.wait(PATIENCE)
    ended = time.monotonic() - started
    hosts[1].mend()
    again, before = time.monotonic(), cut.steps
    cut.start_all("--resume")
    wait_for(lambda: cut.steps != before)
    cut.wait_for_steps(before + 1)
    table.add("the link is cut", f"{ended:.0f} s", f"{time.monotonic() - again:.0f} s later")
    for host in hosts:
        host.kill()

    killed = Nodes(hosts, folder, "killed", settings.replace("FOLDER", "saved_killed"))
    killed.start_all("--max-restarts", "1")
    killed.wait_for_steps(40)
    hosts[1].kill()
    started, before = time.monotonic(), killed.steps
    killed.start(1)
    wait_for(lambda: killed.steps != before)
    killed.wait_for_steps(before + 1)
    table.add("a node is killed", "", f"{time.monotonic() - started:.0f} s")
    for host in hosts:
        host.kill()
    return table
