"""Rendezvous stores of ranks, each accessible to as few processes as possible.

Ranks of one launcher meet in a file that only their user can open. `TCPStore`, which scripts and
several nodes use, has no access control: everyone who reaches its port can read and write its keys.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from shardwright.core.runtime.accelerator import LOOPBACK

STORE_VARIABLE = "SHARDWRIGHT_STORE"
"""Environment variable of ranks: path of the launcher's store file."""

RUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable of ranks: unique name of the run, also the name of its store file."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Context with a new folder for store files, which other users of the machine cannot open."""
    # `TemporaryDirectory` gives only the owner access (mode 0700).
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        yield Path(folder)


def store_settings(folder: Path, run: str) -> dict[str, str]:
    """Return the environment variables with which ranks rendezvous by a file in `folder`.

    Args:
        folder: a private folder.
        run: unique name of the run.
    """
    return {RUN_VARIABLE: run, STORE_VARIABLE: str(folder / run)}


def open_private_store(environment: Mapping[str, str] = os.environ) -> Store | None:
    """Open the store file of this rank's launcher; None if the launcher has none."""
    path = Path(environment.get(STORE_VARIABLE, ""))
    # A launcher that a rank has started, such as torchrun, passes on the variable of the rank.
    if path.name == "" or path.name != environment.get(RUN_VARIABLE):
        return None
    # -1 stands for a number of users that is not fixed.
    return FileStore(str(path), -1)


@contextmanager
def serve_store() -> Iterator[int]:
    """Context that serves a `TCPStore` to processes of this machine.

    Yields:
        The port of the store.
    """
    # 5 minutes is the default of `TCPStore`.
    store = serve_tcp_store(LOOPBACK, 0, timedelta(minutes=5), shared=False)
    yield store.port
    # The server of a `TCPStore` ends with the object.
    del store


def serve_tcp_store(host: str, port: int, timeout: timedelta, shared: bool = True) -> dist.TCPStore:  # type: ignore[name-defined]
    """Serve a `TCPStore`, only on `host` if that is an IP address or `localhost`.

    For other host names the store listens on all interfaces, as `TCPStore` does by default, because
    other nodes may resolve the name to another address.

    Args:
        host, port: address of the store; port 0 for any free port.
        timeout: timeout of store operations.
        shared: whether other stores of this process with the same port use this server.

    Raises:
        RuntimeError: if the address cannot be used.
    """
    address = _choose_bind_address(host)
    listener = None if address is None else _bind_socket(address, port)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address or host,
        port if listener is None else listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=shared,
        # The store owns the descriptor from here on, and closes it.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _bind_socket(address: str, port: int) -> socket.socket | None:
    """Bind a socket to an address of this machine; return None if `TCPStore` must bind its own.

    `TCPStore` binds its own socket if this process already serves a store at `port`, or if a
    network translates `address` (NAT).
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    # Without this option, the port of a store that has just ended could not be bound, as its
    # connections linger.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError:
        listener.close()
        return None
    return listener


def _choose_bind_address(host: str) -> str | None:
    if host == "localhost":
        return LOOPBACK
    try:
        return str(ip_address(host))
    except ValueError:
        return None
