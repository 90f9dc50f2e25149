"""Compares facts and shares rank 0's results through the key-value store.

The store exists before the process group, and waiting on it is not limited by the timeout of
collectives. While rank 0 computes a result it writes a heartbeat.
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
"""Seconds without a heartbeat after which a rank computes the result itself."""

FAREWELL = 10.0
"""Seconds that the process serving the store waits for its readers before it ends."""

PIECE = 4 * 2**20
"""Bytes of one entry of the store, which takes no more than 8 MiB."""


def check_same_facts(
    store: Store, rank: int, size: int, facts: Mapping[str, Any], own: str | None = None
) -> None:
    """Checks that all ranks have the same `facts`. Every rank must call it.

    Args:
        store: not used for a check before; rank 0's process may serve it.
        facts: JSON values by name.
        own: a value, such as a device, that no other rank of the host may have.

    Raises:
        ConfigError: on all ranks, with the first difference.
        RuntimeError: a rank did not call it within the store's timeout.
    """
    store.set(f"rank {rank}", json.dumps([socket.gethostname(), facts, own]))
    if rank == 0:
        texts = store.multi_get([f"rank {each}" for each in range(size)])
        ranks = [json.loads(text) for text in texts]
        difference = _tell(store, lambda: _difference(ranks) or _used_twice(ranks), str)
    else:
        difference = _told(store)
    # The process of rank 0 may serve the store.
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
    """What `make` returns on rank 0, on every rank of the process group that asks for the same.

    The n-th call of each rank meets the n-th of rank 0. A rank that asks for something else, or
    that rank 0 does not join within `PATIENCE`, makes its own, as if it were alone.

    Args:
        what: a name of what is made; calls with other names do not count.
        request: all that the result depends on.
        write, read: to and from a text.

    Raises: on every rank as `make` on rank 0, and
        PlanError: in place of an error that is not of Shardwright's.
        CommunicationError: if rank 0 is gone.
    """
    rank, name = dist.get_rank(), sha256(request.encode()).hexdigest()
    calls = PrefixStore(what, dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    number = calls.add(f"calls of rank {rank}", 1)
    store = PrefixStore(str(number), calls)
    if rank == 0:
        store.set("request", name)
        with _signs_of_life(store):
            return _tell(store, make, write)
    if not _comes(store, "request"):
        calls.add(f"calls of rank {rank}", -1)
        log.info("rank 0 makes no %s: this rank makes its own", what)
        return make()
    if store.get("request").decode() != name:
        log.info("rank 0 makes another %s: this rank makes its own", what)
        return make()
    try:
        if not _comes(store, "pieces"):
            raise CommunicationError(f"rank 0, which makes the {what}, is gone or stuck")
        result = _told(store)
    except dist.DistNetworkError as error:
        raise CommunicationError(f"rank 0, which makes the {what}, is gone") from error
    return read(result)


def count_until(store: Store, key: str, step: int, enough: Callable[[int], bool]) -> None:
    """Adds `step` to a counter in the store and waits until it is enough, at most `FAREWELL`."""
    count, deadline = store.add(key, step), time.monotonic() + FAREWELL
    while not enough(count) and time.monotonic() < deadline:
        time.sleep(0.01)
        count = store.add(key, 0)


@contextmanager
def _signs_of_life(store: Store) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # The store is gone, as the main thread will see.
            while not ended.wait(BEAT):
                store.add("beats", 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _comes(store: Store, key: str) -> bool:
    """Waits for a key as long as rank 0 lives; whether it came."""
    beats, deadline = 0, time.monotonic() + PATIENCE
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(BEAT / 5)
        now = store.add("beats", 0)
        if now > beats:
            beats, deadline = now, time.monotonic() + PATIENCE
    return True


def _tell(store: Store, make: Callable[[], Answer], write: Callable[[Answer], str]) -> Answer:
    """Runs `make` on rank 0 and sends its result, or the error it raises, to the other ranks."""
    try:
        result = make()
        _send(store, {"result": write(result)})
    except BaseException as error:
        fields = {k: v for k, v in vars(error).items() if isinstance(v, (int, str))}
        _send(store, {"kind": type(error).__name__, "message": str(error), "fields": fields})
        raise
    return result


def _told(store: Store) -> str:
    """Receives rank 0's result as text, or raises rank 0's error."""
    pieces = (store.get(f"piece {number}") for number in range(int(store.get("pieces"))))
    answer: dict[str, Any] = json.loads(zlib.decompress(b"".join(pieces)))
    if "result" in answer:
        return str(answer["result"])
    kind, message = getattr(errors, str(answer["kind"]), None), answer["message"]
    if kind is None:
        raise PlanError(f"rank 0 raised {answer['kind']}: {message}")
    error: Exception = kind.__new__(kind, message)
    vars(error).update(answer["fields"])
    raise error


def _send(store: Store, answer: Mapping[str, Any]) -> None:
    content = zlib.compress(json.dumps(answer).encode())
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"piece {number}", piece)  # type: ignore[arg-type]
    store.set("pieces", str(len(pieces)))


def _difference(ranks: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> str:
    """In words, the first fact in which a rank differs from rank 0; nothing if there is none.

    Args:
        ranks: the host, the facts, and what is its own, of each.
    """
    first, expected, _ = ranks[0]
    for rank, (host, facts, _) in enumerate(ranks):
        for name in [*expected, *facts]:
            here, there = (json.dumps(each.get(name)) for each in (facts, expected))
            if here != there:
                return (
                    f"{name}: {here} for rank {rank} on {host}, {there} for rank 0 on {first}; all"
                    " ranks of a run need the same"
                )
    return ""


def _used_twice(ranks: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> str:
    """In words, the first accelerator that two ranks have; nothing if there is none."""
    users: dict[tuple[str, str], int] = {}
    for rank, (host, _, own) in enumerate(ranks):
        first = rank if own is None else users.setdefault((host, own), rank)
        if first != rank:
            return f"ranks {first} and {rank} on {host} have the same device: {own}"
    return ""
