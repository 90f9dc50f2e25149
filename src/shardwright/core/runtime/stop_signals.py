"""Turn a signal to one rank into a decision of all ranks to stop after the same step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.runtime.accelerator import device_of_host_values
from shardwright.core.runtime.counted_calls import counted_call

REPEAT_SECONDS = 2.0
"""Seconds within which repeated signals count as one: a terminal signals each process of a run, and
a launcher forwards its own signal to the processes again."""


class StopSignals:
    """Context that defers stop signals to the end of a step, for all ranks at once.

    Without the context, SIGTERM ends only the rank that receives it, and the others fail in their
    next collective. In the context each rank records its signals, and `requested` reports a signal
    of any rank to all ranks:

        with sw.StopSignals() as stop:
            for batch in loader:
                net.train_step(*batch)
                ...
                if stop.requested():
                    sw.save_checkpoint(folder, net, optimizer)
                    break

    A second signal after more than 2 s has its usual effect, for a run that hangs. Handlers are
    installed in the main thread only, where Python runs them.

    Args:
        signals: the signals to defer; by default SIGTERM and SIGINT (Ctrl-C).
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self.signals = tuple(signals)
        self.stopped_by: tuple[int, signal.Signals] | None = None
        """The rank and signal for which all ranks stop; None before `requested` returns True."""
        self._received: int | None = None
        self._received_at = 0.0
        self._earlier_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                # A shell makes background jobs ignore Ctrl-C, which is meant for the foreground
                # job.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._earlier_handlers[number] = signal.signal(number, self._record_signal)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Emptied, as a second signal has the handlers restored before the end of the block.
        while self._earlier_handlers:
            number, handler = self._earlier_handlers.popitem()
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def requested(self) -> bool:
        """Whether any rank has received a signal; all ranks return the same answer.

        Collective: every rank must call this method after the same steps. The method all-reduces
        one number, on the CPU if the process group has a backend for CPU tensors.
        """
        # Once true it stays so, without another collective.
        if self.stopped_by is None:
            self.stopped_by = self._find_signal_of_any_rank()
        return self.stopped_by is not None

    def _find_signal_of_any_rank(self) -> tuple[int, signal.Signals] | None:
        """Return the highest rank that has received a signal, and its signal; None if no rank has.
        Collective."""
        if not has_other_ranks():
            return None if self._received is None else (0, signal.Signals(self._received))
        rank, base = dist.get_rank(), signal.NSIG
        # The rank in the high digits, so that one maximum gives a rank together with its signal.
        code = 0 if self._received is None else (rank + 1) * base + self._received
        box = torch.tensor(code, device=device_of_host_values())
        with counted_call("StopSignals.requested"):
            dist.all_reduce(box, dist.ReduceOp.MAX)
        rank_plus_1, number = divmod(int(box), base)
        return None if number == 0 else (rank_plus_1 - 1, signal.Signals(number))

    def _record_signal(self, signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received, self._received_at = signal_number, now
        elif now - self._received_at > REPEAT_SECONDS:
            # Restores the earlier handlers, so that the signal ends a run that hangs.
            self.__exit__(None, None, None)
            signal.raise_signal(signal_number)
