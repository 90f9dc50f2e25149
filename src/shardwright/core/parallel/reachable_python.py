"""Watch the Python state that `forward` can reach and attributes do not show: what containers and
objects hold, enclosing scopes, class attributes, context variables, arguments of `partial`.

Whether `forward` reads it is unknown, so a change asks for a capture by TorchDynamo, whose guards
tell. Without guards the graphs of two states tell: if they differ, `forward` reads what changes.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from torch import Tensor, nn

from shardwright.core.capture.reachable_state import ReachableState, StateLocation
from shardwright.core.capture.shapes import are_equal
from shardwright.core.graph.graph import Graph

log = logging.getLogger(__name__)

MAX_UNREAD = 8
"""Number of states with equal graphs after which changes are taken for ones that `forward` does not
read: each costs a capture."""

MAX_SITUATIONS = 8
"""Number of situations whose last graph is kept: modes, shapes, and parts of a batch."""

MAX_PARTS = 2_000
"""Number of parts that are compared in each call, as an attribute may hold a data set."""


class ReachablePython:
    """The Python state that can be reached from a planned module.

    Args:
        user_module: an instance of the user's class that shares the state of the planned module.
        module: the planned module.

    Attributes:
        version: number of changes so far; 0 is the state of the plan.
        is_guarded: whether guards tell which program belongs to the current state, so that no
            change is looked for.
    """

    def __init__(self, user_module: nn.Module, module: nn.Module) -> None:
        self._aliases = user_module, module
        self._state = ReachableState(*self._aliases, max_parts=MAX_PARTS)
        self.version, self.is_guarded = 0, False
        self._changed: StateLocation | None = None
        self._captured: dict[Hashable, tuple[int, Graph]] = {}
        self._unread_versions: set[int] = set()
        self._is_read = False

    def of_copy(self, user_module: nn.Module, module: nn.Module) -> ReachablePython:
        """Return the watch of a copy of the planned module, whose programs are the same."""
        result = ReachablePython(user_module, module)
        result.version, result.is_guarded = self.version, self.is_guarded
        return result

    def key(self, situation: tuple[object, ...]) -> tuple[object, ...]:
        """Return `situation` with the version of the state, if that is not the plan's."""
        return (*situation, "Python state", self.version) if self.version else situation

    def compare(self, situation: Hashable, graph: Graph) -> None:
        """Compare a graph that was captured without guards with that of the state before.

        Args:
            situation: equal for calls that differ in nothing but the state.
        """
        version, before = self._captured.pop(situation, (self.version, graph))
        self._captured[situation] = self.version, graph
        for oldest in list(self._captured)[:-MAX_SITUATIONS]:
            del self._captured[oldest]
        if version == self.version:
            return
        was_ignored = self._is_ignored
        self._is_read |= not are_equal(before, graph)
        self._unread_versions.add(self.version)
        if self._is_ignored and not was_ignored:
            log.warning(
                "%s changes between calls, but the captured graph does not depend on it; further"
                " changes are ignored. If `forward` reads it, keep it in an attribute of the module"
                " or in a buffer",
                self._changed,
            )

    @property
    def _is_ignored(self) -> bool:
        return len(self._unread_versions) >= MAX_UNREAD and not self._is_read

    def update(self) -> None:
        """Count a new version if the state has changed since the last call."""
        if self.is_guarded or self._is_ignored:
            return
        change = next(self._state.changes(_are_equal), None)
        if change is None:
            return
        self.version, self._changed = self.version + 1, change.place
        self._state = ReachableState(*self._aliases, max_parts=MAX_PARTS)
        log.info("%s has changed since the capture", change.place)


def _are_equal(before: Tensor, now: Tensor) -> bool:
    """Whether two tensors are known to have equal values: not without reading them."""
    return before is now
