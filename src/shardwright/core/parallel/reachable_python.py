"""Watch the Python state that `forward` can reach and attributes do not show: what containers and
objects hold, enclosing scopes, class attributes, context variables, arguments of `partial`.

Whether `forward` reads it is unknown, so a change asks for a capture by TorchDynamo, whose guards
tell.
"""

from __future__ import annotations

import logging

from torch import Tensor, nn

from shardwright.core.capture.reachable_state import Change, ReachableState

log = logging.getLogger(__name__)

MAX_CHANGES = 8
"""Changes after which models that TorchDynamo cannot capture are watched no more."""

MAX_PARTS = 2_000
"""Number of parts that are compared in each call: about 0.5 ms."""


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

    def of_copy(self, user_module: nn.Module, module: nn.Module) -> ReachablePython:
        """Return the watch of a copy of the planned module, whose programs are the same."""
        result = ReachablePython(user_module, module)
        result.version, result.is_guarded = self.version, self.is_guarded
        return result

    def key(self, situation: tuple[object, ...]) -> tuple[object, ...]:
        """Return `situation` with the version of the state, if that is not the plan's."""
        if not self.is_guarded and self.version < MAX_CHANGES:
            self._update()
        return (*situation, "Python state", self.version) if self.version else situation

    def _update(self) -> None:
        change = next(self._state.changes(_are_equal), None)
        if change is None:
            return
        self.version += 1
        self._state = ReachableState(*self._aliases, max_parts=MAX_PARTS)
        log.info("%s has changed since the capture", change.place)
        if self.version == MAX_CHANGES:
            _warn_of_last_change(change)


def _are_equal(before: Tensor, now: Tensor) -> bool:
    """Whether two tensors are known to have equal values: not without reading them."""
    return before is now


def _warn_of_last_change(change: Change) -> None:
    log.warning(
        "%s has changed %d times since the plan; further changes have no effect on what `forward`"
        " computes. Keep it in an attribute of the module or a buffer if `forward` reads it",
        *(change.place, MAX_CHANGES),
    )
