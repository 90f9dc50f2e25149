"""A signal to one rank is a decision of all to stop after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest

import shardwright as sw
from core.runtime.stop_ranks import CHECKS
from shardwright.core.runtime import stop_signals
from torchrun import checks_on_ranks

test_on_three_ranks = checks_on_ranks(CHECKS, 3)


class UsualError(Exception):
    """What the handlers of these tests raise outside of the context."""


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """Handlers for signals that a shell may make its background jobs ignore."""

    def handler(number: int, _: object) -> None:
        raise UsualError(signal.Signals(number).name)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    earlier = {number: signal.signal(number, handler) for number in numbers}
    yield
    for number, function in earlier.items():
        signal.signal(number, function)


@pytest.mark.usefixtures("usual_handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_only_rank_is_requested_once_it_is_received(number: signal.Signals) -> None:
    with sw.StopSignals() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested() and stop.requested()
    assert stop.stopped_by == (0, number)
    with pytest.raises(UsualError):
        os.kill(os.getpid(), number)


@pytest.mark.usefixtures("usual_handlers")
def test_other_signals_can_be_chosen() -> None:
    with sw.StopSignals([signal.SIGUSR1]) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested()
        with pytest.raises(UsualError, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("usual_handlers")
def test_a_signal_that_a_launcher_repeats_is_one_and_a_later_one_has_its_usual_effect() -> None:
    with sw.StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        with patch.object(stop_signals, "REPEAT_SECONDS", -1.0), pytest.raises(UsualError):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("usual_handlers")
def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with sw.StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop.requested()


def test_outside_of_the_main_thread_no_handler_is_installed() -> None:
    requested = []

    def use() -> None:
        with sw.StopSignals() as stop:
            requested.append(stop.requested())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert requested == [False]
