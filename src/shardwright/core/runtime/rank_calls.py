"""Name the ranks that wait for each other in different calls, on all ranks within seconds.

Every rank counts its collective calls. Once it has made none for `PATIENCE` seconds, a thread of
its own writes to the store of the process group what the rank is doing, and rank 0 compares. If the
ranks can never meet, all raise the same error: a rank that is blocked in a collective is woken by
closing its connections to other ranks. Until then no call touches the store, except one that waits
for all ranks before it communicates: one that a rank may make alone by mistake, or that the calls
before it did not lead to expect.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, wraps
from itertools import count
from multiprocessing.util import Finalize
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.agreement.expected_calls import ExpectedCalls
from shardwright.core.agreement.rank_states import (
    WAITING,
    RankState,
    difference_of_calls,
    ended_too_early,
)
from shardwright.core.runtime.collective_errors import (
    PEER_FAILURE,
    naming_redistributions,
)
from shardwright.core.runtime.connections import close_connections
from shardwright.core.runtime.devices import Devices, stages_of_plan
from shardwright.core.runtime.place_in_program import last_exception, place_of
from shardwright.core.torch_internals.autograd import around_backward
from shardwright.core.torch_internals.distributed import (
    around_world_collectives,
    group_timeout,
    own_connection,
)
from shardwright.core.torch_internals.dtensor import around_redistributions
from shardwright.errors import CommunicationError, DataError, ShardwrightError

log = logging.getLogger(__name__)

Params = ParamSpec("Params")
CallResult = TypeVar("CallResult")

PATIENCE = 3.0
"""Seconds without a call after which a rank says what it is doing."""

POLL = 0.5
"""Seconds between two looks of the thread of a rank."""

WARN_AFTER = 20.0
"""Seconds in one call after which a rank that waits for others to begin it says so once."""

FAREWELL = 4 * POLL
"""Seconds for which a rank that knows the error stays, so that the others learn it too."""

MAX_CALLS = 64
"""Number of last calls that a rank remembers."""

BACKWARD = "backward pass"
"""Name of the call that is a backward pass through a model."""


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
        self._expected = ExpectedCalls()
        self._last_meeting = ""
        self._has_differed = False
        """Whether the last call was refused as others have made another, who may be in it yet."""
        self._written, self._seen_changes = "", 0
        self._request = 0
        """Number of the request for fresh states that rank 0 has made; 0 without a suspicion."""
        self._thread_id = threading.main_thread().ident or 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(ref(world),), daemon=True)
        self._thread.start()
        # Not `atexit`, whose functions processes of `multiprocessing` do not call.
        Finalize(None, self.end, exitpriority=0)

    def end(self) -> None:
        """Stop watching, and tell the other ranks that this rank makes no more calls."""
        self._ended.set()
        self._thread.join(FAREWELL)
        with suppress(RuntimeError):  # The store is gone, and with it the run.
            if not self.error:
                state = replace(self._state(), is_inside=False, exception=last_exception())
                self._store.set(f"ended {self._rank}", state.to_json())
                self._store.set("a rank has ended", "")

    @contextmanager
    def call(self, kind: str, *, always_meets: bool = False, waits: bool = True) -> Iterator[None]:
        """Context of a collective call; calls within it do not count.

        Args:
            kind: name of the call, equal on all ranks.
            always_meets: whether all ranks meet before the call communicates even if it is
                expected.
            waits: whether this rank waits for the others when they meet. A call that is
                asynchronous here may be one that waits on another rank.

        Raises:
            DataError: on all ranks, if they wait for each other in different calls.
            CommunicationError: another rank has ended, or does not respond.
        """
        if self._depth:
            yield
            return
        self._thread_id = threading.get_ident()
        is_expected = self._begin(kind)
        try:
            with self.explaining_errors():
                if always_meets or not is_expected:
                    self._meet(waits=waits)
                yield
        except BaseException as error:
            self._undo(kind, error)
            raise
        finally:
            self._depth, self._changed = 0, time.monotonic()

    @contextmanager
    def backward_passes(self) -> Iterator[None]:
        """Context of a call of autograd, whose first pass through a model is one call."""
        is_within_another, self._in_backward = self._in_backward, False
        try:
            with self.explaining_errors():
                yield
        except BaseException as error:
            if self._in_backward:
                self._undo(BACKWARD, error)
            raise
        finally:
            if self._in_backward:
                self._depth, self._changed = 0, time.monotonic()
            self._in_backward = is_within_another

    def begin_backward(self) -> None:
        """Count the backward pass that enters a model, unless within a call or counted already."""
        if not self._depth:
            is_expected = self._begin(BACKWARD)
            self._in_backward = True
            if not is_expected:
                self._meet()

    def _begin(self, kind: str) -> bool:
        """Count a call, and return whether it was expected."""
        if self.error:
            raise self._exception()
        self._counts[kind] += 1
        self._calls.append(f"{kind} {self._counts[kind]}")
        self._depth, self._count, self._changed = 1, self._count + 1, time.monotonic()
        has_differed, self._has_differed = self._has_differed, False
        return self._expected.begin(kind) and not has_differed

    def _undo(self, kind: str, error: BaseException) -> None:
        """Do not count the last call, which was refused, perhaps on this rank only."""
        self._count, self._counts[kind] = self._count - 1, self._counts[kind] - 1
        self._calls.pop()
        self._expected.undo()
        self._has_differed = isinstance(error, DataError)

    def _exception(self) -> Exception:
        is_of_all = self.error.startswith(WAITING)
        return DataError(self.error) if is_of_all else CommunicationError(self.error)

    def _meet(self, *, waits: bool = True) -> None:
        """Tell all ranks that this one has begun the call, and wait until all have."""
        key = f"begun {self._count} {self._calls[-1]}"
        if self._meetings.add(key, 1) >= self._size:
            self._meetings.set(f"all have {key}", "")
            if self._last_meeting not in ("", key):  # Else a call that was refused on all ranks.
                self._meetings.delete_key(self._last_meeting)
                self._meetings.delete_key(f"all have {self._last_meeting}")
        self._last_meeting = key
        if waits:
            self._wait_for_all(key)

    def _wait_for_all(self, key: str) -> None:
        pause, begun = POLL / 512, time.monotonic()
        warns_at: float | None = begun + WARN_AFTER
        timeout = self._longest_wait.total_seconds() if self._longest_wait is not None else math.inf
        while not self.error:
            # Not `wait`, whose time-out writes to the log.
            if self._meetings.check([f"all have {key}"]):
                return
            if time.monotonic() - begun > timeout:
                raise CommunicationError(
                    f"rank {self._rank} has waited {timeout:.0f} s for other ranks in"
                    f" {self._calls[-1]}, the time-out of the process group\nmake this call on all"
                    " ranks, or pass a longer `timeout` to `init_process_group`"
                )
            if pause == POLL:
                self._look_for_ended()
            if warns_at is not None and time.monotonic() > warns_at:
                log.warning(
                    "rank %d has waited %.0f s for other ranks in %s: make this call on all ranks",
                    *(self._rank, WARN_AFTER, self._calls[-1]),
                )
                warns_at = None
            time.sleep(pause)
            pause = min(2 * pause, POLL)
        raise self._exception()

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Raise the error of all ranks in place of one of a connection that it has closed."""
        try:
            yield
        except (ShardwrightError, CommunicationError):
            if self.error:
                time.sleep(FAREWELL)
            raise
        except RuntimeError as error:
            if not PEER_FAILURE.search(str(error)):
                raise
            deadline = time.monotonic() + FAREWELL
            while not self.error and time.monotonic() < deadline:
                # Another rank may have closed the connection first, knowing the reason.
                with suppress(RuntimeError):  # The store may be gone.
                    self._look_for_ended()
                self._ended.wait(POLL / 8)
            if not self.error:
                with naming_redistributions():
                    raise
            time.sleep(FAREWELL)
            raise self._exception() from error

    def _look_for_ended(self) -> None:
        """Read the error of all ranks, or find a rank that has ended before this call."""
        if self._meetings.check(["error"]):
            self.error = self._meetings.get("error").decode()
        elif self._meetings.check(["a rank has ended"]):
            keys = [f"ended {rank}" for rank in range(self._size)]
            ended = [self._meetings.get(key) for key in keys if self._meetings.check([key])]
            states = [RankState.from_json(text.decode()) for text in ended]
            self.error = ended_too_early(self._state(), states)
            if self.error:
                self._meetings.set("error", self.error)

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
        waits_in, line = place_of(frame)
        is_inside = self._depth > 0
        line = line if is_inside or waits_in else ""
        waits_in = "" if is_inside else waits_in
        return RankState(self._rank, self._count, tuple(self._calls), is_inside, waits_in, line)


@cache
def _calls_of_groups() -> WeakKeyDictionary[dist.ProcessGroup, RankCalls]:
    """The calls of this rank, by default process group."""
    around_backward(_backward_passes)
    around_world_collectives(_world_collective)
    around_redistributions(_redistribution)
    return WeakKeyDictionary()


@cache
def _numbers() -> Iterator[int]:
    return count()


def rank_calls() -> RankCalls | None:
    """The calls of this rank, which count from now on; None without other ranks.

    Every rank must call this at the same point of its program.
    """
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
    return nullcontext() if calls is None else calls.call(kind, always_meets=True)


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
    """Return the context of a call of a model, which waits for all ranks unless it was expected.

    Raises:
        DataError: on all ranks, if they wait for each other in different calls.
    """
    calls = rank_calls() if devices.is_distributed else None
    return nullcontext() if calls is None else calls.call(kind)


def begin_backward() -> None:
    """Count the running backward pass, which enters a model on several devices."""
    calls = rank_calls()
    if calls is not None:
        calls.begin_backward()


def _backward_passes() -> AbstractContextManager[None]:
    calls = rank_calls()
    return nullcontext() if calls is None else calls.backward_passes()


def counted_call(kind: str, *, waits: bool = True) -> AbstractContextManager[None]:
    """Return the context of a call of all ranks, if calls of the main thread count yet.

    Args:
        kind: name of the call, equal on all ranks.
        waits: see `RankCalls.call`.
    """
    world = dist.group.WORLD
    if threading.current_thread() is not threading.main_thread() or world is None:
        return nullcontext()
    calls = _calls_of_groups().get(world)
    return nullcontext() if calls is None else calls.call(kind, waits=waits)


def _world_collective(name: str, waits: bool) -> AbstractContextManager[None]:
    """Return the context that counts a collective over all ranks, including the user's own.

    Args:
        name: name of the function of `torch.distributed`.
        waits: whether it returns on no rank before all have called it.
    """
    return counted_call(f"`{name}`", waits=waits)


def _redistribution(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Return the context that counts a redistribution of a DTensor, such as `full_tensor()`."""
    # Stages have different parameters, so not all ranks redistribute.
    if stages_of_plan(mesh) != 1:
        return nullcontext()
    return counted_call("DTensor redistribution")
