"""Methods and other members of classes that the user replaces between calls of a planned model.

A captured program contains what methods computed. A method is replaced for all instances by an
assignment to its class, and for one by an attribute of the same name on the instance.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from operator import is_, itemgetter
from types import FunctionType
from typing import Any

from torch import nn

from shardwright.core.capture.global_variables import is_library
from shardwright.core.capture.state_contents import OF_TORCH
from shardwright.core.torch_internals.modules import own_buffers, own_parameters

READ_AS_DICT = "__dict__"
"""Name of the entry for a module whose `__dict__` the user's `forward` reads, by which it may
depend on any attribute."""

# `forward` of a submodule is compared by itself.
_OF_PLANNED = OF_TORCH | {"execution", "forward"}

_CODE = (FunctionType, staticmethod, classmethod, property)


class ClassMembers:
    """The members of the classes of a model, and the attributes of its modules.

    Args:
        by_path: the model and its submodules, by path.
    """

    def __init__(self, by_path: Mapping[str, nn.Module]) -> None:
        self._by_path = by_path
        classes = {cls for child in by_path.values() for cls in type(child).__mro__}
        users = (cls for cls in classes if not is_library(cls.__module__))
        self._planned = {cls: dict(_iterate_code(cls)) for cls in users}
        self._known_names = {path: set(vars(child)) for path, child in by_path.items()}
        self._record()

    def of_copy(self, by_path: Mapping[str, nn.Module]) -> ClassMembers:
        """Return the members of a copy of the model, compared with the same planned members."""
        result = copy(self)
        result._by_path = by_path
        result._known_names = {path: set(names) for path, names in self._known_names.items()}
        result._record()
        return result

    def _record(self) -> None:
        # Dictionaries that change with the modules and classes.
        self._variables: list[Mapping[str, Any]] = [
            *map(vars, self._by_path.values()),
            *map(vars, self._planned),
        ]
        self._sizes = list(map(len, self._variables))
        present = {cls: code for cls in self._planned if (code := dict(_iterate_code(cls)))}
        # The first name is read twice, as an `itemgetter` of one name returns no tuple.
        readers = {cls: itemgetter(*code, next(iter(code))) for cls, code in present.items()}
        self._readers = [(vars(cls), read) for cls, read in readers.items()]
        self._current = self._read_code()

    def have_changed(self) -> bool:
        """Return whether a member may have been replaced since the last call of `update`."""
        if list(map(len, self._variables)) != self._sizes:
            return True
        try:
            return not all(map(is_, self._read_code(), self._current))
        except KeyError:  # A method has been deleted.
            return True

    def update(self, read_as_dict: Collection[str]) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        """Return (path, name) of new attributes that take the place of members, and the members of
        classes that differ from those at planning, by qualified name.

        Args:
            read_as_dict: paths of the modules of which every new attribute counts.
        """
        self._record()
        new = [
            (path, name)
            for path, child in self._by_path.items()
            for name in self._pop_new_names(path, child)
            if path in read_as_dict or _shadows_member(child, name)
        ]
        differing = {
            f"{cls.__module__}.{cls.__qualname__}.{name}": present.get(name)
            for cls, planned in self._planned.items()
            for present in (dict(_iterate_code(cls)),)
            for name in sorted(planned.keys() | present.keys())
            if present.get(name) is not planned.get(name)
        }
        return new, differing

    def _pop_new_names(self, path: str, child: nn.Module) -> Iterable[str]:
        new = vars(child).keys() - self._known_names[path]
        self._known_names[path] |= new
        # A tensor of another pipeline stage has a placeholder.
        return sorted(new - _OF_PLANNED - own_parameters(child).keys() - own_buffers(child).keys())

    def _read_code(self) -> list[Any]:
        return [member for variables, read in self._readers for member in read(variables)]


def _iterate_code(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(cls).items():
        if isinstance(member, _CODE):
            yield name, member


def _shadows_member(module: nn.Module, name: str) -> bool:
    """Return whether attribute `name` of a module hides a method or another callable of its class.

    Numbers and tensors are compared where `forward` reads them, properties come before attributes,
    and methods of planned models, such as `train_step`, are not captured.
    """
    member = inspect.getattr_static(type(module), name, None)
    is_code = callable(member) or hasattr(type(member), "__get__")
    of_planned = any(name in vars(cls) for cls in type(module).__mro__ if _is_of_planned(cls))
    return is_code and not hasattr(type(member), "__set__") and not of_planned


def _is_of_planned(cls: type) -> bool:
    package, _, _ = __name__.partition(".")
    return cls.__module__.partition(".")[0] == package
