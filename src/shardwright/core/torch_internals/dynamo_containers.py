"""Changes of containers that TorchDynamo would replay differently from Python.

PyTorch 2.13 takes a bounded `deque` for an unbounded one, and ignores `OrderedDict.move_to_end` if
no entry changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, ConstDictVariable, builder
from torch._dynamo.variables.lists import DequeVariable


@contextmanager
def tracing_bounded_deques() -> Iterator[None]:
    """Context manager in which Dynamo knows the `maxlen` of existing deques."""
    wrap = builder.VariableBuilder.wrap_listlike

    def wrapped(self: Any, value: Any) -> Any:
        variable = wrap(self, value)
        if isinstance(value, deque) and value.maxlen is not None:
            variable.maxlen = ConstantVariable.create(value.maxlen)  # type: ignore[attr-defined]
            install_guard(AttrSource(self.source, "maxlen").make_guard(GuardBuilder.EQUALS_MATCH))
        return variable

    with patch.object(builder.VariableBuilder, "wrap_listlike", wrapped):
        yield


def replay_all_contents(side_effects: SideEffects) -> None:
    """Make the bytecode of a trace replay the order and number of entries of changed containers."""
    for variable in side_effects.id_to_variable.values():
        if isinstance(variable, DequeVariable):
            # The elements are traced: the code clears the deque and appends those that remain.
            variable.maxlen = ConstantVariable.create(None)
        table = getattr(variable, "_base_vt", variable)
        if isinstance(table, ConstDictVariable):
            now = [key.vt for key in table.items]
            before = [key for key in table.original_items if key in now]
            table.should_reconstruct_all |= before != [k for k in now if k in table.original_items]
