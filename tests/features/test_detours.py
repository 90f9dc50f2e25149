"""How straight the way of a call through the rooms is.

Imports allow a room to call rooms above it in the table of the architecture only. A call the other
way, into a room that is below the caller's, is a callback: whoever follows the code has to go back
to where it was passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

import shardwright as sw
from shardwright.core.api.lone_rank import fake_process_group
from test_imports import ORDER, PACKAGE, room_of

MOST_CALLBACKS = 3
"""Pairs of rooms of which one calls back into the other."""
MOST_ROOMS = {"plan": 16, "parallelize": 14}


class Rooms:
    """The calls from one room into another, in order, while it is entered."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._rooms: dict[CodeType, str | None] = {}

    @contextmanager
    def recorded(self) -> Iterator[Rooms]:
        sys.setprofile(self._on_event)
        try:
            yield self
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_back is None:
            return
        caller, callee = self._room(frame.f_back.f_code), self._room(frame.f_code)
        if caller is not None and callee is not None and caller != callee:
            self.calls.append((caller, callee))

    def _room(self, code: CodeType) -> str | None:
        if code not in self._rooms:
            path = Path(code.co_filename)
            inside = path.is_relative_to(PACKAGE)
            room = room_of(path.relative_to(PACKAGE).as_posix()) if inside else None
            self._rooms[code] = room if room in ORDER else None
        return self._rooms[code]

    @property
    def visited(self) -> list[str]:
        """The rooms in the order in which they are entered first."""
        return list(dict.fromkeys(callee for _, callee in self.calls))

    @property
    def callbacks(self) -> set[tuple[str, str]]:
        return {pair for pair in self.calls if ORDER.index(pair[1]) > ORDER.index(pair[0])}


def check_straight(name: str, call: Callable[[], object]) -> None:
    with Rooms().recorded() as rooms:
        call()
    way = " > ".join(rooms.visited)
    assert len(rooms.callbacks) <= MOST_CALLBACKS, f"{name}: {sorted(rooms.callbacks)}; {way}"
    assert len(rooms.visited) <= MOST_ROOMS[name], f"{name}: {way}"


def test_plan_and_parallelize_call_back_into_at_most_three_rooms() -> None:
    torch.manual_seed(0)
    net = sw.WithLoss(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), nn.CrossEntropyLoss()
    )
    args = torch.randn(8, 64), torch.randint(0, 8, (8,))
    check_straight("plan", lambda: sw.plan(net, args, devices=4))
    plan = sw.plan(net, args, devices=4)
    with fake_process_group(0, 4, torch.device("cpu")):
        check_straight("parallelize", lambda: sw.parallelize(net, plan, copy=True))


def test_a_call_into_a_room_below_is_a_callback() -> None:
    rooms = Rooms()
    rooms.calls = [("core/api", "core/planner"), ("core/planner", "core/api")]
    assert rooms.callbacks == {("core/planner", "core/api")}
    assert rooms.visited == ["core/planner", "core/api"]
