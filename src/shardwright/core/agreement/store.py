"""Compare settings and broadcast results of rank 0 through the key-value store of the rendezvous.

The store exists before the process group, and the timeout of collectives does not apply. While rank
0 computes a result, a thread of rank 0 writes heartbeats to the store.
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
"""Seconds that other ranks wait for rank 0 to begin, and then for each heartbeat of rank 0."""

WARN_AFTER = 10.0
"""Seconds after which a rank warns that it waits for rank 0 to begin the same computation."""

FAREWELL = 10.0
"""Maximum seconds that rank 0 waits until other ranks have read its result.

After that it may exit, which ends the store.
"""

PIECE = 4 * 2**20
"""Maximum bytes per entry of the store; `TCPStore` accepts at most 8 MiB."""


def check_same_facts(
    store: Store, rank: int, size: int, facts: Mapping[str, Any], unique_value: str | None = None
) -> None:
    """Check that settings are equal on all ranks. Collective.

    Args:
        store: a store without entries of an earlier check; may be served by rank 0's process.
        rank: this rank.
        size: number of ranks.
        facts: values of the settings, of JSON types, by name.
        unique_value: a value that must differ between ranks of a host, such as the name of the
            accelerator.

    Raises:
        ConfigError: on all ranks, with the first difference.
        RuntimeError: if a rank does not call this function within the store's timeout.
    """
    store.set(f"rank {rank}", json.dumps([socket.gethostname(), facts, unique_value]))
    if rank == 0:
        # Blocks until all ranks have written their settings, or raises after the store's timeout.
        values = store.multi_get([f"rank {each}" for each in range(size)])
        ranks = [json.loads(value) for value in values]
        difference = _send_result(
            store,
            lambda: _describe_setting_difference(ranks) or _describe_shared_device(ranks),
            str,
        )
    else:
        difference = _receive_result_or_raise(store)
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
    """Compute a result on rank 0, and return it on every rank.

    The n-th call of each rank is matched with the n-th call of rank 0. A rank computes the result
    itself if its `request` differs from rank 0's, or if rank 0 makes no matching call within
    `PATIENCE` seconds.

    Args:
        what: name of the result; calls are counted per name.
        request: all inputs on which the result depends, as text; ranks compare its hash.
        make: function that computes the result.
        write, read: functions that convert the result to a string and back.

    Raises:
        ShardwrightError: on every rank, if `make` raises a `ShardwrightError` on rank 0.
        PlanError: on other ranks, if `make` raises any other error on rank 0.
        CommunicationError: on other ranks, if rank 0 has exited or does not respond.
    """
    rank, name = dist.get_rank(), sha256(request.encode()).hexdigest()
    calls = PrefixStore(what, dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    number = calls.add(f"calls of rank {rank}", 1)
    store = PrefixStore(str(number), calls)
    if rank == 0:
        # Before `make`, which may take minutes: a rank with another request does not wait for its
        # end.
        store.set("request", name)
        with _send_heartbeats(store):
            return _send_result(store, make, write)
    if not _wait_for_key(store, "request", f"{what} of rank 0: make this call on all ranks"):
        # Undo the count, so that rank 0's call is matched with this rank's next call.
        calls.add(f"calls of rank {rank}", -1)
        log.info("rank 0 computes no %s, so this rank computes its own", what)
        return make()
    # The count is not undone here, as rank 0 has made the matching call.
    if store.get("request").decode() != name:
        log.info("rank 0 computes the %s of another request, so this rank computes its own", what)
        return make()
    try:
        if not _wait_for_key(store, "pieces"):
            raise CommunicationError(
                f"rank 0, which computes the {what}, has exited or does not respond\n"
                "see the log of rank 0 for its error"
            )
        result = _receive_result_or_raise(store)
    # A store operation fails with this error when the process that serves the store has exited.
    except dist.DistNetworkError as error:
        raise CommunicationError(
            f"rank 0, which computes the {what}, has exited\nsee the log of rank 0 for its error"
        ) from error
    return read(result)


def count_until(store: Store, key: str, step: int, is_reached: Callable[[int], bool]) -> None:
    """Add `step` to a counter in the store, then wait up to `FAREWELL` seconds for a count.

    Args:
        store: the store.
        key: name of the counter.
        step: number to add.
        is_reached: whether a count ends the wait.
    """
    count, deadline = store.add(key, step), time.monotonic() + FAREWELL
    while not is_reached(count) and time.monotonic() < deadline:
        time.sleep(0.01)
        # `add` of 0 reads the counter.
        count = store.add(key, 0)


@contextmanager
def _send_heartbeats(store: Store) -> Iterator[None]:
    """Context manager that writes a heartbeat to the store every `BEAT` seconds, in a thread."""
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


def _wait_for_key(store: Store, key: str, expected: str = "") -> bool:
    """Wait for `key` while rank 0 sends heartbeats; return whether `key` exists.

    Args:
        store: the store.
        key: the key.
        expected: name of the result in a warning after `WARN_AFTER` seconds; empty for no warning.
    """
    beats, deadline = 0, time.monotonic() + PATIENCE
    warns_at = time.monotonic() + WARN_AFTER
    while not store.check([key]):
        if expected and time.monotonic() > warns_at:
            log.warning("waited %.0f s for the %s", WARN_AFTER, expected)
            expected = ""
        if time.monotonic() > deadline:
            return False
        # Polls, as `Store.wait` would write its time-out to the log.
        time.sleep(BEAT / 5)
        # `add` of 0 reads the counter; `get` would block until the first heartbeat.
        latest = store.add("beats", 0)
        # Each heartbeat renews the deadline, as a search may take longer than any fixed time-out.
        if latest > beats:
            beats, deadline = latest, time.monotonic() + PATIENCE
    return True


def _send_result(
    store: Store, make: Callable[[], Answer], write: Callable[[Answer], str]
) -> Answer:
    """Return the result of `make()`, and write the result or its error to the store."""
    try:
        result = make()
        _write_answer_to_store(store, {"result": write(result)})
    # Also interrupts and exits of rank 0, for which the other ranks would wait `PATIENCE` seconds.
    except BaseException as error:
        fields = {k: v for k, v in vars(error).items() if isinstance(v, (int, str))}
        _write_answer_to_store(
            store, {"kind": type(error).__name__, "message": str(error), "fields": fields}
        )
        raise
    return result


def _receive_result_or_raise(store: Store) -> str:
    """Return the result of rank 0 as a string, or raise the error of rank 0."""
    pieces = (store.get(f"piece {number}") for number in range(int(store.get("pieces"))))
    answer: dict[str, Any] = json.loads(zlib.decompress(b"".join(pieces)))
    if "result" in answer:
        return str(answer["result"])
    # Errors of Shardwright are raised again with their class, so that callers can catch them.
    error_type, message = getattr(errors, str(answer["kind"]), None), answer["message"]
    if error_type is None:
        raise PlanError(f"rank 0 raised {answer['kind']}: {message}\nsee the log of rank 0")
    # Without `__init__`, whose arguments differ between exception classes.
    error: Exception = error_type.__new__(error_type, message)
    vars(error).update(answer["fields"])
    raise error


def _write_answer_to_store(store: Store, answer: Mapping[str, Any]) -> None:
    content = zlib.compress(json.dumps(answer).encode())
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"piece {number}", piece)  # type: ignore[arg-type]
    # Last: readers wait for this key.
    store.set("pieces", str(len(pieces)))


def _describe_setting_difference(ranks: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> str:
    """Return an error message about the first setting that differs from rank 0's, or "".

    Args:
        ranks: (host name, settings by name, unique value or None) of each rank.
    """
    first, expected, _ = ranks[0]
    for rank, (host, facts, _) in enumerate(ranks):
        # The names of both ranks, as a setting may be missing on either.
        for name in [*expected, *facts]:
            here, there = (json.dumps(each.get(name)) for each in (facts, expected))
            if here != there:
                return (
                    f"{name}: {here} for rank {rank} on {host}, {there} for rank 0 on {first};"
                    " all ranks of a run need the same"
                )
    return ""


def _describe_shared_device(ranks: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> str:
    """Return an error message about the first accelerator that two ranks share, or "".

    Args:
        ranks: (host name, settings by name, name of the accelerator or None) of each rank.
    """
    # From (host, device) to the first rank that uses the device.
    users: dict[tuple[str, str], int] = {}
    for rank, (host, _, device) in enumerate(ranks):
        first = rank if device is None else users.setdefault((host, device), rank)
        if first != rank:
            return f"ranks {first} and {rank} on {host} use the same device: {device}"
    return ""
