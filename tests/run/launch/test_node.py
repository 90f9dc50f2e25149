import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from shardwright.core.agreement import store
from shardwright.errors import ConfigError
from shardwright.run.launch import node as room
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.node import Node, launch_node
from shardwright.run.launch.rank_failure import RankFailedError

SHORT = timedelta(seconds=2)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free port, and an environment that is forgotten."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = int(probe.getsockname()[1])
    yield free


def node(rank: int, port: int, host: str = "127.0.0.1") -> Node:
    return Node(rank, 2, 2, host, port, local_size=1)


@pytest.mark.parametrize(
    ("nnodes", "expected"), [("2", Node(1, 2, 2, "node0", 29400, 3)), ("2:4", None)]
)
def test_a_node_is_described_as_by_torchrun(nnodes: str, expected: Node | None) -> None:
    parsed = Node.parse(nnodes, 1, "node0:29400", 3)
    assert parsed == (expected or Node(1, 2, 4, "node0", 29400, 3))
    assert parsed.endpoint == "node0:29400"
    assert Node.parse("2", 0, "[::1]:80", None).endpoint == "[::1]:80"


@pytest.mark.parametrize(
    ("nnodes", "rank", "rdzv", "message"),
    [
        ("0", 0, "a:1", "--nnodes 0: expected a number of nodes, or MIN:MAX"),
        ("4:2", 0, "a:1", "--nnodes 4:2: expected"),
        ("two", 0, "a:1", "--nnodes two: expected"),
        ("2:", 0, "a:1", "--nnodes 2:: expected"),
        ("2", None, "a:1", "--nnodes needs --node-rank"),
        ("2", 0, None, "--nnodes needs --node-rank"),
        (
            "2:4",
            4,
            "a:1",
            r"--node-rank 4: out of range for --nnodes 2:4\nuse a number from 0 to 3",
        ),
        ("2", -1, "a:1", "--node-rank -1: out of range for --nnodes 2\nuse a number from 0 to 1"),
        ("2", 0, "a", "--rdzv a is not HOST:PORT"),
        ("2", 0, "a:b", "--rdzv a:b is not HOST:PORT"),
        ("2", 0, "a:0", "--rdzv a:0 is not HOST:PORT"),
        ("2", 0, "a:70000", "--rdzv a:70000 is not HOST:PORT"),
        ("2", 0, ":80", "--rdzv :80 is not HOST:PORT"),
        ("2", 0, "tcp://a:80", "--rdzv tcp://a:80 is not HOST:PORT"),
        ("2", 0, "a:80/x", "--rdzv a:80/x is not HOST:PORT"),
    ],
)
def test_options_that_describe_no_node_are_refused(
    nnodes: str, rank: int | None, rdzv: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Node.parse(nnodes, rank, rdzv, 1)


@pytest.mark.parametrize(
    ("rank", "host", "message"),
    [
        (0, "192.0.2.1", "\nuse an address of this node, because --node-rank is 0"),
        (1, "no.such.host.invalid", "--rdzv no.such.host.invalid:"),
        (1, "127.0.0.1", ": node 0 has not answered within 2 s\ncheck that node 0 is started with"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(
    port: int, tmp_path: Path, rank: int, host: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch_node(["-c", "pass"], node(rank, port, host), LogFolder(tmp_path), timeout=SHORT)


def test_a_port_that_is_in_use_is_refused(port: int, tmp_path: Path) -> None:
    with (
        socket.socket() as other,
        pytest.raises(ConfigError, match=f":{port}: .*: Address already in"),
    ):
        other.bind(("127.0.0.1", port))
        other.listen()
        launch_node(["-c", "pass"], node(0, port), LogFolder(tmp_path), timeout=SHORT)


def test_a_rank_belongs_to_one_node_as_long_as_it_lives(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "HEARTBEAT_SECONDS", 0.5)
    with room._join_store(node(0, port), timedelta(seconds=30)):
        with (
            room._join_store(node(1, port), timedelta(seconds=30)),
            pytest.raises(ConfigError, match=f"--node-rank 1 is taken by process {os.getpid()} on"),
            room._join_store(node(1, port), timedelta(seconds=30)),
        ):
            pass
        for thread in threading.enumerate():
            if thread.name.startswith("Thread-") and "_beat" in thread.name:
                thread.join(0.5)
        with room._join_store(node(1, port), timedelta(seconds=30)) as address:
            assert address == "127.0.0.1"


def test_node_0_leaves_after_the_others(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FAREWELL", 500)
    joined, left = threading.Event(), threading.Event()

    def other() -> None:
        with room._join_store(node(1, port), timedelta(seconds=30)):
            joined.set()
            time.sleep(1)
            left.set()

    thread = threading.Thread(target=other)
    with room._join_store(node(0, port), timedelta(seconds=30)):
        thread.start()
        joined.wait()
    assert left.is_set()
    thread.join()


@pytest.mark.distributed
def test_nodes_that_do_not_come_are_not_waited_for_forever(port: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"fewer than 2 nodes joined at 127.* within 2 s"):
        launch_node(["-c", "pass"], node(0, port), LogFolder(tmp_path), timeout=SHORT)


GIVES_UP = """
import os, signal, time
if os.environ["RANK"] == "2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] != "0":
    time.sleep(60)
from torch.distributed.elastic.multiprocessing.errors import record
from shardwright.errors import CommunicationError

@record
def main():
    raise CommunicationError("nobody came")

main()
"""


@pytest.mark.distributed
def test_ranks_that_the_agent_ends_are_not_said_to_be_killed(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither rank 1 by SIGTERM nor rank 2, which ignores that, by SIGKILL."""
    monkeypatch.setattr(room, "SHUTDOWN_SECONDS", 1)
    alone = Node(0, 1, 1, "127.0.0.1", port, local_size=3)
    with pytest.raises(RankFailedError) as raised:
        launch_node(["-c", GIVES_UP], alone, LogFolder(tmp_path), timeout=SHORT)
    first, last = str(raised.value).splitlines()
    assert "rank 1 (process " in first
    assert ") did not answer the other ranks, rank 2 (process " in first
    assert ") did not answer the other ranks; its log: " in first
    assert last == "rank 0: nobody came"
    assert not raised.value.lost_ranks
