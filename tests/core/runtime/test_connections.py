"""The sockets of a process are looked at, and nothing stays open of it."""

import socket

from shardwright.core.runtime.connections import FILE_DESCRIPTORS, _duplicate_sockets_of_process


def test_looking_for_sockets_leaves_no_file_descriptor() -> None:
    with socket.create_server(("localhost", 0)) as server:
        before = len([*FILE_DESCRIPTORS.iterdir()])
        with _duplicate_sockets_of_process() as sockets:
            assert server.getsockname() in [each.getsockname() for each in sockets]
        assert len([*FILE_DESCRIPTORS.iterdir()]) == before
