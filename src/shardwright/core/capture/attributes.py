"""Plain attributes of modules, and global variables, while a model is traced: which `forward`
reads, and which it changes.

What `forward` reads is part of what was captured. What it changes would change once, at capture.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.core.capture.argument_containers import ArgumentContainers
from shardwright.core.capture.filled_modules import RegisteredTensors
from shardwright.core.capture.global_variables import GLOBALS, globals_of, globals_read
from shardwright.core.capture.hooks import count_hooks
from shardwright.core.capture.known_values import KnownValues
from shardwright.core.capture.naming import LocatedError, current_line, located
from shardwright.core.capture.reachable_state import Change, ReachableState, StateLocation
from shardwright.core.capture.state_contents import OF_TORCH, contents_of
from shardwright.core.torch_internals.dispatch import without_dispatch_modes, without_torch_function
from shardwright.core.torch_internals.hooks import forward_hooks
from shardwright.core.torch_internals.modules import own_buffers
from shardwright.core.torch_internals.tensors import storage_id, version
from shardwright.errors import CaptureError

MISSING = "<no such attribute>"
"""What is read of an attribute that a module does not have, as by `getattr` with a default."""

SET = "<set by forward>"
"""The text of an attribute that `forward` sets before it reads it."""

HOOKS = "forward hooks"
"""The name of an entry that counts the forward hooks of a module."""

CLASSES = "classes of submodules"
"""The name of the entry that tells a model from one that is put together of other modules."""

OF_MODULES = frozenset((HOOKS, CLASSES))

BUFFERS = "buffers of "
"""Where a buffer stands whose values were read: this and the path of its module."""

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_CONTAINERS = (list, tuple, dict, set, deque)
_DEEPEST = 4
_PLAIN = (int, float, complex, str, bytes, type(None))


def content(value: Any) -> Hashable:
    """What a captured program depends on of an attribute: equal if nothing has changed."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, nn.Parameter):
        return "parameter", id(value)
    if isinstance(value, Tensor):
        return "tensor", id(value), version(value), storage_id(value)
    if isinstance(value, np.ndarray):
        return "array", id(value), value.tobytes()
    if isinstance(value, _GENERATORS):
        return type(value).__name__, id(value), pickle.dumps(value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(content, value)
    if isinstance(value, dict):
        return "dict", *((content(key), content(part)) for key, part in value.items())
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(content, value))
    if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        inner = vars(value).items()
        return "object", id(value), *((name, _shallow(part)) for name, part in inner)
    return type(value).__name__, id(value)


def _only_completed(before: Any, after: Any) -> bool:
    """Whether an object got texts or numbers where it had None, as configurations of `transformers`
    get their `problem_type` in the first call."""
    kinds = {kind.__name__ for kind in _PLAIN}
    return (
        before is not None
        and before[:2] == after[:2]
        and before[0] == "object"
        and [name for name, _ in before[2:]] == [name for name, _ in after[2:]]
        and all(
            old == new or (old == content(None) and new[0] in kinds)
            for (_, old), (_, new) in zip(before[2:], after[2:], strict=True)
        )
    )


def _only_added(before: Any, after: Any) -> bool:
    """Whether a dictionary has only gained entries, like a cache."""
    kinds = {each[0] for each in (before, after) if each is not None}
    return kinds == {"dict"} and set(before[1:]) <= set(after[1:])


def variables_at(modules: Mapping[str, nn.Module], path: str) -> dict[str, Any]:
    """The attributes of a module's own, its buffers, or the variables of a file."""
    if path.startswith(GLOBALS):
        return globals_of(path)
    if path.startswith(BUFFERS):
        bearer = modules.get(path.removeprefix(BUFFERS))
        held: dict[str, Any] = {} if bearer is None else own_buffers(bearer)
        return held
    return vars(modules[path])


def variable(modules: Mapping[str, nn.Module], path: str, name: str) -> Any:
    """The value of an attribute or a global variable; of an attribute that only the class has, if
    it is a number or a text; else `MISSING`."""
    own = variables_at(modules, path)
    if name in own or path.startswith((GLOBALS, BUFFERS)):
        return own.get(name, MISSING)
    of_class = getattr(type(modules[path]), name, MISSING)
    return of_class if isinstance(of_class, (*_PLAIN, tuple)) else MISSING


def plain_text(value: Any) -> str:
    """A number, a text, None, or a tuple of them as text, `""` for anything else."""
    parts = value if isinstance(value, tuple) else (value,)
    return repr(value) if all(isinstance(part, _PLAIN) for part in parts) else ""


def state_text(path: str, value: Any) -> str:
    """The same, and of a buffer a hash of its values."""
    if not path.startswith(BUFFERS) or type(value) is not Tensor or value.is_meta:
        return plain_text(value)
    held = value.detach().cpu().contiguous()
    digest = hashlib.sha256(held.flatten().view(torch.uint8).numpy().tobytes())
    return f"{held.dtype} {tuple(held.shape)} {digest.hexdigest()[:16]}"


def attribute_texts(
    module: nn.Module, read: Iterable[tuple[str, str]], written: Iterable[tuple[str, str]] = ()
) -> tuple[tuple[str, str, str], ...]:
    """Path, name and value as text of attributes and global variables that `forward` reads or sets,
    of each module that has forward hooks their number, and a hash of the classes of all."""
    modules = dict(module.named_modules())
    classes = "\n".join(f"{path} {_class_text(child)}" for path, child in modules.items())
    hooks = (
        (path, HOOKS, str(sum(map(len, forward_hooks(child)))))
        for path, child in modules.items()
        if any(forward_hooks(child))
    )
    attributes = (
        (
            path,
            name,
            state_text(path, variable(modules, path, name)),
        )
        for path, name in read
        if path in modules or path.startswith((GLOBALS, BUFFERS))
    )
    structure = ("", CLASSES, hashlib.sha256(classes.encode()).hexdigest()[:16])
    return (*attributes, *((*place, SET) for place in written), *hooks, structure)


def _class_text(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def has_attributes(module: nn.Module, known: tuple[tuple[str, str, str], ...]) -> bool:
    """Whether a module still has the attributes and hooks that were captured."""
    read = [(path, name) for path, name, text in known if name not in OF_MODULES and text != SET]
    written = [(path, name) for path, name, text in known if text == SET]
    return attribute_texts(module, read, written) == known


def _shallow(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(_shallow, value)
    plain = isinstance(value, (*_PLAIN, Tensor, np.ndarray))
    return content(value) if plain else ("object", id(value))


_REMEDY = (
    "Register it as a buffer (`register_buffer`) and change that in place (`copy_`), or change it "
    "in the training loop; what is made once of shapes alone, such as a mask, is there if the model"
    " was called before `plan`, with the longest input"
)


class _UnchangedError(Exception):
    """Ends a second trace whose graph need not equal that of the first."""


class TracedAttributes:
    """The plain attributes of a module and its submodules while `forward` is traced, and what else
    it can reach.

    Args:
        reads, writes: path and name of those that were read before they were set, and of others
            that were set.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._by_path = dict(module.named_modules())
        self._before = {path: _contents(child) for path, child in self._by_path.items()}
        self._at_begin: dict[str, dict[str, Any]] = {}
        self._arguments = ArgumentContainers((), {})
        self._hooks: dict[str, int] = {}
        self._lines: dict[tuple[str, str], str] = {}
        self._reachable = self._at_first = ReachableState(module)
        self._filled: list[Change] = []
        self._read_as_dict: dict[str, None] = {}
        self._is_second = False
        self.writes: dict[tuple[str, str], None] = {}
        self.reads: dict[tuple[str, str], None] = dict.fromkeys(globals_read(module))
        for path, name in self.reads:
            self._before.setdefault(path, {})[name] = content(globals_of(path)[name])

    @contextmanager
    def recording(self, known: KnownValues) -> Iterator[None]:
        """A context in which attributes of all modules are watched.

        Raises:
            CaptureError: if `forward` reads an attribute and changes it for the next call, or
                changes anything else that a captured model would not.
        """
        set_attribute = nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            path = self._paths.get(id(module))
            if path is not None and name == "__dict__" and _is_user_code(sys._getframe(1)):
                self._read_as_dict[path] = None
                names = vars(module).keys() - OF_TORCH
                unset = ((path, each) for each in sorted(names) if (path, each) not in self.writes)
                self.reads.update(dict.fromkeys(unset))
            if path is not None and name not in OF_TORCH and (path, name) not in self.writes:
                own = object.__getattribute__(module, "__dict__")
                if name in own or not (name.startswith("__") or self._is_known(module, name)):
                    self.reads[path, name] = None
            return object.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            path = self._paths.get(id(module))
            set_attribute(module, name, value)
            if path is not None and name in vars(module) and name not in OF_TORCH:
                if path in self._read_as_dict and (path, name) not in self.writes:
                    self.reads[path, name] = None
                if (path, name) not in self.reads:
                    self.writes[path, name] = None
                elif content(value) != self._before[path].get(name):
                    self._lines.setdefault((path, name), current_line())

        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
        registered = RegisteredTensors(self._by_path, self._codes)
        root = self._by_path[""]

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._at_begin = {path: dict(vars(child)) for path, child in self._by_path.items()}
            self._arguments = ArgumentContainers(args, kwargs)
            self._hooks = self._count_hooks()
            registered.begin()

        # What is changed in place is seen before `torch.export` undoes it.
        handles = (
            root.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            root.register_forward_hook(lambda _, args, result: registered.update(result)),
            root.register_forward_hook(lambda *_: self._check_unchanged(known)),
            root.register_forward_hook(lambda *_: self._check_arguments_and_hooks()),
            root.register_forward_hook(lambda *_: self._check_reachable(known)),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A context that undoes what a trace that raises has changed outside of the copy."""
        try:
            yield
        except BaseException:
            self._at_first.restore()
            raise

    def check_settled(
        self,
        traced: torch.export.ExportedProgram,
        trace_again: Callable[[], torch.export.ExportedProgram],
    ) -> None:
        """Traces once more if the first trace has added something to what `forward` can reach.

        Raises:
            CaptureError: if that is no cache, which the second trace only reads, and with which it
                calls the same operators.
        """
        if not self._filled:
            return
        self._is_second, self._reachable = True, ReachableState(self._module)
        try:
            again = trace_again()
        except _UnchangedError:
            return
        except CaptureError:
            raise
        except Exception as error:
            raise self._changed_state(self._filled[0]) from error
        if again.graph_module.code != traced.graph_module.code:
            raise self._changed_state(self._filled[0])

    def _check_unchanged(self, known: KnownValues) -> None:
        for path, name in self.reads:
            own = variables_at(self._by_path, path)
            if name in own:
                before, after = self._before[path].get(name), content(own[name])
                if before == after or _only_completed(before, after):
                    continue
                is_cache = path.startswith(GLOBALS) and _only_added(before, after)
                if self._is_second or not is_cache or _has_unknown(own[name], known):
                    raise self._changed(path, name)
                kind = f"global variable {{}} of {path.removeprefix(GLOBALS)}"
                self._filled.append(Change(StateLocation(kind, name), own[name], adds=True))
                self._before[path][name] = after
        for path, before_call in self._at_begin.items():
            attributes = vars(self._by_path[path])
            self._note_added(path, attributes.keys() - before_call.keys() - OF_TORCH, known)
            for name in before_call.keys() - OF_TORCH:
                value = attributes.get(name, MISSING)
                if value is before_call[name] or before_call[name] is None:
                    continue
                unseen = (path, name) not in self.reads and (path, name) not in self.writes
                if name not in attributes or (
                    unseen and content(value) != self._before[path].get(name)
                ):
                    raise self._changed(path, name)

    def _note_added(self, path: str, names: Iterable[str], known: KnownValues) -> None:
        """Record new attributes that were set through `__dict__`, as by `cached_property`."""
        for name in sorted(names):
            if (path, name) in self.writes or (path, name) in self.reads:
                continue
            value = vars(self._by_path[path])[name]
            if self._is_second or _has_unknown(value, known):
                raise self._changed(path, name)
            kind = f"attribute {{}} of a {type(self._by_path[path]).__name__}"
            place = StateLocation(kind, path).inside(name, indexed=False)
            self._filled.append(Change(place, value, adds=True))
            self._before[path][name] = content(value)

    def _check_arguments_and_hooks(self) -> None:
        if refusal := self._arguments.refusal(self._codes):
            raise refusal
        for path, number in self._count_hooks().items():
            if number != self._hooks[path]:
                raise located(
                    self._codes,
                    path,
                    f"`forward` registers a hook on {f'module {path!r}' if path else 'the model'}, "
                    "which a captured model would not do in each call: do it before `plan`",
                )

    def _count_hooks(self) -> dict[str, int]:
        return {path: count_hooks(child) for path, child in self._by_path.items()}

    def _check_reachable(self, known: KnownValues) -> None:
        def equal(one: Tensor, other: Tensor) -> bool:
            return _equal(known.value_of(one), known.value_of(other))

        for change in self._reachable.changes(equal):
            if self._is_second or not change.adds or _has_unknown(change.value, known):
                raise self._changed_state(change)
            self._filled.append(change)
        # Of a tensor that the first trace has computed and kept, the second reads the values.
        if self._is_second and any(True for change in self._filled for _ in _tensors(change.value)):
            raise _UnchangedError

    def _changed_state(self, change: Change) -> CaptureError:
        return located(self._codes, change.place.path, _refusal(f"{change.place}"))

    def _changed(self, path: str, name: str) -> CaptureError:
        if path.startswith(GLOBALS):
            what = f"global variable {name!r} of {path.removeprefix(GLOBALS)}"
        else:
            where = f"{path}.{name}" if path else name
            what = f"attribute {where!r} of a {type(self._by_path[path]).__name__}"
        if line := self._lines.get((path, name)):
            return LocatedError(f"{line}: {_refusal(what)}")
        return located(self._codes, name, _refusal(what))

    @property
    def _codes(self) -> Iterable[CodeType]:
        return self._reachable.codes

    @staticmethod
    def _is_known(module: nn.Module, name: str) -> bool:
        """Whether it is a method, a property, a parameter, a buffer or a submodule."""
        if not isinstance(getattr(type(module), name, ""), (*_PLAIN, tuple)):
            return True
        tensors = (vars(module)[kind] for kind in ("_parameters", "_buffers", "_modules"))
        return any(name in named for named in tensors)


def _refusal(what: str) -> str:
    return (
        f"`forward` changes the {what} for the next call, and a captured model would not: its "
        f"Python runs once, on the rank that captures. {_REMEDY}"
    )


def _contents(module: nn.Module) -> dict[str, Hashable]:
    return {name: content(value) for name, value in vars(module).items() if name not in OF_TORCH}


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two known values are equal."""
    if one is None or other is None or one.dtype != other.dtype:
        return False
    with without_dispatch_modes(), without_torch_function():
        return torch.equal(one, other)


def _is_user_code(frame: FrameType) -> bool:
    return not str(frame.f_globals.get("__name__")).startswith(("torch.", "shardwright."))


def _has_unknown(value: Any, known: KnownValues) -> bool:
    """Whether an object holds a tensor whose values depend on inputs or parameters."""
    return any(known.value_of(tensor) is None for tensor in _tensors(value))


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors that an object holds, also in what is inside of it."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, _CONTAINERS):
        for part in contents_of(value).values():
            yield from _tensors(part, depth + 1)
