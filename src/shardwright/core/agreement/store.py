"""Compare facts and share rank 0's results through the key-value store of the rendezvous.

The store exists before the process group, and the timeout of collectives does not limit waiting on
it. While rank 0 computes a result, it writes heartbeats.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright import errors
from shardwright.errors import CommunicationError, ConfigError, PlanError

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

BEAT = 1.0
"""Seconds between two heartbeats of rank 0."""

PATIENCE = 60.0
"""Seconds that a rank waits for rank 0's call, or for its next heartbeat."""

FAREWELL = 10.0
"""Largest number of seconds that the process serving the store waits for its readers."""

PIECE = 4 * 2**20
"""Largest size of an entry in bytes; `TCPStore` accepts at most 8 MiB."""


def check_same_facts(
    store: Store, rank: int, size: int, facts: Mapping[str, Any], own: str | None = None
) -> None:
    """Check that all ranks have the same facts. Every rank must call this function.

    Args:
        store: a store without entries of an earlier check; rank 0's process may serve it.
        rank, size: this rank, and the number of ranks.
        facts: JSON values by name.
        own: a value that must differ between ranks of a host, such as the name of the accelerator.

    Raises:
        ConfigError: on all ranks, with the first difference.
        RuntimeError: if a rank does not call this function within the store's timeout.
    """
    store.set(f"rank {rank}", json.dumps([socket.gethostname(), facts, own]))
    if rank == 0:
        texts = store.multi_get([f"rank {each}" for each in range(size)])
        ranks = [json.loads(text) for text in texts]
        difference = _publish(store, lambda: _difference(ranks) or _shared_device(ranks), str)
    else:
        difference = _receive(store)
    # Rank 0's process may serve the store: it must outlive the reads of the other ranks.
    count_until(store, "read", 1, lambda readers: rank != 0 or readers >= size)
    if difference:
        raise ConfigError(difference)


def on_rank_0(
    what: str,
    request: str,
    make: Callable[[], Answer],
    write: Callable[[Answer], str],
    read: Callable[[str], Answer],
) -> Answer:
    """Compute a result on rank 0, and return it on every rank that makes the same request.

    The n-th call of each rank is matched with the n-th call of rank 0. A rank whose request
    differs, or whose call rank 0 does not match within `PATIENCE`, computes its own result.

    Args:
        what: name of the result; calls are counted per name.
        request: a text that determines the result.
        make: computes the result.
        write, read: convert the result to text and back.

    Raises:
        ShardwrightError: on every rank, if `make` raises one on rank 0.
        PlanError: on other ranks, if `make` raises another error on rank 0.
        CommunicationError: on other ranks, if rank 0 has ended or does not respond.
    """
    rank, name = dist.get_rank(), sha256(request.encode()).hexdigest()
    calls = PrefixStore(what, dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    number = calls.add(f"calls of rank {rank}", 1)
    store = PrefixStore(str(number), calls)
    if rank == 0:
        store.set("request", name)
        with _heartbeat(store):
            return _publish(store, make, write)
    if not _wait_for(store, "request"):
        # Undo the count, so that rank 0's call is matched with this rank's next call.
        calls.add(f"calls of rank {rank}", -1)
        log.info("rank 0 computes no %s, so this rank computes its own", what)
        return make()
    if store.get("request").decode() != name:
        log.info("rank 0 computes the %s of another request, so this rank computes its own", what)
        return make()
    try:
        if not _wait_for(store, "pieces"):
            raise CommunicationError(
                f"rank 0, which computes the {what}, has ended or does not respond"
            )
        result = _receive(store)
    except dist.DistNetworkError as error:
        raise CommunicationError(f"rank 0, which computes the {what}, has ended") from error
    return read(result)


def count_until(store: Store, key: str, step: int, enough: Callable[[int], bool]) -> None:
    """Add `step` to the counter `key` of the store, and wait until `enough(count)`, at most
    `FAREWELL` seconds."""
    count, deadline = store.add(key, step), time.monotonic() + FAREWELL
    while not enough(count) and time.monotonic() < deadline:
        time.sleep(0.01)
        count = store.add(key, 0)


@contextmanager
def _heartbeat(store: Store) -> Iterator[None]:
    """Context in which a thread adds a heartbeat to the store every `BEAT` seconds."""
    ended = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # If the store has ended, the main thread reports it.
            while not ended.wait(BEAT):
                store.add("beats", 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wait_for(store: Store, key: str) -> bool:
    """Wait for a key until `PATIENCE` seconds after rank 0's last heartbeat; return whether the key
    exists."""
    beats, deadline = 0, time.monotonic() + PATIENCE
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(BEAT / 5)
        latest = store.add("beats", 0)
        if latest > beats:
            beats, deadline = latest, time.monotonic() + PATIENCE
    return True


def _publish(store: Store, make: Callable[[], Answer], write: Callable[[Answer], str]) -> Answer:
    """Run `make`, send its result, or its error, to the other ranks, and return the result."""
    try:
        result = make()
        _send(store, {"result": write(result)})
    except BaseException as error:
        fields = {k: v for k, v in vars(error).items() if isinstance(v, (int, str))}
        _send(store, {"kind": type(error).__name__, "message": str(error), "fields": fields})
        raise
    return result


def _receive(store: Store) -> str:
    """Receive rank 0's result as text, or raise rank 0's error."""
    pieces = (store.get(f"piece {number}") for number in range(int(store.get("pieces"))))
    answer: dict[str, Any] = json.loads(zlib.decompress(b"".join(pieces)))
    if "result" in answer:
        return str(answer["result"])
    kind, message = getattr(errors, str(answer["kind"]), None), answer["message"]
    if kind is None:
        raise PlanError(f"rank 0 raised {answer['kind']}: {message}")
    # Without `__init__`, whose arguments differ between exception classes.
    error: Exception = kind.__new__(kind, message)
    vars(error).update(answer["fields"])
    raise error


def _send(store: Store, answer: Mapping[str, Any]) -> None:
    content = zlib.compress(json.dumps(answer).encode())
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"piece {number}", piece)  # type: ignore[arg-type]
    # Last: readers wait for this key.
    store.set("pieces", str(len(pieces)))


def _difference(ranks: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> str:
    """Return the first fact in which a rank differs from rank 0, as an error message, or "".

    Args:
        ranks: host, facts and unique value of each rank.
    """
    first, expected, _ = ranks[0]
    for rank, (host, facts, _) in enumerate(ranks):
        for name in [*expected, *facts]:
            here, there = (json.dumps(each.get(name)) for each in (facts, expected))
            if here != there:
                return (
                    f"{name}: {here} for rank {rank} on {host}, {there} for rank 0 on {first};"
                    " all ranks of a run need the same"
                )
    return ""


def _shared_device(ranks: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> str:
    """Return the first accelerator that two ranks use, as an error message, or ""."""
    users: dict[tuple[str, str], int] = {}
    for rank, (host, _, own) in enumerate(ranks):
        first = rank if own is None else users.setdefault((host, own), rank)
        if first != rank:
            return f"ranks {first} and {rank} on {host} use the same device: {own}"
    return ""
