"""References to the modules of a model from outside of the model, such as in closures and in
registries that are keyed by modules.

A trace runs on a copy of the model. If outside references still referred to the original modules,
`REGISTRY[layer]` would fail and `REGISTRY.get(layer, 1.0)` would return the default. During a
trace, outside references therefore refer to the modules of the copy.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CellType, MethodType
from typing import Any

from torch import nn

from shardwright.core.capture.reachable_state import ReachableState
from shardwright.core.capture.state_contents import OF_TORCH
from shardwright.errors import CaptureError

_MAX_ELEMENTS = 10_000
"""Maximum number of elements of a container that is searched; larger containers hold data."""

_KEYED = (dict, set, frozenset)


class OuterReferences:
    """References from reachable Python state to the modules of a model, while a copy of the model
    is traced.

    Args:
        module: the model, or another object with its submodules.
        copy: the copy that is traced.
        reachable: the state that can be reached from `copy`.
        follow_ids: whether integers equal to the `id()` of a module are replaced by the `id()` of
            its copy.
    """

    def __init__(
        self,
        module: nn.Module,
        copy: nn.Module,
        reachable: ReachableState,
        follow_ids: bool = False,
    ) -> None:
        copies = dict(copy.named_modules())
        self._pairs = [
            (child, copies[path]) for path, child in module.named_modules() if path in copies
        ]
        self._copy = copy
        self._reachable = reachable
        # An integer may equal an `id()` by chance: look for ids only where a function calls `id`.
        names_id = any("id" in code.co_names for code in reachable.codes)
        self._follow_ids = follow_ids and names_id
        # TorchDynamo's bytecode runs with another object in place of the model: its `id()` differs.
        self._refuse_ids = names_id and not follow_ids

    @contextmanager
    def leading_to_copy(self) -> Iterator[bool]:
        """Return a context in which outside references to modules of the model refer to modules of
        the copy; yields whether any reference was replaced.

        Raises:
            CaptureError: if a registry is keyed by the `id()` of a module, and `follow_ids` is
                False.
        """
        # A list, because exactly these containers are restored after the trace.
        holders = list(self._reachable.mutable_containers())
        if self._refuse_ids:
            self._check_keys(
                (container for container, _ in holders), {id(child) for child, _ in self._pairs}
            )
        to_copy = _ModuleReplacer(self._pairs, self._pairs[0], self._follow_ids)
        has_changed = [
            _replace_in_container(container, names, to_copy) for container, names in holders
        ]
        # `copy.deepcopy` copies neither functions nor weak references, which lead to the original.
        for _, child in self._pairs:
            attributes = vars(child)
            has_changed.append(
                _replace_in_container(attributes, attributes.keys() - OF_TORCH, to_copy)
            )
        try:
            yield any(has_changed)
        finally:
            # `replaced` leads from rebuilt tuples and weak references back to the original ones.
            pairs = [(new, old) for old, new in (*self._pairs, *to_copy.replaced)]
            back = _ModuleReplacer(pairs, None, self._follow_ids)
            for container, names in holders:
                _replace_in_container(container, names, back)

    def check_changed(self, changed: Iterable[Any]) -> None:
        """Check the keys of containers that a call of the copy has changed.

        Raises:
            CaptureError: if a key is the model or the `id()` of a module.
        """
        self._check_keys(changed, {id(copy) for _, copy in self._pairs})

    def _check_keys(self, containers: Iterable[Any], ids: set[int]) -> None:
        for container in containers:
            if not isinstance(container, _KEYED) or len(container) > _MAX_ELEMENTS:
                continue
            for key in _iterate_key_objects(container):
                if key is self._copy or (type(key) is int and key in ids):
                    what = "the model itself" if key is self._copy else "the `id` of a module"
                    raise CaptureError(
                        f"`forward` uses a dictionary or set with {what} as a key, but a planned "
                        "model is another object, with another `id`\n"
                        "store the value in an attribute of the module: `self.calls = ...`"
                    )


class _ModuleReplacer:
    """Function from a value to a value with modules replaced by their copies.

    Args:
        pairs: (object, its replacement).
        root: (model, copy): any object that has the model's submodules as its own is replaced by
            the copy; None for no such replacement.
        follow_ids: whether to replace the `id()`s of modules.

    Attributes:
        replaced: (object, replacement) of each object that was replaced.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Any, Any]],
        root: tuple[nn.Module, nn.Module] | None,
        follow_ids: bool,
    ) -> None:
        self._new = {id(old): (old, new) for old, new in pairs}
        self._root = root
        modules = (pair for pair in self._new.values() if isinstance(pair[0], nn.Module))
        self._ids = {id(old): id(new) for old, new in modules} if follow_ids else {}
        self.replaced: list[tuple[Any, Any]] = []

    def __call__(self, value: Any) -> Any:
        if type(value) is int:
            return self._ids.get(value, value)
        if id(value) in self._new:
            return self._new[id(value)][1]
        new = self._rebuild_with_copies(value)
        if new is not value:
            self.replaced.append((value, new))
        return new

    def _rebuild_with_copies(self, value: Any) -> Any:
        value_type = type(value)
        if issubclass(value_type, nn.Module):
            # A planned model and its alias of the user's class share submodules (`alias_module`).
            return self._root[1] if self._root and _is_same_model(value, self._root[0]) else value
        if value_type is weakref.ReferenceType:
            target = value()
            new = self(target)
            # The callback of a `WeakKeyDictionary` removes the entry of a module that is freed.
            return value if new is target else weakref.ref(new, value.__callback__)
        if value_type is MethodType and issubclass(type(value.__self__), nn.Module):
            owner = self(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        # A key such as `(layer, "second")`. Named tuples take their items as separate arguments.
        if value_type is tuple:
            items = tuple(self(item) for item in value)
            return value if _are_identical(value, items) else items
        # A rebuilt `partial` would lose attributes that were set on it.
        if value_type is functools.partial and not vars(value):
            fields = (value.func, value.args, tuple(value.keywords.values()))
            function, args, values = new = tuple(self(field) for field in fields)
            keywords = dict(zip(value.keywords, values, strict=True))
            same = _are_identical(fields[:2], new[:2]) and _are_identical(fields[2], values)
            return value if same else functools.partial(function, *args, **keywords)
        return value


def _is_same_model(first: nn.Module, second: nn.Module) -> bool:
    """Whether two objects have the same submodules, so that both represent one model."""
    submodules = vars(first).get("_modules")
    return submodules is not None and submodules is vars(second).get("_modules")


def _are_identical(first: Iterable[Any], second: Iterable[Any]) -> bool:
    return all(old is new for old, new in zip(first, second, strict=True))


def _iterate_key_objects(container: Any) -> Iterator[Any]:
    """Yield the keys of a container, with tuples unpacked and weak references dereferenced."""
    for key in container:
        for item in key if type(key) is tuple else (key,):
            yield item() if type(item) is weakref.ReferenceType else item


def _replace_in_container(
    container: Any, names: Iterable[str] | None, replacement_of: _ModuleReplacer
) -> bool:
    """Replace references to modules in a container, or in variables of a namespace.

    Args:
        container: a closure cell, list, deque, dictionary or set.
        names: for a namespace, the names of the variables.
        replacement_of: function from a value to its replacement, or to the value itself.

    Returns:
        Whether any reference was replaced.
    """
    if names is not None:
        new_values = {name: replacement_of(container[name]) for name in names if name in container}
        changed = {name: new for name, new in new_values.items() if new is not container[name]}
        container.update(changed)
        return bool(changed)
    if isinstance(container, CellType):
        return _replace_in_cell(container, replacement_of)
    if len(container) > _MAX_ELEMENTS:
        return False
    # Methods of the base class, since a subclass may override them with side effects.
    if isinstance(container, dict):
        # `dict.update` of an `OrderedDict` would bypass its linked list, which has the order.
        cls: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        pairs = list(cls.items(container))
        new_pairs = [(replacement_of(key), replacement_of(value)) for key, value in pairs]
        same = all(map(_are_identical, pairs, new_pairs))
        refill, new = cls.update, new_pairs
    else:
        cls = next(each for each in (list, deque, set) if isinstance(container, each))
        items = list(cls.__iter__(container))
        new_items = [replacement_of(item) for item in items]
        same = _are_identical(items, new_items)
        refill, new = cls.update if cls is set else cls.extend, new_items
    if not same:
        # Emptied and refilled: replacing single keys of a dictionary would change their order.
        cls.clear(container)
        refill(container, new)
    return not same


def _replace_in_cell(cell: CellType, replacement_of: _ModuleReplacer) -> bool:
    try:
        old = cell.cell_contents
    except ValueError:  # A variable that is not assigned yet.
        return False
    new = replacement_of(old)
    if new is not old:
        cell.cell_contents = new
    return new is not old
