"""Parameters, buffers and submodules that `forward` makes, as modules do that wait for their first
call: a captured model would make them anew in each call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.capture.naming import located
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.modules import (
    drop_buffer_assignments_of_export,
    own_buffers,
    own_modules,
    own_parameters,
)
from shardwright.core.torch_internals.tensors import storage_id
from shardwright.errors import CaptureError

ONCE = "make it in `__init__`, or call the model once, with the longest input, before `plan`"
Registered = dict[str, dict[str, object]]
"""What a module holds under which name, by its kind."""


class RegisteredTensors:
    """What modules hold when `forward` begins, and when it ends.

    A buffer that `forward` assigns is updated: its new values are copied into the tensor that was
    there, as if `forward` had called `copy_` at its end.

    Args:
        modules: by path.
        codes: of the functions that may run, for the lines of errors.
    """

    def __init__(self, modules: Mapping[str, nn.Module], codes: Iterable[CodeType] = ()) -> None:
        self._codes = codes
        self._by_path = dict(modules)
        self._before: dict[str, Registered] = {}
        self._names: dict[int, list[str]] = {}
        for path, module in modules.items():
            for name, buffer in own_buffers(module).items():
                self._names.setdefault(id(buffer), []).append(_join(path, name))

    def begin(self) -> None:
        """Takes what the modules hold as it is."""
        drop_buffer_assignments_of_export()
        self._before = {path: _registered(module) for path, module in self._by_path.items()}
        self._trained = [
            (_join(path, name), parameter, parameter.requires_grad)
            for path, held in self._before.items()
            for name, parameter in held["parameter"].items()
            if isinstance(parameter, Tensor)
        ]
        self._shared = {name: names for names in self._names.values() for name in names}

    def update(self, result: Any) -> Any:
        """Updates the buffers that `forward` has assigned.

        Args:
            result: what `forward` returns.

        Returns:
            The same; a tensor of it that is what a buffer was before is copied first.

        Raises:
            CaptureError: if another module, parameter or a buffer of another shape is registered
                now, or if two names have one tensor now, or had one before.
        """
        assigned: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        for path, module in self._by_path.items():
            for kind, now in _registered(module).items():
                before = self._before[path][kind]
                for name in {**before, **now}:
                    old, new = before.get(name), now.get(name)
                    if new is not old:
                        assigned[path, name] = self._checked(kind, _join(path, name), old, new)
        for name, parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                raise self._refused(
                    name,
                    f"`forward` sets `requires_grad` of the parameter {name!r}, which a captured "
                    "model would not do in later steps: set it before `plan`, or use `detach()`",
                )
        return self._copied(assigned, result) if assigned else result

    def _copied(
        self, assigned: Mapping[tuple[str, str], tuple[Tensor, Tensor]], result: Any
    ) -> Any:
        self._check_one_name_each(assigned)
        replaced = {storage_id(old) for old, _ in assigned.values()}
        with torch.no_grad():
            # Before any is changed, as one may be computed from, or be, what another was.
            new = {key: value.detach().clone() for key, (_, value) in assigned.items()}
            result = pytree.tree_map_only(
                Tensor, lambda t: t.clone() if storage_id(t) in replaced else t, result
            )
            for (path, name), (old, _) in assigned.items():
                own_buffers(self._by_path[path])[name] = old.copy_(new[path, name])
        return result

    def _check_one_name_each(
        self, assigned: Mapping[tuple[str, str], tuple[Tensor, Tensor]]
    ) -> None:
        memory: dict[int, str] = {}
        for path, module in self._by_path.items():
            for kind in ("parameter", "buffer"):
                for name, tensor in _registered(module)[kind].items():
                    if (path, name) not in assigned and isinstance(tensor, Tensor):
                        memory.setdefault(storage_id(tensor), _join(path, name))
        for (path, name), (_, new) in assigned.items():
            where = _join(path, name)
            if len(self._shared.get(where, ())) > 1:
                raise self._refused(
                    where,
                    f"`forward` assigns a buffer that has several names, {self._shared[where]}, of "
                    f"which only one would change: change it in place (`copy_`), or `clone()` it in"
                    " `__init__`",
                )
            other = memory.setdefault(storage_id(new), where)
            if other != where:
                raise self._refused(
                    where,
                    f"`forward` gives the buffer {where!r} the memory of {other!r}, so that later "
                    "changes of one would change both, which a captured model would not see: "
                    "assign a `clone()`, or use `copy_`",
                )

    def _checked(self, kind: str, path: str, old: object, new: object) -> tuple[Tensor, Tensor]:
        """The old and the new value of a buffer.

        Raises:
            CaptureError: if it is no buffer, or the new value does not fit into the old one.
        """
        where = f"{kind} {path!r}"
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            what = "removes" if new is None else "makes"
            raise self._refused(
                path,
                f"`forward` {what} the {where}: a captured model would do so in each call; {ONCE}",
            )
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise self._refused(
                path,
                f"`forward` gives the {where} another shape or dtype, {list(new.shape)} "
                f"{new.dtype} instead of {list(old.shape)} {old.dtype}; {ONCE}",
            )
        if kind != "buffer":
            raise self._refused(
                path,
                f"`forward` puts another tensor in the place of the {where}, which a captured "
                "model would not see: change it in place (`copy_`)",
            )
        return old, new

    def _refused(self, path: str, message: str) -> CaptureError:
        return located(self._codes, path, message)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def _registered(module: nn.Module) -> Registered:
    kinds: dict[str, Mapping[str, object]] = {
        "parameter": own_parameters(module),
        "buffer": own_buffers(module),
        "submodule": own_modules(module),
    }
    return {
        kind: {name: held for name, held in own.items() if held is not None}
        for kind, own in kinds.items()
    }
