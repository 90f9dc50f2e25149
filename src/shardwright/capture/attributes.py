"""Plain attributes of modules, and global variables, while a model is traced: which `forward`
reads, and which it changes.

What `forward` reads is part of what was captured. What it changes would change once, at capture.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.capture.filled_modules import RegisteredTensors
from shardwright.capture.global_variables import GLOBALS, globals_of, globals_read
from shardwright.errors import CaptureError
from shardwright.torch_internals.hooks import forward_hooks
from shardwright.torch_internals.modules import own_buffers
from shardwright.torch_internals.tensors import storage_id, version

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

_OWN = {
    *(vars(nn.Module()) | vars(nn.Module)).keys() - {"training"},
    *("_flat_weights", "_flat_weight_refs", "_output_capturing_hooks_installed"),
}
"""What modules, recurrent ones and models of `transformers` keep for themselves: the last install
hooks in the first call that asks for outputs of submodules, such as the logits of routers."""
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
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


class TracedAttributes:
    """The plain attributes of a module and its submodules while `forward` is traced.

    Args:
        reads, writes: path and name of those that were read before they were set, and of others
            that were set.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._by_path = dict(module.named_modules())
        self._before = {path: _contents(child) for path, child in self._by_path.items()}
        self.writes: dict[tuple[str, str], None] = {}
        self.reads: dict[tuple[str, str], None] = dict.fromkeys(globals_read(module))
        for path, name in self.reads:
            self._before.setdefault(path, {})[name] = content(globals_of(path)[name])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which attributes of all modules are watched.

        Raises:
            CaptureError: if `forward` reads an attribute and changes it for the next call.
        """
        set_attribute = nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            path = self._paths.get(id(module))
            if path is not None and name not in _OWN and (path, name) not in self.writes:
                own = object.__getattribute__(module, "__dict__")
                if name in own or not (name.startswith("__") or self._is_known(module, name)):
                    self.reads[path, name] = None
            return object.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            path = self._paths.get(id(module))
            set_attribute(module, name, value)
            if path is not None and name in vars(module) and name not in _OWN:
                if (path, name) not in self.reads:
                    self.writes[path, name] = None
                elif content(value) != self._before[path].get(name):
                    raise self._changed(path, name)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
        registered = RegisteredTensors(self._by_path)
        root = self._by_path[""]
        # What is changed in place is seen before `torch.export` undoes it.
        handles = (
            root.register_forward_pre_hook(lambda *_: registered.begin(), prepend=True),
            root.register_forward_hook(lambda *_: registered.check()),
            root.register_forward_hook(lambda *_: self._check_unchanged()),
        )
        try:
            yield
        finally:
            registered.end()
            for handle in handles:
                handle.remove()
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]

    def _check_unchanged(self) -> None:
        for path, name in self.reads:
            own = variables_at(self._by_path, path)
            if name in own:
                before, after = self._before[path].get(name), content(own[name])
                if before != after and not _only_completed(before, after):
                    raise self._changed(path, name)

    def _changed(self, path: str, name: str) -> CaptureError:
        if path.startswith(GLOBALS):
            what = f"global variable {name!r} of {path.removeprefix(GLOBALS)}"
        else:
            where = f"{path}.{name}" if path else name
            what = f"attribute {where!r} of a {type(self._by_path[path]).__name__}"
        return CaptureError(
            f"`forward` changes the {what}, which the next call reads: a captured model would keep "
            "its first value. Register it as a buffer (`register_buffer`) and change that in place,"
            " or set it between steps; what is made once of shapes alone, such as a mask, is there "
            "if the model was called before `plan`, with the longest input"
        )

    @staticmethod
    def _is_known(module: nn.Module, name: str) -> bool:
        """Whether it is a method, a property, a parameter, a buffer or a submodule."""
        if not isinstance(getattr(type(module), name, ""), (*_PLAIN, tuple)):
            return True
        tensors = (vars(module)[kind] for kind in ("_parameters", "_buffers", "_modules"))
        return any(name in named for named in tensors)


def _contents(module: nn.Module) -> dict[str, Hashable]:
    return {name: content(value) for name, value in vars(module).items() if name not in _OWN}
