"""Detect ranks that wait for each other in different calls, and raise one error on all ranks.

Every rank counts its collective calls. A rank is idle if it neither begins nor ends a call for
`IDLE_SECONDS` seconds. A thread of each idle rank writes its state to the store of the process
group, and rank 0 compares the states. If the ranks are deadlocked, all raise the same error within
seconds. To interrupt blocked collectives, each rank closes its connections to other ranks.

Some calls wait in the store for all ranks before they communicate: calls that one rank might make
alone by mistake, and calls that `ExpectedCalls` did not predict. Other calls do not access the
store.

A rank that has a plan but has not begun to count is watched: if another rank counts, the watched
rank reports the collective in which it waits.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import ClassVar
from weakref import ref

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardwright.core.agreement.expected_calls import ExpectedCalls
from shardwright.core.agreement.rank_states import (
    TWO_THREADS,
    WAITING,
    RankState,
    calls_of_two_threads,
    difference_of_calls,
    exited_too_early,
    store_has_ended,
)
from shardwright.core.runtime.collective_errors import PEER_FAILURE, naming_redistributions
from shardwright.core.runtime.connections import close_connections
from shardwright.core.runtime.place_in_program import last_exception, waiting_call_and_line
from shardwright.core.torch_internals.distributed import group_timeout, own_connection
from shardwright.errors import CommunicationError, DataError, ShardwrightError

log = logging.getLogger(__name__)

IDLE_SECONDS = 3.0
"""Seconds without a collective call after which a rank writes its state to the store."""

POLL_INTERVAL = 0.5
"""Polling interval of the thread that watches a rank's calls, in seconds."""

MAX_WAIT = 15.0
"""Maximum seconds to wait for other ranks before asynchronous calls, and calls with a source rank:
a correct program may finish these on one rank before other ranks begin them."""

WARN_AFTER = 20.0
"""Seconds of waiting for other ranks in one call, after which a rank logs one warning."""

ERROR_DELAY = 4 * POLL_INTERVAL
"""Seconds that a rank waits before it raises the error of all ranks, so that all can read it."""

MAX_CALLS = 64
"""Maximum number of recent collective calls in a rank's state in the store."""

BACKWARD = "backward pass"
"""Name under which a backward pass through a model is counted as a collective call."""


class RankCalls:
    """Counter of this rank's collective calls in one default process group.

    Args:
        world: the default process group.
    """

    num_counted_groups: ClassVar[int] = 0
    """Number of default process groups in which this process has counted calls, equal on all ranks.

    Part of each store key, because the store may still have keys of earlier groups.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.error = ""
        """The error that further calls of this rank raise; empty without an error."""
        self.counting_thread: threading.Thread | None = None
        """The thread in which this rank began to count calls; None before it counts."""
        self._world, self._rank, self._world_size = ref(world), world.rank(), world.size()
        self._longest_wait = group_timeout(world)
        # A connection for each thread, as both may block in it.
        self._store, self._barrier_store = (
            PrefixStore(f"calls of ranks {self.num_counted_groups}", own_connection(world))
            for _ in range(2)
        )
        self._calls = deque[str](maxlen=MAX_CALLS)
        self._count, self._counts = 0, Counter[str]()
        self.is_inside_a_call = False
        """Whether a thread of this rank is inside a collective call."""
        self._changed = time.monotonic()
        # Held while a thread finds out whether another is inside a call.
        self._entering = threading.Lock()
        # Threads whose innermost backward pass is counted, and the last that began one.
        self._in_backward = set[int]()
        self._backward_thread_id = threading.get_ident()
        self._expected = ExpectedCalls()
        self._last_barrier = ""
        self._has_differed = self._is_retry = False
        """Whether the last call raised a `DataError`; whether the current call repeats it."""
        self._written, self._seen_changes = "", 0
        self._request = 0
        """Number of rank 0's latest request for current states of all ranks; 0 without a
        request."""
        self._thread_id = threading.main_thread().ident or 0
        self._ended = threading.Event()
        # With a weak reference, so that a destroyed group is freed; a daemon, as it may block in
        # the store.
        self._thread = threading.Thread(
            target=self._watch_rank_until_end, args=(self._world,), daemon=True
        )
        self._thread.start()
        # Not `atexit`, whose functions processes of `multiprocessing` do not call.
        Finalize(None, self.end, exitpriority=0)

    def start_counting(self) -> None:
        """Count the calls of this rank from now on, and let the other ranks report where they
        wait."""
        self.counting_thread = threading.current_thread()
        RankCalls.num_counted_groups += 1
        self._barrier_store.set("calls are counted", "")

    def end(self) -> None:
        """Stop the watching thread, and report to other ranks that this rank ends."""
        self._ended.set()
        # Bounded, as the thread may be blocked in the store.
        self._thread.join(ERROR_DELAY)
        with suppress(RuntimeError):  # The store is gone, and with it the run.
            # With the common error all ranks end, and none of them too early. A group that was only
            # watched has the keys of the next.
            is_replaced = dist.group.WORLD not in (None, self._world())
            if not self.error and (self.counting_thread or not is_replaced):
                state = replace(
                    self._make_rank_state(), is_inside=False, exception=last_exception()
                )
                self._store.set(f"ended {self._rank}", state.to_json())
                self._store.set("a rank has ended", "")

    @contextmanager
    def call(
        self, name: str, *, always_synchronizes: bool = False, max_wait: float = math.inf
    ) -> Iterator[None]:
        """Context of a collective call; nested calls are not counted.

        Args:
            name: name of the call, equal on all ranks.
            always_synchronizes: whether ranks always synchronize before the call communicates;
                otherwise only if the call is unexpected.
            max_wait: maximum seconds to wait until all ranks have begun the call.

        Raises:
            DataError: on all ranks, if they wait for each other in different calls.
            CommunicationError: if another rank has ended, or does not respond.
        """
        # Inner calls follow from the outermost on every rank.
        if not self._enter_outermost_call(name):
            yield
            return
        is_expected = self._count_call(name)
        try:
            with self.explaining_errors():
                if always_synchronizes or not is_expected:
                    self._wait_until_all_begin_call(max_wait)
                yield
        except BaseException as error:
            # Not counted, so that a caller may catch the error and repeat the call.
            self._remove_last_call(name, error)
            raise
        finally:
            self.is_inside_a_call, self._changed = False, time.monotonic()

    @contextmanager
    def backward_passes(self) -> Iterator[None]:
        """Context of `torch.autograd.backward`, in which `begin_backward` counts one call."""
        thread_id = self._backward_thread_id = self._get_calling_thread_id()
        # Calls of autograd may be nested, as in a reentrant checkpoint.
        is_within_another = thread_id in self._in_backward
        self._in_backward.discard(thread_id)
        try:
            with self.explaining_errors():
                yield
        except BaseException as error:
            if thread_id in self._in_backward:
                self._remove_last_call(BACKWARD, error)
            raise
        finally:
            if thread_id in self._in_backward:
                self.is_inside_a_call, self._changed = False, time.monotonic()
                self._in_backward.discard(thread_id)
            if is_within_another:
                self._in_backward.add(thread_id)

    def begin_backward(self) -> None:
        """Count the running backward pass, unless within a counted call or already counted."""
        if self._enter_outermost_call(BACKWARD):
            is_expected = self._count_call(BACKWARD)
            self._in_backward.add(self._get_calling_thread_id())
            if not is_expected:
                self._wait_until_all_begin_call()

    def number_of(self, name: str) -> int:
        """Return the number of collective calls named `name` that this rank has begun."""
        return self._counts[name]

    def _enter_outermost_call(self, name: str) -> bool:
        """Enter a collective call unless this thread is inside one; return whether it was entered.

        Raises:
            DataError: if another thread is inside a call, as threads have no common order on all
                ranks.
        """
        if self.error:
            raise self._make_common_exception()
        thread_id = self._get_calling_thread_id()
        with self._entering:
            if not self.is_inside_a_call:
                # The stack of this thread shows where the rank waits.
                self.is_inside_a_call, self._thread_id = True, thread_id
                return True
        if thread_id == self._thread_id or _is_autograd_thread():
            return False
        _, line = waiting_call_and_line(sys._getframe())
        thread = threading.current_thread().name
        error = calls_of_two_threads(self._make_rank_state(), name, thread, line)
        # Not `self.error`: the watching threads of all ranks read it, and wake what waits.
        self._barrier_store.set("error", error)
        time.sleep(ERROR_DELAY)
        raise DataError(error)

    def _get_calling_thread_id(self) -> int:
        """Return the identifier of this thread; for an autograd thread, the identifier of the
        thread that began the backward pass."""
        return self._backward_thread_id if _is_autograd_thread() else threading.get_ident()

    def _count_call(self, name: str) -> bool:
        """Count a collective call; return whether `ExpectedCalls` predicted it."""
        self._counts[name] += 1
        self._calls.append(f"{name} {self._counts[name]}")
        self._count, self._changed = self._count + 1, time.monotonic()
        self._is_retry, self._has_differed = self._has_differed, False
        # A repeated call waits for all ranks, since others may still be in the refused one.
        return self._expected.begin(name) and not self._is_retry

    def _remove_last_call(self, name: str, error: BaseException) -> None:
        """Remove the last collective call, which raised `error`, from the counts."""
        self._count, self._counts[name] = self._count - 1, self._counts[name] - 1
        self._calls.pop()
        self._expected.undo()
        self._has_differed = isinstance(error, DataError)

    def _make_common_exception(self) -> Exception:
        is_of_all = self.error.startswith((WAITING, TWO_THREADS))
        return DataError(self.error) if is_of_all else CommunicationError(self.error)

    def _wait_until_all_begin_call(self, max_wait: float = math.inf) -> None:
        """Report that this rank has begun the current call, and wait until all ranks have begun the
        call."""
        key = f"begun {self._count} {self._calls[-1]}"
        # The last rank to arrive releases the others.
        if self._barrier_store.add(key, 1) >= self._world_size:
            self._barrier_store.set(f"all have {key}", "")
            if self._last_barrier not in ("", key):  # Else a call that was refused on all ranks.
                self._barrier_store.delete_key(self._last_barrier)
                self._barrier_store.delete_key(f"all have {self._last_barrier}")
        self._last_barrier = key
        self._wait_for_store_key(key, max_wait)

    def _wait_for_store_key(self, key: str, max_wait: float) -> None:
        # From about 1 ms, doubling: ranks usually arrive together, within a step that should stay
        # fast.
        pause, begun = POLL_INTERVAL / 512, time.monotonic()
        warns_at: float | None = begun + WARN_AFTER
        timeout = self._longest_wait.total_seconds() if self._longest_wait is not None else math.inf
        # The watching thread may also set `error`.
        while not self.error:
            # Not `wait`, whose time-out writes to the log.
            if self._barrier_store.check([f"all have {key}"]):
                return
            if time.monotonic() - begun > timeout:
                raise CommunicationError(
                    f"rank {self._rank} has waited {timeout:.0f} s for other ranks in"
                    f" {self._calls[-1]}, the time-out of the process group\nmake this call on all"
                    " ranks, or pass a longer `timeout` to `init_process_group`"
                )
            # Only in long waits, as it takes several more requests to the store.
            if pause == POLL_INTERVAL:
                self._read_or_set_common_error()
            if warns_at is not None and time.monotonic() > warns_at:
                log.warning(
                    "rank %d has waited %.0f s for other ranks in %s: make this call on all ranks",
                    *(self._rank, WARN_AFTER, self._calls[-1]),
                )
                warns_at = None
            # Other ranks may need this rank to return before they can begin the call.
            if time.monotonic() - begun > max_wait:
                return
            time.sleep(pause)
            pause = min(2 * pause, POLL_INTERVAL)
        raise self._make_common_exception()

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Context that converts errors of closed connections to the error common to all ranks, or
        to a `CommunicationError` if the ranks have none."""
        try:
            yield
        except (ShardwrightError, CommunicationError):
            if self.error:
                time.sleep(ERROR_DELAY)
            raise
        except RuntimeError as error:
            # Other errors have their cause on this rank.
            if not PEER_FAILURE.search(str(error)):
                raise
            deadline = time.monotonic() + ERROR_DELAY
            while not self.error and time.monotonic() < deadline:
                # Another rank may have closed the connection first, knowing the reason.
                with suppress(RuntimeError):  # The store may be gone.
                    self._read_or_set_common_error()
                self._ended.wait(POLL_INTERVAL / 8)
            # Raised by the store's client when the process that serves the store has ended.
            if not self.error and isinstance(error, dist.DistNetworkError):
                raise CommunicationError(store_has_ended(self._make_rank_state())) from error
            if not self.error:
                with naming_redistributions(self._make_rank_state().call_with_line):
                    raise
            time.sleep(ERROR_DELAY)
            raise self._make_common_exception() from error

    def _read_or_set_common_error(self) -> None:
        """Read the error that all ranks raise from the store, or write it if a rank has exited
        too early."""
        if self._barrier_store.check(["error"]):
            self.error = self._barrier_store.get("error").decode()
        elif self._barrier_store.check(["a rank has ended"]):
            keys = [f"ended {rank}" for rank in range(self._world_size)]
            ended = [
                self._barrier_store.get(key) for key in keys if self._barrier_store.check([key])
            ]
            states = [RankState.from_json(content.decode()) for content in ended]
            self.error = exited_too_early(self._make_rank_state(), states)
            if self.error:
                self._barrier_store.set("error", self.error)

    def _watch_rank_until_end(self, world: ref[dist.ProcessGroup]) -> None:
        with suppress(RuntimeError):  # The store is gone, and with it the run.
            # A later default group has a counter and a thread of its own.
            while (
                not (self._ended.wait(POLL_INTERVAL) or self.error) and world() is dist.group.WORLD
            ):
                if self.counting_thread or self._store.check(["calls are counted"]):
                    self._exchange_states_with_store()

    def _exchange_states_with_store(self) -> None:
        """Write this rank's state to the store if it is idle, and read the error common to all
        ranks."""
        is_idle = time.monotonic() - self._changed > IDLE_SECONDS
        # Adding 0 reads a counter that no rank may have written yet; `get` would block for it.
        request = self._store.add("requests", 0) if is_idle else 0
        content = f"{request} {self._make_rank_state().to_json()}" if is_idle else ""
        # Changes are counted, so that rank 0 need not read all states to see that nothing is new.
        if content != self._written:
            self._store.set(f"rank {self._rank}", content)
            self._store.add("changes", 1)
            self._written = content
        if self._rank == 0:
            self._set_error_if_deadlocked()
        # Other ranks make calls, and ask once they wait too.
        if (is_idle or self._rank == 0) and self._store.check(["error"]):
            self.error = self._store.get("error").decode()
            log.error("%s", self.error)
            # Ranks that are blocked in a collective of gloo then raise, and find the error.
            close_connections(self._store)

    def _set_error_if_deadlocked(self) -> None:
        """If the ranks are deadlocked, set the error that all ranks raise.

        Requests current states first, as the thread of a rank may have been suspended since it
        wrote the state of its rank.
        """
        changes = self._store.add("changes", 0)
        # Reading all states takes a request per rank.
        if changes == self._seen_changes and not self._request:
            return
        self._seen_changes = changes
        keys = [f"rank {rank}" for rank in range(self._world_size)]
        contents = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        # Each content is the number of the request that it answers, then the state.
        answers = [content.partition(" ") for content in contents if content]
        states = [RankState.from_json(state) for _, _, state in answers]
        error = difference_of_calls(states)
        if not error:
            self._request = 0
        elif not self._request:
            self._request = self._store.add("requests", 1)
        # All states were written after the request and still differ, so no rank is just slow.
        elif all(int(request) >= self._request for request, _, _ in answers):
            self._store.set("error", error)

    def _make_rank_state(self) -> RankState:
        frame = sys._current_frames().get(self._thread_id)
        waits_in, line = waiting_call_and_line(frame)
        is_inside = self.is_inside_a_call
        # Elsewhere the rank computes, and its line would mislead.
        line = line if is_inside or waits_in else ""
        waits_in = "" if is_inside else waits_in
        state = RankState(self._rank, self._count, tuple(self._calls), is_inside, waits_in, line)
        return replace(state, is_retry=is_inside and self._is_retry)


def _is_autograd_thread() -> bool:
    """Whether autograd started this thread, to run a backward pass on an accelerator."""
    return type(threading.current_thread()).__name__ == "_DummyThread"
