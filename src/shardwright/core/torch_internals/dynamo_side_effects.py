"""Objects of the user that a call changes, as recorded by TorchDynamo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import GlobalSource
from torch._dynamo.variables import (
    ConstantVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import (
    NewGlobalVariable,
)


@dataclass(frozen=True, eq=False)
class ChangedObject:
    """An object that a traced call changes.

    Args:
        value: the object; for a global variable the module's `__dict__` or the module's name.
        attributes: names of the attributes that are set; None for a container whose contents
            change and for a global variable.
        global_name: name of the global variable that is set; None for other objects.
    """

    value: Any
    attributes: tuple[str, ...] | None
    global_name: str | None = None


def find_changed_objects(side_effects: SideEffects) -> Iterator[ChangedObject]:
    """Yield the objects that a traced call changes, as Dynamo has recorded them."""
    # Dynamo keeps the objects alive whose ids it uses as keys.
    existing = {id(item): item for item in side_effects.keepalive}
    for key, variable in side_effects.id_to_variable.items():
        # Objects that the trace itself has created are no state of the user.
        is_new = type(variable.mutation_type).__name__.endswith("New")
        if key not in existing or is_new or not side_effects.is_modified(variable):
            continue
        attributes = side_effects.store_attr_mutations.get(variable)
        if isinstance(variable, NewGlobalVariable):
            assert attributes is not None
            # The only attribute of this variable is the name of the global variable.
            name = next(iter(attributes))
            yield ChangedObject(_get_module_of_global_variable(variable.source), None, name)
        elif attributes is None:
            yield ChangedObject(existing[key], None)
        else:
            # The object still has its attributes from before the trace; the bytecode sets the new
            # ones.
            before = getattr(existing[key], "__dict__", {})
            changed = [
                name
                for name, end in attributes.items()
                if not _is_restored_constant(before, name, end)
            ]
            if changed:
                yield ChangedObject(existing[key], tuple(changed))


def _is_restored_constant(before: Mapping[str, Any], name: str, after: VariableTracker) -> bool:
    """Whether an attribute has the same constant value before and after the trace.

    An example is a flag that is set for the duration of a call.
    """
    if name not in before or not isinstance(after, ConstantVariable):
        return False
    return type(before[name]) is type(after.value) and bool(before[name] == after.value)


def _get_module_of_global_variable(source: Any) -> Any:
    """Return the module name of a Dynamo source that is a global variable.

    Returns None for the module of the traced function.
    """
    if isinstance(source, GlobalSource):
        return None
    # `import_source` names the module of another function by an alias of its dotted name.
    alias: str = source.base.global_name
    return alias.removeprefix("__import_").replace("_dot_", ".")
