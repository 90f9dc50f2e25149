"""A run of 2 processes beside another user of the machine who tries to end it.

That user writes to every port on which the run listens: garbage, and as a client of PyTorch's store
the keys of the run; and opens the folder in which the ranks meet. As root the other user is
`nobody`; otherwise it is the same user, who has the ports only.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (`socket` imports it, which the other user may not read)
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shardwright.run.launch.rendezvous_store import STORE_VARIABLE

MODEL = """
import torch
from torch import nn

def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 8, generator=generator), torch.zeros(64, dtype=torch.int64)

def net():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
"""
CONFIG = """
model: {target: "local_users_model:net"}
data: {target: "local_users_model:data", batch_size: 8}
train: {epochs: 100000, steps: 100}
"""
NOBODY, SECONDS = 65534, 400
KEYS = ("restart 0 of 2 ranks/", "restart 0 of 2 ranks/devices/", "default_pg/0//", "")
NAMES = ("rank 0", "rank 1", "pieces", "piece 0", "error", "calls of ranks 0/error")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit status, and losses by step; what the other user could open."""

    status: int
    losses: list[float]
    opened: list[str]


def train(folder: Path, attacked: bool) -> Outcome:
    """Train in `folder` on 2 processes."""
    (folder / "local_users_model.py").write_text(MODEL)
    (folder / "run.yaml").write_text(CONFIG)
    arguments = ("train", "run.yaml", "--devices", "2", "--log-dir", str(folder / "logs"))
    opened: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "shardwright", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        while attacked and launcher.poll() is None:
            opened += _attack(launcher.pid)
            time.sleep(0.2)
        status = launcher.wait(SECONDS)
    steps = (folder / "logs" / "1" / "rank.0" / "steps.jsonl").read_text().splitlines()
    return Outcome(status, [json.loads(line)["loss"] for line in steps], opened)


def _attack(launcher: int) -> list[str]:
    """Attack all ports of a run once, as another user; the files that could be opened."""
    ports, folders = _ports(launcher), _folders(launcher)
    reader, writer = os.pipe()
    # A fork, as another user may not read the files of Python's installation.
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            # PyTorch's store logs each connection that is refused.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if is_other_user := os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            for port in ports:
                _send_garbage(port)
                _write_keys(port)
            opened = [path for path in folders if is_other_user and _can_open(path)]
            os.write(writer, json.dumps(opened).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    if not text:
        raise RuntimeError("the other user has failed")
    return list(json.loads(text))


def _send_garbage(port: int) -> None:
    for content in (os.urandom(64), b"\0" * 1024, b"GET / HTTP/1.1\r\n\r\n"):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2) as connection:
            connection.sendall(content)


def _write_keys(port: int) -> None:
    """Write to all keys of a store that listens at a port, and delete them."""
    with suppress(RuntimeError):
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, timeout=timedelta(seconds=0.3), wait_for_workers=False
        )
        known = [*store.list_keys(), *(prefix + name for prefix in KEYS for name in NAMES)]
        for key in known:
            store.set(key, "planted")
        for key in known[::2]:
            store.delete_key(key)


def _can_open(folder: str) -> bool:
    with suppress(OSError):
        return next(Path(folder).iterdir(), None) is not None
    return False


def _processes(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    with suppress(OSError):
        return [launcher, *map(int, children.read_text().split())]
    return []


def _ports(launcher: int) -> list[int]:
    """The ports at which the processes of a run listen."""
    inodes = set()
    for process in _processes(launcher):
        with suppress(OSError):
            for file in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(file.readlink().name)
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def _folders(launcher: int) -> list[str]:
    """The folders in which the ranks of a run meet."""
    folders = set()
    for process in _processes(launcher):
        with suppress(OSError):
            for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                if entry.startswith(f"{STORE_VARIABLE}=".encode()):
                    folders.add(str(Path(entry.partition(b"=")[2].decode()).parent))
    return sorted(folders)
