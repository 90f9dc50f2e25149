"""Close the connections of this process to other ranks, so that blocked collectives fail."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISSOCK

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardwright.core.runtime.accelerator import HOST_BACKEND

FILE_DESCRIPTORS = Path("/dev/fd")
"""Folder in which Linux and macOS list the file descriptors of this process."""


def close_connections(store: Store) -> None:
    """Shut down the connections that other ranks have opened to this process.

    Collectives of gloo, which cannot be interrupted otherwise, then raise an error on both ranks of
    a connection. Each connection was opened by one of its ranks, so all connections are shut down
    once both ranks have called this function.

    Args:
        store: the store of the process group; connections to its server stay open.
    """
    # Prefix stores wrap the store that has the port.
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    server_port = getattr(store, "port", None)
    with _duplicate_sockets_of_process() as sockets:
        # An accepted connection has the local port of the socket that listened for it.
        listening = {_get_local_port(each) for each in sockets if _is_listening_socket(each)} - {
            server_port
        }
        for each in sockets:
            if not _is_listening_socket(each) and _get_local_port(each) in listening:
                # The other rank may have closed the connection first.
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
    # NCCL and other backends can abort a communicator, which gloo cannot.
    if dist.get_backend() != HOST_BACKEND and dist.group.WORLD is not None:
        dist.group.WORLD.abort()


@contextmanager
def _duplicate_sockets_of_process() -> Iterator[list[socket.socket]]:
    """Yield duplicates of all internet sockets of this process; close the duplicates at exit."""
    sockets = []
    for file in [*FILE_DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # The descriptor of the folder, which is closed by now.
            if S_ISSOCK(os.fstat(int(file.name)).st_mode):
                # Of a duplicate, since closing the socket object closes its descriptor, and gloo's
                # must stay open.
                sockets.append(socket.socket(fileno=os.dup(int(file.name))))
    try:
        yield [each for each in sockets if each.family in (socket.AF_INET, socket.AF_INET6)]
    finally:
        for each in sockets:
            each.close()


def _is_listening_socket(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _get_local_port(connection: socket.socket) -> int:
    return int(connection.getsockname()[1])
