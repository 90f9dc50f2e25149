"""Watch Python state that `forward` can reach through attributes: contents of containers and
objects, enclosing scopes, class attributes, context variables, arguments of `partial`.

It is unknown whether `forward` reads this state. After a change, the model is captured by
TorchDynamo, whose guards cover the state that `forward` reads. If that fails, the graphs of two
states are compared: if they differ, `forward` reads the changed state.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from itertools import chain

from torch import Tensor, nn

from shardwright.core.capture.reachable_state import ReachableState
from shardwright.core.capture.shapes import are_equal
from shardwright.core.capture.state_changes import StateLocation
from shardwright.core.graph.graph import Graph

log = logging.getLogger(__name__)

MAX_EQUAL_GRAPHS = 8
"""Number of changes without effect on the graph after which changes are ignored.

Comparing graphs takes a capture for each change.
"""

MAX_CACHED_GRAPHS = 8
"""Maximum number of calls that differ in modes, shapes or batch sizes whose last graph is
cached."""

MAX_COMPARED_OBJECTS = 2_000
"""Maximum number of objects compared in each call, as an attribute may be a data set."""


class ReachablePython:
    """The Python state that can be reached from a planned module.

    Args:
        user_module: an instance of the user's class that shares the state of the planned module.
        module: the planned module.

    Attributes:
        version: number of changes so far; 0 is the state of the plan.
        is_guarded: whether guards select the program of the current state, so that changes need
            not be detected.
    """

    def __init__(self, user_module: nn.Module, module: nn.Module) -> None:
        self._aliases = user_module, module
        self._state = ReachableState(*self._aliases, max_parts=MAX_COMPARED_OBJECTS)
        self.version, self.is_guarded = 0, False
        self._changed: StateLocation | None = None
        self._captured: dict[Hashable, tuple[int, Graph]] = {}
        self._unread_versions: set[int] = set()
        self._is_read = False

    def of_copy(self, user_module: nn.Module, module: nn.Module) -> ReachablePython:
        """Return the watched Python state of `module`, a copy of the planned module with the
        same programs."""
        # Captured graphs are not copied: the copy compares from its next capture on.
        result = ReachablePython(user_module, module)
        result.version, result.is_guarded = self.version, self.is_guarded
        return result

    def key(self, specialization: tuple[object, ...]) -> tuple[object, ...]:
        """Return `specialization`, extended by `version` once the Python state has changed."""
        return (*specialization, "Python state", self.version) if self.version else specialization

    def compare(self, specialization: Hashable, graph: Graph) -> None:
        """Compare `graph`, captured without guards, with the last graph of an equal call.

        Args:
            specialization: key of the call without Python state: equal for calls that differ only
                in this state.
            graph: the graph captured in the current state.
        """
        # Popped and inserted anew: the order of the dict is that of the last use.
        version, before = self._captured.pop(specialization, (self.version, graph))
        self._captured[specialization] = self.version, graph
        for oldest in list(self._captured)[:-MAX_CACHED_GRAPHS]:
            del self._captured[oldest]
        # The last graph is of the same state, so a difference would say nothing about the state.
        if version == self.version:
            return
        # For the warning below, which is logged once.
        was_ignored = self._ignores_further_changes
        # One difference suffices: `forward` reads the state, so later changes are never ignored.
        self._is_read |= not are_equal(before, graph)
        self._unread_versions.add(self.version)
        if self._ignores_further_changes and not was_ignored:
            log.warning(
                "%s changes between calls, but the captured graph does not depend on it; further"
                " changes are ignored. If `forward` reads it, keep it in an attribute of the module"
                " or in a buffer",
                self._changed,
            )

    @property
    def _ignores_further_changes(self) -> bool:
        return len(self._unread_versions) >= MAX_EQUAL_GRAPHS and not self._is_read

    def update(self) -> None:
        """Increment `version` if the watched Python state has changed since the last call.

        Ignored if enough changes had no effect. Once guards cover the state, only functions of
        libraries and methods of classes are compared, on which TorchDynamo does not guard.
        """
        if self._ignores_further_changes:
            return
        # One change suffices: a version stands for the state of all objects.
        changes = iter(()) if self.is_guarded else self._state.changes(_is_same_tensor)
        change = next(chain(changes, self._state.replaced_functions()), None)
        if change is None:
            return
        self.version, self._changed = self.version + 1, change.location
        self._state = ReachableState(*self._aliases, max_parts=MAX_COMPARED_OBJECTS)
        log.info("%s has changed since the capture", change.location)


def _is_same_tensor(before: Tensor, current: Tensor) -> bool:
    """Whether two tensors are the same object; comparing values would read both in every call."""
    return before is current
