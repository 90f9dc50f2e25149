"""Correct how TorchDynamo traces and replays changes of deques, ordered dictionaries and lists.

Dynamo of PyTorch 2.13 treats a bounded `deque` as unbounded, and ignores
`OrderedDict.move_to_end` if no entry changes. It guards the length of each list, so a list to which
every call appends, such as a log of losses, would require a new trace in every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, ConstDictVariable, builder
from torch._dynamo.variables.lists import DequeVariable, ListVariable, TupleVariable


class ExistingListVariable(ListVariable):
    """Dynamo variable of an existing list, whose length is guarded only if the list is read.

    Appending and extending do not read the list.

    Args:
        items: the elements.
        num_existing: number of elements before the trace.
        is_guarded: whether the length is guarded.
        is_traced: whether the trace has ended; afterwards reads set no guard, as Dynamo only
            generates bytecode.
    """

    def __init__(
        self,
        items: list[Any],
        num_existing: int = 0,
        is_guarded: bool = True,
        is_traced: bool = False,
        **kwargs: Any,
    ) -> None:
        self.num_existing, self.is_guarded, self.is_traced = num_existing, is_guarded, is_traced
        super().__init__(items, **kwargs)

    @property
    def items(self) -> list[Any]:
        if not self.is_guarded:
            self.is_guarded = True
            assert self.source is not None
            install_guard(self.source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
        items: list[Any] = vars(self)["items"]
        return items

    @items.setter
    def items(self, value: list[Any]) -> None:
        vars(self)["items"] = value

    def call_method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        # Other iterables run code of the user, which may read this list.
        is_sequence = bool(args) and isinstance(args[0], (ListVariable, TupleVariable))
        only_adds = name == "append" or (name == "extend" and is_sequence and args[0] is not self)
        if not only_adds:
            return super().call_method(tx, name, args, kwargs)
        # As if guarded, so that the reads of `append` and `extend` themselves install no guard.
        is_guarded, self.is_guarded = self.is_guarded, True
        try:
            return super().call_method(tx, name, args, kwargs)
        finally:
            self.is_guarded = is_guarded

    def is_python_constant(self) -> bool:
        # The writer of the bytecode asks this of each value, and would read the elements.
        return not (self.is_traced and not self.is_guarded) and super().is_python_constant()

    def reconstruct(self, codegen: Any) -> None:
        if self.is_guarded:
            super().reconstruct(codegen)
            return
        # Load the existing elements from the list itself, as later calls have more of them.
        added = vars(self)["items"][self.num_existing :]
        codegen.append_output(create_instruction("BUILD_LIST", arg=0))
        codegen(self.source)
        codegen.append_output(create_instruction("LIST_EXTEND", arg=1))
        codegen.foreach(added)
        codegen.append_output(create_instruction("BUILD_LIST", arg=len(added)))
        codegen.append_output(create_instruction("LIST_EXTEND", arg=1))


@contextmanager
def tracing_existing_containers() -> Iterator[None]:
    """Context manager in which Dynamo handles deques with `maxlen` and lists that grow.

    Dynamo then guards the length of an existing list only if traced code reads the list.
    """
    wrap = builder.VariableBuilder.wrap_listlike

    def wrapped(self: Any, value: Any) -> Any:
        if type(value) is list:
            return _wrap_existing_list(wrap, self, value)
        variable = wrap(self, value)
        if isinstance(value, deque) and value.maxlen is not None:
            variable.maxlen = ConstantVariable.create(value.maxlen)  # type: ignore[attr-defined]
            install_guard(AttrSource(self.source, "maxlen").make_guard(GuardBuilder.EQUALS_MATCH))
        return variable

    with patch.object(builder.VariableBuilder, "wrap_listlike", wrapped):
        yield


def _wrap_existing_list(wrap: Callable[..., Any], variable_builder: Any, value: list[Any]) -> Any:
    # The builder would guard the length at once.
    with patch.object(variable_builder, "install_guards"):
        variable = wrap(variable_builder, value)
    if type(variable) is not ListVariable:
        variable_builder.install_guards(GuardBuilder.SEQUENCE_LENGTH)
        return variable
    # `items` guards the length once the list is read.
    variable_builder.install_guards(GuardBuilder.TYPE_MATCH)
    # In place, as Dynamo may refer to the variable already.
    state = {"num_existing": len(value), "is_guarded": False, "is_traced": False}
    vars(variable).update(state)
    object.__setattr__(variable, "__class__", ExistingListVariable)
    return variable


def replay_all_contents(side_effects: SideEffects) -> None:
    """Make bytecode replay the contents of changed deques and the entry order of changed dicts."""
    for variable in side_effects.id_to_variable.values():
        if isinstance(variable, ExistingListVariable):
            variable.is_traced = True
        if isinstance(variable, DequeVariable):
            # The elements are traced: the code clears the deque and appends those that remain.
            variable.maxlen = ConstantVariable.create(None)
        # An `OrderedDict` is an object of a user's class, with its entries in `_base_vt`.
        table = getattr(variable, "_base_vt", variable)
        if isinstance(table, ConstDictVariable):
            now = [key.vt for key in table.items]
            before = [key for key in table.original_items if key in now]
            # Dynamo replays changed entries only, which does not move the others.
            table.should_reconstruct_all |= before != [k for k in now if k in table.original_items]
