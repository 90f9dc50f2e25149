"""Python numbers of which each new value captures a planned model again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping, Sequence

log = logging.getLogger(__name__)

MAX_CAPTURES = 8
"""Number of captures for different values of a number after which a warning is logged."""

NUM_VALUES = 3
"""Number of captures for different values of a number after which it is said to vary."""


_TENSOR = (
    "use a tensor, which needs no further capture: pass `torch.tensor(0.5)` as the argument, or"
    " plan with a buffer (`register_buffer`) and set it by `fill_`"
)

_FEW_VALUES = (
    "use few values, of which each is captured once, as sizes and counts of loops are constants of"
    " a program"
)


class RepeatedCaptures:
    """The Python numbers of the calls for which a planned model has been captured again.

    A number among the arguments, or in an attribute, is a constant of the program at first. A
    coefficient that is set in each step would silently capture the model in each step.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, list[dict[str, float]]] = {}
        self._has_warned = False

    def record(
        self,
        shapes: Hashable,
        numbers: Mapping[str, float],
        varying: Collection[str] = (),
        constant: Collection[str] = (),
    ) -> list[str]:
        """Record a capture, and warn once if a number had a new value in each of many.

        Args:
            shapes: what programs depend on besides numbers: shapes, modes.
            numbers: the numbers among the arguments and in attributes, by name.
            varying: names of those that are said to vary already.
            constant: names of those that cannot be inputs.

        Returns:
            The names of the others that had another value in each of the last `NUM_VALUES`
            captures.
        """
        latest = [*self._captured.get(shapes, ()), dict(numbers)][-MAX_CAPTURES:]
        self._captured[shapes] = latest
        names = [name for name in numbers if name not in varying]
        repeated = _with_another_value_in_each(latest, names)
        if repeated and len(latest) == MAX_CAPTURES and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the model was captured %d times, once for each value of %s, which every call"
                " repeats\n%s",
                len(latest),
                ", ".join(f"`{name}`" for name in repeated),
                _FEW_VALUES if set(repeated) <= set(constant) else _TENSOR,
            )
        # Only the latest, as other numbers may have changed before.
        latest = latest[-NUM_VALUES:]
        return _with_another_value_in_each(latest, names) if len(latest) == NUM_VALUES else []


def _with_another_value_in_each(
    captured: Sequence[Mapping[str, float]], names: Collection[str]
) -> list[str]:
    return [name for name in names if len({each.get(name) for each in captured}) == len(captured)]
