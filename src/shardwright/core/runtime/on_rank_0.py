"""What rank 0 works out once for all ranks, however long it takes.

A collective that waits for it would reach its time-out, so the ranks meet in the store of their
process group, where rank 0 gives signs of life while it works.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright import errors
from shardwright.core.runtime.collective_errors import CommunicationError
from shardwright.errors import PlanError

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

BEAT = 1.0
"""Seconds between two signs of life."""

PATIENCE = 60.0
"""Seconds without any after which a rank goes on without rank 0."""

PIECE = 4 * 2**20
"""Bytes of one entry of the store, which takes no more than 8 MiB."""


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
        with _signs_of_life(store), _telling_errors(store):
            result = make()
            _send(store, {"result": write(result)})
        return result
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
        answer = _receive(store)
    except dist.DistNetworkError as error:
        raise CommunicationError(f"rank 0, which makes the {what}, is gone") from error
    if "result" not in answer:
        raise _error_of(answer)
    return read(answer["result"])


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


@contextmanager
def _telling_errors(store: Store) -> Iterator[None]:
    """Sends what is raised to the other ranks too."""
    try:
        yield
    except BaseException as error:
        fields = {k: v for k, v in vars(error).items() if isinstance(v, (int, str))}
        _send(store, {"kind": type(error).__name__, "message": str(error), "fields": fields})
        raise


def _error_of(answer: dict[str, Any]) -> Exception:
    kind, message = getattr(errors, str(answer["kind"]), None), answer["message"]
    if kind is None:
        return PlanError(f"rank 0 raised {answer['kind']}: {message}")
    error: Exception = kind.__new__(kind, message)
    vars(error).update(answer["fields"])
    return error


def _send(store: Store, answer: dict[str, Any]) -> None:
    content = zlib.compress(json.dumps(answer).encode())
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"piece {number}", piece)  # type: ignore[arg-type]
    store.set("pieces", str(len(pieces)))


def _receive(store: Store) -> dict[str, Any]:
    pieces = (store.get(f"piece {number}") for number in range(int(store.get("pieces"))))
    answer: dict[str, Any] = json.loads(zlib.decompress(b"".join(pieces)))
    return answer
