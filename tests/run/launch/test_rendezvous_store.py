"""The stores of ranks: a file of their user only, and a port at one address only."""

from __future__ import annotations

import socket
import stat
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwright.run.launch.rank_processes import rank_environments
from shardwright.run.launch.rendezvous_store import (
    RUN_VARIABLE,
    STORE_VARIABLE,
    open_private_store,
    private_folder,
    serve_tcp_store,
)

TIMEOUT = timedelta(seconds=20)


def test_ranks_of_one_launcher_meet_in_a_file_of_their_user() -> None:
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        first, second = rank_environments(2, 1, 0, 0, folder)
        stores = [open_private_store(each) for each in (first, second)]
        assert all(isinstance(store, dist.FileStore) for store in stores)
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"
        again = rank_environments(2, 1, 1, 1, folder)[0]
        assert not open_private_store(again).check(["key"])
    assert not folder.exists()


def test_ranks_of_an_inner_launcher_do_not_take_the_store_of_the_outer_one(tmp_path: Path) -> None:
    assert open_private_store({}) is None
    settings = {RUN_VARIABLE: "run", STORE_VARIABLE: str(tmp_path / "run")}
    assert open_private_store(settings) is not None
    assert open_private_store({**settings, RUN_VARIABLE: "of torchrun"}) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_at_loopback_listens_there_only(host: str) -> None:
    store = serve_tcp_store(host, 0, TIMEOUT)
    # A second store of this process at the same port uses the same server, as an agent's does.
    agent = {"is_master": True, "multi_tenant": True, "wait_for_workers": False}
    others = [
        dist.TCPStore("127.0.0.1", store.port, timeout=TIMEOUT, **agent),
        serve_tcp_store(host, store.port, TIMEOUT),
    ]
    store.set("key", "value")
    assert [other.get("key") for other in others] == [b"value"] * 2
    with socket.socket() as probe:
        probe.settimeout(2)
        assert probe.connect_ex(("127.0.0.2", store.port)) != 0
