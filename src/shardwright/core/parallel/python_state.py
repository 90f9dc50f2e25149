"""Watch the Python state that a captured program depends on: attributes, global variables, training
modes, hooks and submodules.

Each call first checks cheaply whether anything has changed, and only then compares in detail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from operator import call, contains, is_, itemgetter, methodcaller
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardwright.core.capture.attributes import (
    BUFFERS,
    MISSING,
    NUMBERS,
    OF_MODULES,
    SET,
    content,
    numbers_of,
    plain_text,
    state_text,
    variable,
    variables_at,
)
from shardwright.core.capture.global_variables import GLOBALS
from shardwright.core.misuse.calls_of_parts import explains_calls
from shardwright.core.parallel.class_members import READ_AS_DICT, ClassMembers
from shardwright.core.parallel.template_copies import replace_references_by_copies
from shardwright.core.parallel.unavailable import Unavailable
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.hooks import (
    HooksOfModules,
    backward_hooks,
    forward_hooks,
    has_global_hook,
    num_registered_hooks,
)
from shardwright.core.torch_internals.modules import own_buffers, own_modules
from shardwright.errors import PlanError

Attributes = Iterable[tuple[str, str, str]]
"""(Module path, attribute name, content as text) of each attribute, as in `Graph.attributes`."""


@dataclass(frozen=True, eq=False)
class StateKey:
    """Key of a Python state, compared by identity, since comparing its contents is slow.

    Args:
        contents: fingerprints of the watched attributes.
        number: number of distinct states that the module had before.
    """

    contents: tuple[str, ...]
    number: int


class SetByForward(Unavailable):
    """Placeholder of an attribute that `forward` sets; every use raises a `PlanError`."""

    def __init__(self, path: str, name: str) -> None:
        attribute = f"{path}.{name}".removeprefix(".")
        super().__init__(
            PlanError(
                f"attribute {attribute!r} is set by `forward`, but this program of the model runs"
                " operators only\n"
                "plan with stages=1 and loss_reduction='mean', or return its value from `forward`"
            )
        )


class PythonState:
    """The Python state of a module, which users may change between steps.

    Args:
        module: the planned module.
        attributes: attributes that `forward` reads or sets. Attributes that `forward` sets are
            replaced by `SetByForward`, as only the captured call had their values.
        hooks: the forward hooks of the user's model, in the dictionaries from which
            `RemovableHandle.remove()` deletes them.

    Attributes:
        changed_buffers: names of watched buffers whose values differ from those at first capture.
    """

    changed_buffers: list[str]

    def __init__(self, module: nn.Module, attributes: Attributes, hooks: HooksOfModules) -> None:
        self._by_path = dict(module.named_modules())
        self._captured_hooks = [
            (path, position, of_model, forward_hooks(self._by_path[path])[position])
            for path, flags in hooks.items()
            for position, of_model in enumerate(flags)
            if of_model
        ]
        self._record_planned_submodules()
        self._names: dict[tuple[str, str], str] = {}
        self._left_to_guards: frozenset[str] = frozenset()
        self._keys: dict[Hashable, StateKey] = {}
        # Objects whose id is part of a key; kept alive, so that no other object gets the same id.
        self._referenced_values: dict[int, Any] = {}
        self._planned_hooks = {
            path: tuple(map(frozenset, forward_hooks(child)))
            for path, child in self._by_path.items()
        }
        self._num_backward_hooks = self._count_backward_hooks()
        self._members = ClassMembers(self._by_path)
        self.watch(attributes)

    def of_copy(self, module: nn.Module, hooked_module: nn.Module) -> PythonState:
        """Return the Python state of a copy of the module; equal states of both have the same key.

        Args:
            module: a deep copy of the planned module.
            hooked_module: the copied module that has the root module's captured forward hooks.
        """
        result = copy(self)
        result._by_path = dict(module.named_modules())
        result._captured_hooks = [
            (
                path,
                position,
                # A copy: a handle of the user removes its hook from the original model only.
                dict(of_model),
                forward_hooks(result._by_path[path] if path else hooked_module)[position],
            )
            for path, position, of_model, _ in self._captured_hooks
        ]
        result._record_planned_submodules()
        result._members = self._members.of_copy(result._by_path)
        result._names, result._keys = dict(self._names), dict(self._keys)
        result._referenced_values = dict(self._referenced_values)
        result._record_python_state()
        return result

    def _record_planned_submodules(self) -> None:
        self._children = {
            path: children
            for path, child in self._by_path.items()
            # Only modules with children, whose dicts are compared in each call.
            if (children := own_modules(child))
        }
        self._parents = list(self._children.values())
        self._submodules = [vars(child) for path, child in self._by_path.items() if path]
        self._forwards = list(map(_forward_of, self._submodules))
        self._planned_children = list(map(dict, self._parents))

    def watch(self, attributes: Attributes) -> None:
        """Watch further attributes, which a later capture reads or sets."""
        for path, name, captured in attributes:
            # Fingerprints of all hooks and classes, which `key` compares module by module instead.
            if name in OF_MODULES:
                continue
            if captured == SET:
                self._by_path[path].__dict__[name] = SetByForward(path, name)
            else:
                self._names[path, name] = captured
        self._record_python_state()

    def key(self) -> StateKey:
        """Return the key of the current Python state: one object for equal states.

        Keys of ranks with equal states have equal contents.

        Raises:
            PlanError: for a hook or submodule that was added or replaced since capture.
        """
        # Modules compare by identity, so this is one pass over dicts of pointers.
        if self._parents != self._planned_children:
            self._refuse_replaced_submodules()
        if list(map(_forward_of, self._submodules)) != self._forwards:
            self._refuse_replaced_forwards()
        # The number of all hooks registered in the process: as long as it is equal, no hook is new.
        if num_registered_hooks() != self._registered:
            self._check_no_uncallable_hooks_added()
            self._record_python_state()
        elif not self._is_state_unchanged():
            self._record_python_state()
        return self._key

    def forget_removed_hooks(self) -> None:
        """Remove captured hooks whose handles the user has removed."""
        for path, position, of_model, hooks in self._captured_hooks:
            for number in self._planned_hooks[path][position] - of_model.keys():
                hooks.pop(number, None)

    @property
    def modules_with_added_hooks(self) -> Sequence[nn.Module]:
        """The submodules on which forward hooks were registered after planning."""
        return [self._by_path[path] for path in self._added_hooks]

    def _find_added_hooks(self) -> dict[str, tuple[int, ...]]:
        """Return the numbers of pre-forward and forward hooks that were registered after planning,
        by path of the submodule.

        Hooks of the root module run around the program.
        """
        # Hooks are numbered over the whole process, so the numbers distinguish new hooks from
        # planned ones.
        added = {
            path: tuple(
                len(hooks.keys() - planned) for hooks, planned in zip(now, before, strict=True)
            )
            for path, before in self._planned_hooks.items()
            if path and any(now := forward_hooks(self._by_path[path]))
        }
        return {path: counts for path, counts in added.items() if any(counts)}

    def copy_to(self, template: nn.Module) -> None:
        """Copy attributes, training modes and buffers to `template` before a capture.

        Hooks whose handles the user has removed are removed from `template` too.
        """
        copies = dict(template.named_modules())
        memo = self._map_ids_to_template_copies(template)
        of_modules = (p for p in self._names if not p[0].startswith((GLOBALS, BUFFERS)))
        for path, name in of_modules:
            attributes, other = self._by_path[path].__dict__, copies[path].__dict__
            if name not in attributes:
                # The user has deleted it since planning.
                other.pop(name, None)
            # The template has parameters of its own, on the meta device.
            elif not any(isinstance(x, nn.Parameter) for x in pytree.tree_leaves(attributes[name])):
                other[name] = replace_references_by_copies(attributes[name], memo)
        for path, position, of_model, hooks in self._captured_hooks:
            hooks_of_copy = forward_hooks(copies[path])[position]
            # Either the user's handle or `forget_removed_hooks` has removed it.
            for number in hooks_of_copy.keys() - (of_model.keys() & hooks.keys()):
                del hooks_of_copy[number]
        for path, child in copies.items():
            child.training = self._by_path[path].training
            buffers = own_buffers(self._by_path[path])
            # Shapes and branches may depend on their values.
            own_buffers(child).update({n: b for n, b in buffers.items() if b is not None})

    def numbers(self) -> dict[str, float]:
        """Return the Python numbers in watched attributes, and in containers and objects that are
        attributes, by name."""
        watched = (p for p in self._names if not p[0].startswith(BUFFERS))
        values = (numbers_of(variable(self._by_path, *p), attribute_name(*p)) for p in watched)
        return dict(chain.from_iterable(values))

    def leave_to_guards(self, names: Collection[str]) -> None:
        """Exclude numbers from the key, as the guards of programs compare them.

        Args:
            names: names of numbers, as `numbers` returns them; all others are in the key again.
        """
        self._left_to_guards = frozenset(names)
        self._record_python_state()

    def _map_ids_to_template_copies(self, template: nn.Module) -> dict[int, Any]:
        """Return the modules and parameters of `template`, by the `id()` of the corresponding
        modules and parameters of the planned model."""
        model, result = self._by_path[""], dict[int, Any]()
        for planned, copies in (
            (model.named_modules(), dict(template.named_modules())),
            (model.named_parameters(), dict(template.named_parameters())),
        ):
            result |= {id(original): copies[name] for name, original in planned if name in copies}
        return result

    def _refuse_replaced_submodules(self) -> None:
        for (path, children), planned in zip(
            self._children.items(), self._planned_children, strict=True
        ):
            if children != planned:
                raise PlanError(
                    f"a submodule of {_describe_module_path(path)} was replaced after planning,"
                    " which would have no effect\nreplace it before `plan`"
                )

    def _refuse_replaced_forwards(self) -> None:
        """Raise an error if the user has set `forward` on a submodule."""
        # Without the root, whose `forward` is that of the planned class; in the order of
        # `_submodules`.
        paths = [path for path in self._by_path if path]
        for path, submodule, planned in zip(paths, self._submodules, self._forwards, strict=True):
            now = _forward_of(submodule)
            if now != planned and not (now is None or explains_calls(now)):
                raise PlanError(
                    f"`forward` of {_describe_module_path(path)} was replaced after planning,"
                    " which would have no effect\nreplace it before `plan`"
                )
        self._forwards = list(map(_forward_of, self._submodules))

    def _record_python_state(self) -> None:
        """Record the current Python state, and the data with which a call detects changes.

        Most steps find no change, so the loops over all modules run in C (`map`, `itemgetter`).
        """
        self._registered = num_registered_hooks()
        by_module: dict[str, list[str]] = {}
        objects: dict[int, tuple[Any, str, frozenset[str]]] = {}
        of_class: dict[tuple[type, str], Any] = {}
        self._missing: tuple[list[dict[str, Any]], list[str]] = ([], [])
        read_as_dict = [path for path, name in self._names if name == READ_AS_DICT]
        new_names, replaced = self._members.update(read_as_dict)
        self._names.update(dict.fromkeys(new_names, MISSING))
        seen: list[Hashable] = [*replaced.items()]
        contents = [f"{name} is replaced" for name in replaced]
        self.changed_buffers = []
        for (path, name), captured in self._names.items():
            value, names = variable(self._by_path, path, name), variables_at(self._by_path, path)
            full_name = attribute_name(path, name)
            omitted = frozenset(n for n in self._left_to_guards if n.startswith(full_name))
            if full_name in omitted and type(value) in NUMBERS:
                continue
            of_buffer = path.startswith(BUFFERS)
            # A buffer is None here if another pipeline stage owns it.
            content_text = captured if of_buffer and value is None else state_text(path, value)
            of_object = None if of_buffer else content(value, full_name, omitted)
            # Ranks compare texts; this rank also distinguishes objects with equal texts.
            seen.append((path, name, content_text if of_buffer else of_object))
            contents.append(content_text)
            if of_buffer and content_text != captured:
                self.changed_buffers.append(f"{path.removeprefix(BUFFERS)}.{name}".lstrip("."))
            is_plain = bool(plain_text(value))
            if not is_plain and not of_buffer:
                self._referenced_values[id(value)] = value
            if name not in names:
                self._missing[0].append(names)
                self._missing[1].append(name)
                # Not on the instance, so perhaps in its class, where a later assignment changes it.
                of_class[type(self._by_path.get(path)), name] = value
                continue
            by_module.setdefault(path, []).append(name)
            if not is_plain and not isinstance(value, nn.Module):
                objects[id(value)] = value, full_name, omitted
        self._watched_hooks = [hooks for _, _, *pair in self._captured_hooks for hooks in pair]
        self._added_hooks = self._find_added_hooks()
        for module in self.modules_with_added_hooks:
            self._watched_hooks += forward_hooks(module)
        self._watched_hook_counts = list(map(len, self._watched_hooks))
        contents += [f"{path}: {counts} hooks" for path, counts in self._added_hooks.items()]
        for path, position, of_model, hooks in self._captured_hooks:
            seen.append((path, position, tuple(number for number in hooks if number in of_model)))
        key = StateKey(tuple(contents), len(self._keys))
        # A state that has occurred before gets its old key, and so its programs.
        self._key = self._keys.setdefault((key.contents, *seen), key)
        # The first name is read twice, as an `itemgetter` of one name returns no tuple.
        self._readers = [itemgetter(*names, names[0]) for names in by_module.values()]
        self._owners = [variables_at(self._by_path, path) for path in by_module]
        self._values = list(self._read_watched_attributes())
        self._change_checks = [_make_content_check(*each) for each in objects.values()]
        self._change_checks += [
            _make_class_attribute_check(*key, value) for key, value in of_class.items()
        ]

    def _read_watched_attributes(self) -> Iterable[Any]:
        return chain.from_iterable(map(call, self._readers, self._owners))

    def _is_state_unchanged(self) -> bool:
        if list(map(len, self._watched_hooks)) != self._watched_hook_counts:
            return False
        try:
            # By identity: 1 == 1.0 == True, but each needs its own program.
            if not all(map(is_, self._read_watched_attributes(), self._values)):
                return False
            # A name that was looked up in the class now exists on the instance.
            if any(map(contains, *self._missing)):
                return False
            if self._members.have_changed():
                return False
            return all(unchanged() for unchanged in self._change_checks)
        except (
            KeyError,
            RuntimeError,
            ValueError,
        ):  # Deleted, or a tensor or array that `==` cannot compare.
            return False

    def _count_backward_hooks(self) -> dict[str, int]:
        """Return the number of backward hooks of each submodule, by path."""
        return {
            path: sum(map(len, backward_hooks(child)))
            for path, child in self._by_path.items()
            if path
        }

    def _check_no_uncallable_hooks_added(self) -> None:
        """Check that no backward hook was registered on a submodule after planning, and no hook for
        all modules.

        Raises:
            PlanError: if a hook was registered that programs cannot call.
        """
        if has_global_hook():
            raise PlanError(
                "a global module hook is registered, which a planned model would not run\nremove "
                "it, or register the hook on the model before `plan`"
            )
        for path, count in self._count_backward_hooks().items():
            if count > self._num_backward_hooks[path]:
                raise PlanError(
                    f"a backward hook was registered on {_describe_module_path(path)} after "
                    "planning, which would have no effect\nregister it on the module that "
                    "`parallelize` returned, or on its parameters"
                )


def _make_class_attribute_check(owner: type, name: str, initial_value: Any) -> Callable[[], bool]:
    """Return a function that checks whether attribute `name` of class `owner` is unchanged.

    Changes are detected for numbers, strings and `MISSING`.
    """
    # `MISSING` also stands for methods and properties, which are not watched here.
    if initial_value is MISSING:
        return lambda: True
    # By identity: 1 == 1.0 == True, but each needs its own program.
    return lambda: getattr(owner, name, MISSING) is initial_value


def _make_content_check(value: Any, name: str, omitted: frozenset[str]) -> Callable[[], bool]:
    arrays = (Tensor, np.ndarray)
    inside = vars(value).values() if hasattr(value, "__dict__") else ()
    # Only without arrays: their `==` is elementwise, so `content` compares them below.
    without_arrays = not isinstance(value, arrays) and not any(
        isinstance(x, arrays) for x in inside
    )
    if inside and without_arrays and not omitted:
        copies = {
            name: attribute.copy() if isinstance(attribute, (list, dict, set)) else attribute
            for name, attribute in vars(value).items()
        }
        return lambda: vars(value) == copies
    before = content(value, name, omitted)
    return lambda: content(value, name, omitted) == before


_forward_of: Callable[[Mapping[str, Any]], Any] = methodcaller("get", "forward")
"""Return the `forward` set on a module instance, given the instance's attributes; None if no
`forward` is set."""


def attribute_name(path: str, name: str) -> str:
    """Return the name of an attribute or global variable in messages, and in `PythonState.numbers`:
    `self.scale`, as an argument may be called `scale` too."""
    owner = path if path.startswith(GLOBALS) else f"self.{path}".rstrip(".")
    return f"{owner}.{name}"


def _describe_module_path(path: str) -> str:
    return f"module {path!r}" if path else "the model"
