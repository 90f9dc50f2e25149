"""Name the ranks that wait for each other in different calls, on all ranks within seconds.

Every rank counts its collective calls. Once it has made none for `PATIENCE` seconds, a thread of
its own writes to the store of the process group what the rank is doing, and rank 0 compares. If the
ranks can never meet, all raise the same error: a rank that is blocked in a collective is woken by
closing its connections to other ranks. Until then no call touches the store, except one that waits
for all ranks before it communicates, as one rank may make it alone by mistake.
"""

from __future__ import annotations

import atexit
import logging
import math
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, wraps
from itertools import count
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.agreement.rank_states import RankState, difference_of_calls
from shardwright.core.runtime.collective_errors import PEER_FAILURE, PROGRAM
from shardwright.core.runtime.connections import close_connections
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.autograd import around_backward
from shardwright.core.torch_internals.distributed import group_timeout, own_connection
from shardwright.errors import DataError, ShardwrightError

log = logging.getLogger(__name__)

Params = ParamSpec("Params")
CallResult = TypeVar("CallResult")

PATIENCE = 3.0
"""Seconds without a call after which a rank says what it is doing."""

POLL = 0.5
"""Seconds between two looks of the thread of a rank."""

FAREWELL = 4 * POLL
"""Seconds for which a rank that knows the error stays, so that the others learn it too."""

MAX_CALLS = 64
"""Number of last calls that a rank remembers."""

WORLD_COLLECTIVES = {
    *("barrier", "monitored_barrier", "all_reduce", "reduce", "broadcast", "all_gather"),
    *("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"),
    *("all_to_all_single", "all_gather_object", "broadcast_object_list"),
}
"""Functions of `torch.distributed` in which every rank of a group waits for the others."""

LIBRARIES = re.compile(r"(torch|shardwright|contextlib|functools|threading|runpy|importlib)\b")
"""Modules that are not the user's program."""


class RankCalls:
    """The collective calls of this rank, in one process group.

    Args:
        world: the default process group.
        number: number of process groups before it, equal on all ranks: their keys may still be in
            the store.
    """

    def __init__(self, world: dist.ProcessGroup, number: int) -> None:
        self.error = ""
        """Why this rank can make no more calls; empty if it can."""
        self._rank, self._size = world.rank(), world.size()
        self._longest_wait = group_timeout(world)
        # A connection for each thread, as both may block in it.
        self._store, self._meetings = (
            PrefixStore(f"calls of ranks {number}", own_connection(world)) for _ in range(2)
        )
        self._calls = deque[str](maxlen=MAX_CALLS)
        self._count, self._counts = 0, Counter[str]()
        self._depth, self._changed = 0, time.monotonic()
        self._in_backward = False
        self._last_mode = ""
        self._written, self._seen_changes = "", 0
        self._request = 0
        """Number of the request for fresh states that rank 0 has made; 0 without a suspicion."""
        self._thread_id = threading.main_thread().ident or 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(ref(world),), daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """Stop to watch."""
        self._ended.set()
        self._thread.join(FAREWELL)

    @contextmanager
    def call(self, kind: str, *, meets: bool = False) -> Iterator[None]:
        """Context of a collective call; calls within it do not count.

        Args:
            kind: name of the call, equal on all ranks.
            meets: whether to wait for the other ranks before the call communicates.

        Raises:
            DataError: on all ranks, if they wait for each other in different calls.
        """
        if self._depth:
            yield
            return
        self._thread_id = threading.get_ident()
        self._begin(kind)
        try:
            with self.explaining_errors():
                if meets:
                    self._meet()
                yield
        except BaseException:
            # A call that was refused on this rank only must not count.
            self._count, self._last_mode = self._count - 1, ""
            self._counts[kind] -= 1
            self._calls.pop()
            raise
        finally:
            self._depth, self._changed = 0, time.monotonic()

    @contextmanager
    def model_call(self, kind: str) -> Iterator[None]:
        """Context of a call of a model; one of another kind than the last waits for all ranks."""
        meets = kind != self._last_mode
        if not self._depth:
            self._last_mode = kind
        with self.call(kind, meets=meets):
            yield

    @contextmanager
    def backward_passes(self) -> Iterator[None]:
        """Context of a call of autograd, whose first pass through a model is one call."""
        is_within_another, self._in_backward = self._in_backward, False
        try:
            with self.explaining_errors():
                yield
        finally:
            if self._in_backward:
                self._depth, self._changed = 0, time.monotonic()
            self._in_backward = is_within_another

    def begin_backward(self) -> None:
        """Count the backward pass that enters a model, unless within a call or counted already."""
        if not self._depth:
            self._begin("backward pass")
            self._in_backward = True

    def _begin(self, kind: str) -> None:
        if self.error:
            raise DataError(self.error)
        self._counts[kind] += 1
        self._calls.append(f"{kind} {self._counts[kind]}")
        self._depth, self._count, self._changed = 1, self._count + 1, time.monotonic()

    def _meet(self) -> None:
        """Wait until all ranks have begun this call."""
        key = f"begun {self._count} {self._calls[-1]}"
        if self._meetings.add(key, 1) >= self._size:
            self._meetings.set(f"all have {key}", "")
        pause, begun = POLL / 512, time.monotonic()
        timeout = self._longest_wait.total_seconds() if self._longest_wait is not None else math.inf
        while not self.error:
            # Not `wait`, whose time-out writes to the log.
            if self._meetings.check([f"all have {key}"]):
                return
            if time.monotonic() - begun > timeout:
                raise DataError(
                    f"rank {self._rank} has waited {timeout:.0f} s for other ranks in"
                    f" {self._calls[-1]}, the time-out of the process group\nmake this call on all"
                    " ranks, or pass a longer `timeout` to `init_process_group`"
                )
            time.sleep(pause)
            pause = min(2 * pause, POLL)
        raise DataError(self.error)

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Raise the error of all ranks in place of one of a connection that it has closed."""
        try:
            yield
        except DataError:
            if self.error:
                time.sleep(FAREWELL)
            raise
        except RuntimeError as error:
            if isinstance(error, ShardwrightError) or not PEER_FAILURE.search(str(error)):
                raise
            # Another rank may have closed the connection first.
            self._ended.wait(0 if self.error else FAREWELL)
            if not self.error:
                raise
            time.sleep(FAREWELL)
            raise DataError(self.error) from error

    def _watch(self, world: ref[dist.ProcessGroup]) -> None:
        with suppress(RuntimeError):  # The store is gone, and with it the run.
            while not (self._ended.wait(POLL) or self.error) and world() is dist.group.WORLD:
                self._look()

    def _look(self) -> None:
        """Write what this rank is doing, and read whether the ranks can never meet."""
        is_idle = time.monotonic() - self._changed > PATIENCE
        text = f"{self._store.add('requests', 0)} {self._state().to_json()}" if is_idle else ""
        if text != self._written:
            self._store.set(f"rank {self._rank}", text)
            self._store.add("changes", 1)
            self._written = text
        if self._rank == 0:
            self._compare()
        if (is_idle or self._rank == 0) and self._store.check(["error"]):
            self.error = self._store.get("error").decode()
            log.error("%s", self.error)
            close_connections(self._store)

    def _compare(self) -> None:
        """Write an error if the ranks can never meet.

        Asks them again before: a thread may not have run for long, and its state be that of then.
        """
        changes = self._store.add("changes", 0)
        if changes == self._seen_changes and not self._request:
            return
        self._seen_changes = changes
        keys = [f"rank {rank}" for rank in range(self._size)]
        texts = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        answers = [text.partition(" ") for text in texts if text]
        states = [RankState.from_json(state) for _, _, state in answers]
        error = difference_of_calls(states)
        if not error:
            self._request = 0
        elif not self._request:
            self._request = self._store.add("requests", 1)
        elif all(int(request) >= self._request for request, _, _ in answers):
            self._store.set("error", error)

    def _state(self) -> RankState:
        frame = sys._current_frames().get(self._thread_id)
        waits_in, line = _place_of(frame)
        is_inside = self._depth > 0
        line = line if is_inside or waits_in else ""
        waits_in = "" if is_inside else waits_in
        return RankState(self._rank, self._count, tuple(self._calls), is_inside, waits_in, line)


def _place_of(frame: FrameType | None) -> tuple[str, str]:
    """The collective of all ranks in which a thread waits, or "", and its line of the program."""
    waits_in = ""
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module == "torch.distributed.distributed_c10d" and code.co_name in WORLD_COLLECTIVES:
            group = frame.f_locals.get("group")
            waits_in = code.co_name if group in (None, dist.group.WORLD) else ""
        elif code.co_filename != PROGRAM and not LIBRARIES.match(module):
            return waits_in, f"{Path(code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return waits_in, ""


@cache
def _calls_of_groups() -> WeakKeyDictionary[dist.ProcessGroup, RankCalls]:
    """The calls of this rank, by default process group."""
    around_backward(_backward_passes)
    return WeakKeyDictionary()


@cache
def _numbers() -> Iterator[int]:
    return count()


def rank_calls() -> RankCalls | None:
    """The calls of this rank; None without other ranks."""
    if not has_other_ranks():
        return None
    groups, world = _calls_of_groups(), dist.group.WORLD
    assert world is not None
    if world not in groups:
        groups[world] = RankCalls(world, next(_numbers()))
    return groups[world]


def collective_call(kind: str, devices: Devices | None = None) -> AbstractContextManager[None]:
    """Return the context of a call that all ranks must make, and one rank may make alone.

    Waits for all ranks before the call communicates.

    Args:
        kind: name of the call, equal on all ranks.
        devices: the devices of the model; nothing is counted on one device.

    Raises:
        DataError: on all ranks, if they wait for each other in different calls.
    """
    calls = rank_calls() if devices is None or devices.is_distributed else None
    return nullcontext() if calls is None else calls.call(kind, meets=True)


def by_all_ranks(
    kind: str,
) -> Callable[[Callable[Params, CallResult]], Callable[Params, CallResult]]:
    """Make every call of the decorated function a `collective_call`."""

    def decorate(function: Callable[Params, CallResult]) -> Callable[Params, CallResult]:
        @wraps(function)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> CallResult:
            with collective_call(kind):
                return function(*args, **kwargs)

        return call

    return decorate


def model_call(kind: str, devices: Devices) -> AbstractContextManager[None]:
    """Return the context of a call of a model, which waits for all ranks if the last call of a
    model was of another kind.

    Raises:
        DataError: on all ranks, if they wait for each other in different calls.
    """
    calls = rank_calls() if devices.is_distributed else None
    return nullcontext() if calls is None else calls.model_call(kind)


def begin_backward() -> None:
    """Count the running backward pass, which enters a model on several devices."""
    calls = rank_calls()
    if calls is not None:
        calls.begin_backward()


def _backward_passes() -> AbstractContextManager[None]:
    calls = rank_calls()
    return nullcontext() if calls is None else calls.backward_passes()
