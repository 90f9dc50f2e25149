"""Launch the ranks of one node of several, with torchrun's elastic agent.

Every node runs the same command with its own node rank. The agent of each node starts its ranks,
and restarts all of them if a rank fails or a node joins or leaves. Node 0 serves the store of the
agents' rendezvous.
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
from shardwright.errors import ConfigError, printable
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.process_group import TIMEOUT
from shardwright.run.launch.rank_failure import (
    RankEnd,
    RankError,
    RankFailedError,
    StoppedError,
    first_failure,
    requested_stop,
)
from shardwright.run.launch.rank_processes import SHUTDOWN_SECONDS, process_settings
from shardwright.run.launch.rendezvous_store import serve_tcp_store

# Seconds between two heartbeats of a node.
HEARTBEAT_SECONDS = 1.0

# Store key of the number of nodes that have joined, minus those that have left.
NUM_NODES_KEY = "nodes present"

# Seconds until an agent gives up on a store that does not answer.
READ_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Node:
    """One node of a run on several nodes, described by torchrun's options.

    Args:
        rank: node rank; node 0 serves the store.
        minimum, maximum: bounds of the number of nodes.
        host, port: address at which node 0 serves the store.
        local_size: number of ranks on this node.
    """

    rank: int
    minimum: int
    maximum: int
    host: str
    port: int
    local_size: int

    @staticmethod
    def parse(nnodes: str, rank: int | None, rdzv: str | None, local_size: int | None) -> Node:
        """Parse the command-line options of a node.

        Args:
            nnodes: `N` or `MIN:MAX`.
            rank: value of `--node-rank`; None if not given.
            rdzv: `HOST:PORT` of node 0.
            local_size: ranks on this node; by default one per accelerator, or one without any.

        Raises:
            ConfigError: if an option is missing or invalid.
        """
        low, colon, high = nnodes.partition(":")
        # Fewer than two if one of them is not a decimal number.
        numbers = [int(number) for number in (low, high if colon else low) if number.isdecimal()]
        if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
            raise ConfigError(
                f"--nnodes {nnodes}: expected a number of nodes, or MIN:MAX with 1 ≤ MIN ≤ MAX"
                "\nuse for example --nnodes 2 or --nnodes 2:4"
            )
        if rank is None or rdzv is None:
            raise ConfigError(
                "--nnodes needs --node-rank and --rdzv\n"
                "give each node its own --node-rank, and all the same --rdzv HOST:PORT, the address"
                " of node 0 and a free port there, for example --node-rank 0 --rdzv node0:29400"
            )
        minimum, maximum = numbers
        if not 0 <= rank < maximum:
            raise ConfigError(
                f"--node-rank {rank}: out of range for --nnodes {nnodes}\n"
                f"use a number from 0 to {maximum - 1}"
            )
        host, port = _parse_host_and_port(rdzv)
        if local_size is None:
            local_size = max(1, num_accelerators())
        return Node(rank, minimum, maximum, host, port, local_size)

    @property
    def endpoint(self) -> str:
        # IPv6 addresses contain colons themselves.
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _parse_host_and_port(text: str) -> tuple[str, int]:
    try:
        url = urlsplit(f"//{text}")
        # A path, a query or a user name would make these parts differ from the text.
        if url.netloc == text and "@" not in text and url.hostname and url.port:
            return url.hostname, url.port
    except ValueError:
        pass
    raise ConfigError(f"--rdzv {text} is not HOST:PORT\nuse for example --rdzv node0:29400")


def launch_node(
    command: Sequence[str],
    node: Node,
    logs: LogFolder,
    *,
    max_restarts: int = 0,
    timeout: timedelta = TIMEOUT,
) -> None:
    """Run `python <command>` as the ranks of `node`, and wait for the ranks of all nodes.

    Args:
        command: the arguments of the Python interpreter.
        max_restarts: number of restarts of all ranks after failures of ranks of this node.
        timeout: longest time to wait for other nodes.

    Raises:
        ConfigError: if the store cannot be served or reached, or another node has the same rank.
        RankFailedError: if a rank failed and no restarts are left, too few nodes joined, or node 0
            no longer answers.
        StoppedError: if this process received SIGINT, SIGTERM, SIGHUP or SIGQUIT, or a rank
            received SIGINT or SIGTERM and no restarts are left.
    """
    # The agent passes the environment of this process on to the ranks.
    os.environ.update(_make_agent_environment(node))
    # The agent would log failures of ranks with its own stack traces; this function raises them.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    seconds = int(timeout.total_seconds())
    with _join_store(node, timeout) as local_address:
        agent = LaunchConfig(
            min_nodes=node.minimum,
            max_nodes=node.maximum,
            nproc_per_node=node.local_size,
            run_id="shardwright",
            rdzv_backend="c10d",
            rdzv_endpoint=node.endpoint,
            rdzv_configs={
                # Explicit, because the backend would otherwise guess by comparing addresses.
                "is_host": node.rank == 0,
                "join_timeout": seconds,
                "read_timeout": min(seconds, READ_TIMEOUT_SECONDS),
            },
            max_restarts=max_restarts,
            # Ranks of other nodes connect to this address; a host name might not resolve there.
            local_addr=local_address,
            logs_specs=_RankLogsSpecs(logs),
            log_line_prefix_template="rank ${rank}: ",
        )
        try:
            elastic_launch(agent, sys.executable)(*command)
        except ChildFailedError as error:
            ends = _convert_to_rank_ends(error.failures, logs)
            raise requested_stop(ends) or first_failure(ends, logs) from None
        except SignalException as error:
            raise StoppedError(error.sigval) from None
        except RendezvousTimeoutError:
            raise RankFailedError(
                f"fewer than {node.minimum} nodes joined at {node.endpoint} within {seconds} s\n"
                f"start the command on each node, with --rdzv {node.endpoint}"
            ) from None
        except RendezvousError:
            raise RankFailedError(_format_unreachable_store_message(node)) from None


def _convert_to_rank_ends(failures: Mapping[int, ProcessFailure], logs: LogFolder) -> list[RankEnd]:
    """Convert the agent's report of failed ranks to one `RankEnd` per rank.

    After a failure, the agent sends SIGTERM to the other ranks, then SIGKILL to ranks that do not
    exit. It does not report these signals, so this function infers them from exit codes and times.
    """
    first_timestamp = min(failure.timestamp for failure in failures.values())
    sigterm_exit = -signal.SIGTERM
    # If every rank died of SIGTERM, no rank failed first, so the agent did not send it.
    agent_terminated = any(failure.exitcode != sigterm_exit for failure in failures.values())
    ends = []
    for rank, failure in failures.items():
        error, sent_signals = RankError.read(logs.error(rank)), frozenset[int]()
        if failure.exitcode == sigterm_exit and agent_terminated:
            sent_signals = frozenset({signal.SIGTERM})
        elif (
            failure.exitcode == -signal.SIGKILL
            and failure.timestamp >= first_timestamp + SHUTDOWN_SECONDS
        ):
            sent_signals = frozenset({signal.SIGTERM, signal.SIGKILL})
        end = RankEnd(
            rank, failure.pid, failure.exitcode, failure.timestamp, sent_signals, error=error
        )
        ends.append(end)
    return ends


def _make_agent_environment(node: Node) -> dict[str, str]:
    """Return the environment variables of torchrun's agent; the user's values take precedence."""
    return {
        **process_settings(node.local_size),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        **os.environ,
        # Cannot be overridden: rank 0 must serve a new store at each start, because an agent that
        # replaces a killed one never learns the address of a shared store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


class _RankLogsSpecs(LogsSpecs):
    """Log files of the agent's ranks, at the paths of a local run; also prints rank 0's stdout."""

    def __init__(self, logs: LogFolder) -> None:
        super().__init__(str(logs.root))
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        # Global ranks are known only after the rendezvous, and change if nodes join or leave.
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
def _join_store(node: Node, timeout: timedelta) -> Iterator[str]:
    """Context manager that claims this node's rank in the store, and sends heartbeats until exit.

    Node 0 serves the store.

    Yields:
        The IP address at which other nodes reach this node.
    """
    # First, so that an unusable address is reported at once instead of after the timeout.
    address = _find_local_ip_address(node)
    try:
        store = (
            serve_tcp_store(node.host, node.port, timeout)
            if node.rank == 0
            else dist.TCPStore(  # type: ignore[attr-defined]
                node.host, node.port, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )
        )
        _claim_node_rank(store, node)
    except RuntimeError:
        raise ConfigError(
            f"--rdzv {node.endpoint}: node 0 has not answered within"
            f" {int(timeout.total_seconds())} s\ncheck that node 0 is started with this --rdzv, and"
            " that the port is open"
        ) from None
    ended = threading.Event()
    heartbeat = threading.Thread(
        target=_send_heartbeats, args=(store, node, timeout, ended), daemon=True
    )
    heartbeat.start()
    try:
        store.add(NUM_NODES_KEY, 1)
        yield address
        # The store ends with node 0, which therefore waits until all other agents have left.
        with suppress(RuntimeError):
            count_until(store, NUM_NODES_KEY, -1, lambda count: node.rank != 0 or count <= 0)
    finally:
        ended.set()


def _send_heartbeats(store: Store, node: Node, timeout: timedelta, ended: threading.Event) -> None:
    """Send heartbeats until `ended` is set, and exit the process if the store stops answering.

    Without heartbeats the agent would not detect a broken connection, and would wait forever.
    """
    with suppress(RuntimeError):
        while not ended.wait(HEARTBEAT_SECONDS):
            # `store.add` itself blocks without a limit when the link is cut.
            watchdog = threading.Timer(timeout.total_seconds(), _exit_without_cleanup, (node,))
            watchdog.daemon = True
            watchdog.start()
            try:
                store.add(_make_heartbeat_key(node), 1)
            finally:
                watchdog.cancel()


def _exit_without_cleanup(node: Node) -> None:
    # Exits without cleanup, which would wait for the store. The kernel kills the ranks when this
    # process ends.
    print(
        printable(f"error: {_format_unreachable_store_message(node)}"), file=sys.stderr, flush=True
    )
    os._exit(1)


def _format_unreachable_store_message(node: Node) -> str:
    return (
        f"node 0 no longer answers at {node.endpoint}: it has ended, or cannot be reached\n"
        "check the log of node 0, and the network between the nodes"
    )


def _find_local_ip_address(node: Node) -> str:
    """Return the IP address of this node's interface to node 0.

    Raises:
        ConfigError: if the host name cannot be resolved; or this is node 0, and the host is another
            machine or the port is in use.
    """
    try:
        family, socket_type, _, _, address = socket.getaddrinfo(
            node.host, node.port, type=socket.SOCK_STREAM
        )[0]
        if node.rank == 0:
            # The store binds the address later; here a failure gives its reason.
            with socket.socket(family, socket_type) as probe:
                # Without this option, the port of a run that has just ended could not be bound, as
                # its connections linger.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        # Connecting a UDP socket sends nothing: the kernel only chooses the outgoing interface.
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)
            return str(route.getsockname()[0])
    except OSError as error:
        hint = (
            "\nuse an address of this node, because --node-rank is 0, and a port that no other run"
            " uses"
            if node.rank == 0
            else ""
        )
        raise ConfigError(
            f"--rdzv {node.endpoint}: cannot use this address: {error.strerror}{hint}"
        ) from None


def _claim_node_rank(store: Store, node: Node) -> None:
    """Register this process as the owner of its node rank in the store.

    Raises:
        ConfigError: if a live node has this rank.
    """
    owner_key = f"owner of node {node.rank}"
    if store.add(f"claims of node {node.rank}", 1) > 1:
        # An earlier owner is alive if its heartbeats continue.
        heartbeats = store.add(_make_heartbeat_key(node), 0)
        # A live owner has sent several heartbeats by then.
        time.sleep(3 * HEARTBEAT_SECONDS)
        if store.add(_make_heartbeat_key(node), 0) > heartbeats:
            raise ConfigError(
                f"--node-rank {node.rank} is taken by {store.get(owner_key).decode()}\n"
                "give each node its own --node-rank, and each run its own --rdzv"
            )
    store.set(owner_key, f"process {os.getpid()} on {socket.gethostname()}")


def _make_heartbeat_key(node: Node) -> str:
    return f"beats of node {node.rank}"
