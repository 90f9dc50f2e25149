"""Python state that `forward` can reach, and the changes that a trace makes to it.

This state is in attributes of modules, variables of enclosing scopes, classes, global variables and
default values. A captured program does not change this state, because `forward` runs only once,
during capture.
"""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardwright.core.capture.global_variables import is_library, names_in
from shardwright.core.capture.state_changes import (
    CONTAINERS,
    INDEXED,
    Change,
    RecordedContents,
    StateLocation,
    changes_of,
)
from shardwright.core.capture.state_contents import (
    ATOMS,
    CONTENT_TYPES,
    MISSING,
    STATE,
    After,
    Attribute,
    Cache,
    Parts,
    cached_results,
    contents_of,
)
from shardwright.core.capture.state_readers import (
    METHOD_TYPES,
    FunctionsReader,
    GlobalsReader,
    is_function,
    read_class_attributes,
    read_class_members,
    read_defaults,
    read_forward,
    read_module_attributes,
    reads_library_functions,
    vars_of,
)
from shardwright.core.capture.undone_effects import replace_contents
from shardwright.core.torch_internals.hooks import forward_hooks

_MOST_OBJECTS = 100_000
_MOST_PARTS = 10_000
"""Maximum number of elements of a container that are visited; larger containers hold data."""

_PLAIN = frozenset(("_weakrefset", "argparse", "array", "collections", "queue", "types", "weakref"))
"""Modules of the standard library with container classes for the user's objects."""

_DRAWS: tuple[Any, ...] = (random.random, np.random.rand)
_GENERATORS_OF_LIBRARIES = tuple(draw.__self__ for draw in _DRAWS)
"""Global generators of `random` and `numpy.random`, whose state `trace.py` compares."""

_INSTALLED = ("site-packages", "dist-packages")


class ReachableState:
    """Record of the Python state that can be reached from a module.

    Compares the contents of the objects to which attributes refer. Assignments to attributes of the
    module and its submodules are not detected, nor changes of parameters and buffers.

    Args:
        module: the module.
        alias: another object with the attributes of `module`, which is skipped.
        max_parts: maximum number of compared elements, nearest to the module first; 1,000 bytes of
            an array count as one element.

    Attributes:
        codes: code objects of the user's functions that `forward` may call.
    """

    def __init__(
        self,
        module: nn.Module,
        alias: nn.Module | None = None,
        max_parts: int = sys.maxsize,
    ) -> None:
        self._parts_left = max_parts
        self.codes: dict[CodeType, None] = {}
        self._recorded: list[RecordedContents] = []
        self._recorded_functions: list[RecordedContents] = []
        excluded = (*_GENERATORS_OF_LIBRARIES, alias)
        # Keeps the objects alive, so that no `id()` is given to another object.
        self._seen: dict[int, Any] = {id(each): each for each in excluded}
        self._names: set[str] = {"forward"}
        self._classes: dict[type, None] = {}
        self._waiting: deque[tuple[Any, StateLocation]] = deque()
        # Packages that define the model are user code even where they are installed.
        files = {type(child).__module__ for child in module.modules()}
        self._packages = {file.partition(".")[0] for file in files}
        self._is_user_package: dict[str, bool] = {}
        for path, child in module.named_modules():
            self._seen[id(child)] = child
            self._add_class(type(child))
            self._add_library_layer(type(child))
            description = f"attribute {{}} of a {type(child).__name__}"
            # `OF_TORCH` contains `forward`, which may be a closure that is set on the instance.
            own_forward = {name: vars(child)[name] for name in ("forward",) if name in vars(child)}
            for name, value in (read_module_attributes(child) | own_forward).items():
                self._enqueue(value, StateLocation(description, path).inside(name, indexed=False))
            for hook in (hook for hooks in forward_hooks(child) for hook in hooks.values()):
                self._enqueue(
                    hook, StateLocation("forward hook of {}", path or type(child).__name__)
                )
        self._visit_all()
        self._record_functions(Tensor, frozenset(self._names))

    def changes(self, is_equal: Callable[[Tensor, Tensor], bool]) -> Iterator[Change]:
        """Yield the differences between the recorded and the current state, except
        `replaced_functions`.

        Args:
            is_equal: returns whether two tensors are known to have equal values.
        """
        for holder in self._recorded:
            yield from changes_of(holder, is_equal)

    def replaced_functions(self) -> Iterator[Change]:
        """Yield the functions and layers of libraries, and the methods of the user's classes, that
        were replaced. A trace replaces some of them itself."""
        for holder in self._recorded_functions:
            for change in changes_of(holder, lambda *_: True):
                if is_function(change.value):
                    yield change

    def mutable_containers(self) -> Iterator[tuple[Any, tuple[str, ...] | None]]:
        """Yield (container, None) for recorded closure cells and containers, and (namespace, names)
        for recorded global variables."""
        for holder in self._recorded:
            if isinstance(holder.value, CONTAINERS):
                yield holder.value, None
            elif isinstance(holder.read, GlobalsReader):
                names = tuple(name for name in holder.contents if isinstance(name, str))
                yield holder.read.namespace(holder.value), names

    def restore(self) -> None:
        """Restore the recorded contents of all objects, after a trace that failed.

        Positions of iterators and generators are not restored.
        """
        for holder in self._recorded:
            now = holder.read(holder.value)
            # By identity, which user code may compare, too.
            if now.keys() != holder.contents.keys() or any(
                now[key] is not item for key, item in holder.contents.items()
            ):
                _restore_contents(holder.value, holder.read, holder.contents, now)

    def _visit_all(self) -> None:
        """Visit queued objects, then the methods whose names occur in visited functions."""
        has_new = True
        # Visited methods name further ones, until a pass over the classes finds none.
        while has_new:
            while self._waiting and len(self._recorded) < _MOST_OBJECTS:
                self._visit_object(*self._waiting.popleft())
            # Not empty only if `_MOST_OBJECTS` was reached.
            self._waiting.clear()
            for cls in self._classes:
                for name, value in vars(cls).items():
                    # `getattr` may call any method, and Python itself calls `__len__` and the like.
                    named = self._names & {name, "getattr", "methodcaller"} or name[:2] == "__"
                    if isinstance(value, METHOD_TYPES) and named:
                        self._enqueue(value, StateLocation("method {}", f"{cls.__name__}.{name}"))
            has_new = bool(self._waiting)

    def _enqueue(self, value: Any, location: StateLocation) -> None:
        # `isinstance` would read `__class__` of proxies, which may run user code.
        if id(value) not in self._seen and not issubclass(type(value), ATOMS):
            self._seen[id(value)] = value
            self._waiting.append((value, location))

    def _record_contents(
        self, value: Any, location: StateLocation, read: Callable[[Any], Parts] = contents_of
    ) -> None:
        contents = read(value)
        sizes = (len(item) for item in contents.values() if isinstance(item, bytes))
        self._parts_left -= len(contents) + sum(sizes) // 1_000
        # The queue is breadth-first: what no longer fits is farther from the module.
        if self._parts_left < 0:
            return
        recorded = RecordedContents(value, location, read, contents)
        if not reads_library_functions(read):
            self._recorded.append(recorded)
        if read is read_class_members or reads_library_functions(read):
            self._recorded_functions.append(recorded)
        if len(contents) <= _MOST_PARTS:
            for key, item in contents.items():
                # `_visit_all` visits those methods of a class whose names occur in functions.
                if read is not read_class_members or not issubclass(type(item), METHOD_TYPES):
                    self._enqueue(item, location.inside(key, isinstance(value, INDEXED)))

    def _visit_object(self, value: Any, location: StateLocation) -> None:
        value_type = type(value)
        if value_type is FunctionType:
            self._visit_function(value)
        elif value_type in METHOD_TYPES:
            for name in ("fget", "fset", "func", "__func__"):
                self._enqueue(getattr(value, name, None), location)
        elif value_type is MethodType:
            self._enqueue(value.__func__, location)
            self._enqueue(value.__self__, location)
        elif value_type is BuiltinMethodType:  # For example `append` of a list.
            self._enqueue(value.__self__, location)
        elif value_type is Cache:
            self._enqueue(value.__wrapped__, location)
            if self._is_user_module(str(value.__module__)):
                description = f"result of `{value.__qualname__}` under `functools.lru_cache`"
                self._record_contents(value, StateLocation(description), cached_results)
        elif issubclass(value_type, type):
            self._add_class(value)
        elif issubclass(value_type, ModuleType):
            return  # Its variables are recorded for the functions that name them.
        elif issubclass(value_type, nn.Module):  # A module that is not a registered submodule.
            self._add_class(value_type)
            self._record_contents(value, location, read_module_attributes)
            for held in (value.children(), value.parameters(False), value.buffers(False)):
                for member in held:
                    self._enqueue(member, location)
        elif self._has_user_state(value_type):
            self._add_class(value_type)
            self._record_contents(value, location)

    def _visit_function(self, function: FunctionType) -> None:
        file = str(function.__globals__.get("__name__"))
        code, label = function.__code__, f"`{function.__qualname__}`"
        cells = list(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if self._is_user_module(file):
            self.codes[code] = None
            for name, cell in cells:
                # The cell for `super()`; `_add_class` records classes.
                if name != "__class__":
                    scope = f"variable {{}} of the scope that encloses {label}"
                    self._enqueue(cell, StateLocation(scope, name))
            self._record_contents(
                function, StateLocation(f"attribute {{}} of the function {label}"), vars_of
            )
            self._record_contents(
                function, StateLocation(f"default value of {{}} of {label}"), read_defaults
            )
            self._record_globals(function, file)
        elif file.partition(".")[0] != "shardwright":
            # A decorator of a library may wrap a user function.
            for _, cell in cells:
                held = contents_of(cell)[STATE]
                if type(held) in (*METHOD_TYPES, MethodType):
                    self._enqueue(held, StateLocation("function {}", label))

    def _record_globals(self, function: FunctionType, file: str) -> None:
        """Record the global variables that a function names, of its file and of the modules that it
        names or imports."""
        names = frozenset(names_in(function.__code__))
        self._names |= names
        if names & {"environ", "getenv"} and id(os.environ) not in self._seen:
            self._seen[id(os.environ)] = os.environ
            self._record_contents(os.environ, StateLocation("environment variable {}"), dict)
        # `globals()["name"]` may read any of them.
        if "globals" in names:
            names |= function.__globals__.keys()
        read = GlobalsReader(names)
        self._record_contents(function, StateLocation(f"global variable {{}} of {file}"), read)
        # `import a` inside of a function names a module that need not be a global variable.
        named = [*read(function).values(), *(sys.modules.get(name) for name in names)]
        modules = {id(module): module for module in named if isinstance(module, ModuleType)}
        waiting = list(modules.values())
        while waiting:
            module = waiting.pop()
            if self._is_user_module(module.__name__):
                self._record_contents(
                    module, StateLocation(f"global variable {{}} of {module.__name__}"), read
                )
            else:
                self._record_functions(module, names)
            # `a.b.value` names each of its parts.
            for inner in read(module).values():
                if isinstance(inner, ModuleType) and id(inner) not in modules:
                    modules[id(inner)] = inner
                    waiting.append(inner)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base not in self._classes and self._is_user_module(base.__module__):
                self._classes[base] = None
                self._record_contents(
                    base,
                    StateLocation(f"attribute {{}} of the class {base.__name__}"),
                    # Methods of modules are watched as attributes of each module.
                    read_class_attributes if issubclass(base, nn.Module) else read_class_members,
                )

    def _add_library_layer(self, cls: type[nn.Module]) -> None:
        """Record `forward` of a class of a library, and the functions that it calls."""
        forward = cls.forward
        if self._is_user_module(cls.__module__) or id(forward) in self._seen:
            return
        self._seen[id(forward)] = forward
        if isinstance(forward, FunctionType):
            label = f"method {{}} of the class {cls.__name__}"
            self._record_contents(cls, StateLocation(label), read_forward)
            names = frozenset(forward.__code__.co_names)
            for module in GlobalsReader(names)(forward).values():
                if isinstance(module, ModuleType):
                    self._record_functions(module, names)

    def _record_functions(self, owner: ModuleType | type[Tensor], names: frozenset[str]) -> None:
        """Record the functions and layers of a library that have one of the names: users replace
        them."""
        location = StateLocation(f"function {{}} of {owner.__name__}")
        self._record_contents(owner, location, FunctionsReader(names))
        for value in map(vars(owner).get, names):
            if isinstance(value, type) and issubclass(value, nn.Module):
                self._add_library_layer(value)

    def _has_user_state(self, cls: type) -> bool:
        """Whether objects of this type may contain state of user code."""
        plain = cls.__module__ in _PLAIN or issubclass(cls, CONTENT_TYPES)
        return plain or self._is_user_module(cls.__module__)

    def _is_user_module(self, file: str) -> bool:
        """Whether a Python module is user code, or belongs to the package that defines the
        model."""
        package = str(file).partition(".")[0]
        if package not in self._is_user_package:
            of_model = package in self._packages or package == "__main__"
            module = sys.modules.get(package)
            # A namespace package has no `__file__`, only folders.
            folders = iter(getattr(module, "__path__", ()))
            path = getattr(module, "__file__", None) or next(folders, None)
            # Modules without files are built in or made at run time.
            installed = path is None or any(folder in path for folder in _INSTALLED)
            self._is_user_package[package] = (of_model or not installed) and not is_library(package)
        return self._is_user_package[package]


def _restore_contents(value: Any, read: Callable[[Any], Parts], before: Parts, now: Parts) -> None:
    """Restore the contents of a Python object.

    Args:
        read: function that returns the contents of the object.
        before, now: contents to restore, and current contents.
    """
    if read in (read_defaults, cached_results):
        return  # Default values and results are recorded as objects of their own.
    if isinstance(value, CellType):
        if before[STATE] is MISSING:
            del value.cell_contents
        else:
            value.cell_contents = before[STATE]
    # Its own methods also set the variables of the process.
    elif value is os.environ:
        os.environ.clear()
        os.environ.update(before)
    else:
        is_container = isinstance(value, (list, deque, set, dict))
        if is_container:
            _restore_elements(value, before)
        variables = isinstance(read, GlobalsReader) and isinstance(value, FunctionType)
        owner = _AttributeWriter(value.__globals__ if variables else None, value)
        for key in {**now, **before}:
            old = before.get(key, MISSING)
            name = key.name if isinstance(key, Attribute) else key
            is_element = is_container and name is key
            if isinstance(name, str) and not is_element and old is not now.get(key, MISSING):
                owner.set(name, old)


def _restore_elements(value: Any, before: Parts) -> None:
    """Restore the elements of a list, deque, set or dict, in their recorded order."""
    other = (After, Attribute)
    elements = {key: item for key, item in before.items() if not isinstance(key, other)}
    replace_contents(value, elements if isinstance(value, (dict, set)) else elements.values())


@dataclass(frozen=True)
class _AttributeWriter:
    """Setter of one attribute of an object, or of one global variable of a module."""

    variables: dict[str, Any] | None
    owner: Any

    def set(self, name: str, value: Any) -> None:
        if self.variables is not None:
            self.variables[name] = value
            if value is MISSING:
                del self.variables[name]
        elif name != STATE and value is MISSING:
            delattr(self.owner, name)
        elif name != STATE:
            setattr(self.owner, name, value)
