"""Launches the ranks of one of several nodes, with torchrun's elastic agent.

Every node runs the same command with its own rank. The agent of each node starts its ranks, and all
of them again when one has failed or a node comes or goes. Node 0 serves the store through which the
agents meet.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwright.core.agreement.store import count_until
from shardwright.core.runtime.accelerator import num_accelerators
from shardwright.errors import ConfigError
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.process_group import TIMEOUT
from shardwright.run.launch.rank_failure import (
    RankEnd,
    RankError,
    RankFailedError,
    StoppedError,
    first_failure,
)
from shardwright.run.launch.rank_processes import SHUTDOWN_SECONDS, process_settings

# Seconds between two signs of life of a node.
BEAT = 1.0

# The key of the number of nodes that have joined, less those that have left.
PRESENT = "nodes present"

# Seconds until an agent gives up on a store that does not answer.
READ_TIMEOUT = 60


@dataclass(frozen=True)
class Node:
    """One of several nodes, as torchrun's flags describe it.

    Args:
        rank: that of rank 0 serves the store.
        minimum, maximum: how many nodes the run may have.
        host, port: where node 0 serves the store.
        local_size: ranks on this node.
    """

    rank: int
    minimum: int
    maximum: int
    host: str
    port: int
    local_size: int

    @staticmethod
    def parse(nnodes: str, rank: int | None, rdzv: str | None, local_size: int | None) -> Node:
        """
        Args:
            local_size: by default one rank for each accelerator, or one.

        Raises:
            ConfigError: one of them is missing or invalid.
        """
        low, colon, high = nnodes.partition(":")
        numbers = [int(text) for text in (low, high if colon else low) if text.isdecimal()]
        if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
            raise ConfigError(
                f"--nnodes {nnodes}: expected a number of nodes, or MIN:MAX with 1 ≤ MIN ≤ MAX"
            )
        if rank is None or rdzv is None:
            raise ConfigError(
                "--nnodes needs --node-rank, which differs on each node, and --rdzv HOST:PORT, the"
                " address of node 0 and a free port there"
            )
        minimum, maximum = numbers
        if not 0 <= rank < maximum:
            raise ConfigError(f"--node-rank {rank}: must be 0 to {maximum - 1} (--nnodes {nnodes})")
        host, port = _endpoint(rdzv)
        if local_size is None:
            local_size = max(1, num_accelerators())
        return Node(rank, minimum, maximum, host, port, local_size)

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _endpoint(text: str) -> tuple[str, int]:
    try:
        url = urlsplit(f"//{text}")
        if url.netloc == text and "@" not in text and url.hostname and url.port:
            return url.hostname, url.port
    except ValueError:
        pass
    raise ConfigError(f"--rdzv {text}: expected HOST:PORT, for example node0:29400")


def launch_node(
    command: Sequence[str],
    node: Node,
    logs: LogFolder,
    *,
    max_restarts: int = 0,
    timeout: timedelta = TIMEOUT,
) -> None:
    """Run `python <command>` as the ranks of `node`, and wait until those of all nodes have ended.

    Args:
        max_restarts: how many times the ranks are restarted after one of this node has failed.
        timeout: how long to wait for other nodes.

    Raises:
        ConfigError: the store cannot be served or reached, or another node has the same rank.
        RankFailedError: a rank failed and there are no restarts left, too few nodes came, or node
            0 is gone.
        StoppedError: this process received SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """
    os.environ.update(_agent_environment(node))
    # What it logs of ranks that failed is raised here.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    seconds = int(timeout.total_seconds())
    with _joined(node, timeout) as local_address:
        agent = LaunchConfig(
            min_nodes=node.minimum,
            max_nodes=node.maximum,
            nproc_per_node=node.local_size,
            run_id="shardwright",
            rdzv_backend="c10d",
            rdzv_endpoint=node.endpoint,
            rdzv_configs={
                "is_host": node.rank == 0,
                "join_timeout": seconds,
                "read_timeout": min(seconds, READ_TIMEOUT),
            },
            max_restarts=max_restarts,
            local_addr=local_address,
            logs_specs=_RankLogs(logs),
            log_line_prefix_template="rank ${rank}: ",
        )
        try:
            elastic_launch(agent, sys.executable)(*command)
        except ChildFailedError as error:
            raise first_failure(_ends(error.failures, logs), logs) from None
        except SignalException as error:
            raise StoppedError(error.sigval) from None
        except RendezvousTimeoutError:
            raise RankFailedError(
                f"fewer than {node.minimum} nodes came to {node.endpoint} within {seconds} s"
            ) from None
        except RendezvousError:
            raise RankFailedError(_gone(node)) from None


def _ends(failures: Mapping[int, ProcessFailure], logs: LogFolder) -> list[RankEnd]:
    """How the ranks of this node ended. When one has failed, the agent sends SIGTERM to the others,
    and SIGKILL to those that do not answer; it does not say to which."""
    first = min(failure.timestamp for failure in failures.values())
    terminated = -signal.SIGTERM
    by_itself = any(failure.exitcode != terminated for failure in failures.values())
    ends = []
    for rank, failure in failures.items():
        error, sent = RankError.read(logs.error(rank)), frozenset[int]()
        if failure.exitcode == terminated and by_itself:
            sent = frozenset({signal.SIGTERM})
        elif failure.exitcode == -signal.SIGKILL and failure.timestamp >= first + SHUTDOWN_SECONDS:
            sent = frozenset({signal.SIGTERM, signal.SIGKILL})
        end = RankEnd(rank, failure.pid, failure.exitcode, failure.timestamp, sent, error=error)
        ends.append(end)
    return ends


def _agent_environment(node: Node) -> dict[str, str]:
    """What torchrun's agent reads from the environment, as it does for its own users."""
    return {
        **process_settings(node.local_size),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        **os.environ,
        # The ranks' store is made anew with each start. An agent that comes later, in place of one
        # that was killed, does not learn the address of one that is kept.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


class _RankLogs(LogsSpecs):
    """Rank N writes where that of a local run does; what rank 0 prints is shown on its node."""

    def __init__(self, logs: LogFolder) -> None:
        super().__init__(str(logs.root))
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = {local: int(environment["RANK"]) for local, environment in envs.items()}
        for local, rank in ranks.items():
            self._logs.rank(rank).mkdir(parents=True, exist_ok=True)
            self._logs.archive_attempt(rank)
            envs[local]["TORCHELASTIC_ERROR_FILE"] = str(self._logs.error(rank))
        stdouts = {local: str(self._logs.stdout(rank)) for local, rank in ranks.items()}
        return LogsDest(
            stdouts=stdouts,
            stderrs={local: str(self._logs.stderr(rank)) for local, rank in ranks.items()},
            tee_stdouts={local: stdouts[local] for local, rank in ranks.items() if rank == 0},
            error_files={local: str(self._logs.error(rank)) for local, rank in ranks.items()},
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._logs.root)


@contextmanager
def _joined(node: Node, timeout: timedelta) -> Iterator[str]:
    """Within it this node serves or reaches the store, and is the only one of its rank.

    Yields:
        The address at which other nodes reach this one.
    """
    address = _check_address(node)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            node.host,
            node.port,
            is_master=node.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        _claim(store, node)
    except RuntimeError:
        raise ConfigError(
            f"--rdzv {node.endpoint}: node 0 has not answered within"
            f" {int(timeout.total_seconds())} s: is it started with this --rdzv, and is the port"
            " open?"
        ) from None
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(store, node, timeout, ended), daemon=True)
    beat.start()
    try:
        store.add(PRESENT, 1)
        yield address
        # The agents of the others still need the store, which ends with node 0.
        with suppress(RuntimeError):
            count_until(store, PRESENT, -1, lambda left: node.rank != 0 or left <= 0)
    finally:
        ended.set()


def _beat(store: Store, node: Node, timeout: timedelta, ended: threading.Event) -> None:
    """Gives signs of life until `ended`. Ends the process if the store does not answer any more,
    because the agent, which waits for it without a limit when the link is cut, does not."""
    with suppress(RuntimeError):
        while not ended.wait(BEAT):
            watch = threading.Timer(timeout.total_seconds(), _give_up, (node,))
            watch.daemon = True
            watch.start()
            try:
                store.add(_beats(node), 1)
            finally:
                watch.cancel()


def _give_up(node: Node) -> None:
    """The kernel then kills the ranks."""
    print(f"error: {_gone(node)}", file=sys.stderr, flush=True)
    os._exit(1)


def _gone(node: Node) -> str:
    return f"node 0 no longer answers at {node.endpoint}: it has ended, or cannot be reached"


def _check_address(node: Node) -> str:
    """The address of this node on the way to node 0.

    Raises:
        ConfigError: there is no such host; or this is node 0, but the host is not this one, or the
            port is in use.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            node.host, node.port, type=socket.SOCK_STREAM
        )[0]
        if node.rank == 0:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)
            return str(route.getsockname()[0])
    except OSError as error:
        hint = (
            ": it must name this node, since --node-rank is 0, and a port that no other run uses"
            if node.rank == 0
            else ""
        )
        raise ConfigError(f"--rdzv {node.endpoint}: {error.strerror}{hint}") from None


def _claim(store: Store, node: Node) -> None:
    """Takes the rank of a node; that of a node that is gone can be taken anew.

    Raises:
        ConfigError: another node has it.
    """
    holder = f"holder of node {node.rank}"
    if store.add(f"claims of node {node.rank}", 1) > 1:
        beats = store.add(_beats(node), 0)
        time.sleep(3 * BEAT)
        if store.add(_beats(node), 0) > beats:
            raise ConfigError(
                f"--node-rank {node.rank} is taken by {store.get(holder).decode()}: give each node"
                " its own, and each run its own --rdzv"
            )
    store.set(holder, f"process {os.getpid()} on {socket.gethostname()}")


def _beats(node: Node) -> str:
    return f"beats of node {node.rank}"
