"""Parameters, buffers and submodules that `forward` creates or replaces.

A captured model would create these objects again in each step, even if `forward` does so in its
first call only.
"""

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
"""Parameters, buffers and submodules of a module, by category and name."""


class RegisteredTensors:
    """Comparison of the tensors and submodules of modules before and after `forward`.

    A buffer that `forward` assigns is updated in place: its new values are copied into the previous
    tensor, as if `forward` ended with a `copy_`.

    Args:
        modules: all modules of the model by path.
        codes: code objects of the functions that may run; they locate lines in error messages.
    """

    def __init__(self, modules: Mapping[str, nn.Module], codes: Iterable[CodeType] = ()) -> None:
        self._codes = codes
        self._by_path = dict(modules)
        self._before: dict[str, Registered] = {}
        self._names: dict[int, list[str]] = {}
        for path, module in modules.items():
            for name, buffer in own_buffers(module).items():
                self._names.setdefault(id(buffer), []).append(_join_path(path, name))

    def begin(self) -> None:
        """Record the parameters, buffers and submodules before `forward`."""
        # `update` handles assigned buffers of all modules, `torch.export` those of the root module
        # only.
        drop_buffer_assignments_of_export()
        self._before = {
            path: _get_registered_members(module) for path, module in self._by_path.items()
        }
        self._trained = [
            (_join_path(path, name), parameter, parameter.requires_grad)
            for path, held in self._before.items()
            for name, parameter in held["parameter"].items()
            if isinstance(parameter, Tensor)
        ]
        self._shared = {name: names for names in self._names.values() for name in names}

    def update(self, result: Any) -> Any:
        """Copy assigned buffers into their previous tensors.

        Args:
            result: the return value of `forward`.

        Returns:
            The result, with copies of tensors that share memory with an updated buffer.

        Raises:
            CaptureError: if `forward` replaced a submodule or parameter, changed the shape of a
                buffer or `requires_grad` of a parameter, or if an assigned buffer shares memory.
        """
        assigned: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        for path, module in self._by_path.items():
            for registry, now in _get_registered_members(module).items():
                before = self._before[path][registry]
                for name in {**before, **now}:
                    old, new = before.get(name), now.get(name)
                    if new is not old:
                        assigned[path, name] = self._check_assignment(
                            registry, _join_path(path, name), old, new
                        )
        for name, parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                raise self._make_located_error(
                    name,
                    f"`forward` sets `requires_grad` of the parameter {name!r}, which a captured "
                    "model would not do in later steps\nset it before `plan`, or use `detach()`",
                )
        return self._copy_into_buffers(assigned, result) if assigned else result

    def _copy_into_buffers(
        self, assigned: Mapping[tuple[str, str], tuple[Tensor, Tensor]], result: Any
    ) -> Any:
        self._check_unshared_memory(assigned)
        replaced = {storage_id(old) for old, _ in assigned.values()}
        with torch.no_grad():
            # Copy all new values first: one may share memory with another buffer's old tensor.
            new = {key: value.detach().clone() for key, (_, value) in assigned.items()}
            # The result may be the old value of a buffer, which is overwritten below.
            result = pytree.tree_map_only(
                Tensor, lambda t: t.clone() if storage_id(t) in replaced else t, result
            )
            for (path, name), (old, _) in assigned.items():
                own_buffers(self._by_path[path])[name] = old.copy_(new[path, name])
        return result

    def _check_unshared_memory(
        self, assigned: Mapping[tuple[str, str], tuple[Tensor, Tensor]]
    ) -> None:
        # Names of tensors that stay, by the storage that an assigned tensor must not share.
        memory: dict[int, str] = {}
        for path, module in self._by_path.items():
            for registry in ("parameter", "buffer"):
                for name, tensor in _get_registered_members(module)[registry].items():
                    if (path, name) not in assigned and isinstance(tensor, Tensor):
                        memory.setdefault(storage_id(tensor), _join_path(path, name))
        for (path, name), (_, new) in assigned.items():
            where = _join_path(path, name)
            if len(self._shared.get(where, ())) > 1:
                raise self._make_located_error(
                    where,
                    f"`forward` assigns a new tensor to a buffer with several names, "
                    f"{self._shared[where]}, but only one name would refer to it\n"
                    "update the buffer in place (`copy_`), or `clone()` it in `__init__`",
                )
            # Also finds two buffers to which one tensor is assigned.
            other = memory.setdefault(storage_id(new), where)
            if other != where:
                raise self._make_located_error(
                    where,
                    f"`forward` assigns a tensor that shares memory with {other!r} to the buffer "
                    f"{where!r}, but a captured model stores them separately\n"
                    "assign a `clone()`, or use `copy_`",
                )

    def _check_assignment(
        self, registry: str, path: str, old: object, new: object
    ) -> tuple[Tensor, Tensor]:
        """Return the old and the new value of an assigned buffer.

        Raises:
            CaptureError: if the assigned object is not a buffer, or shape or dtype differ.
        """
        where = f"{registry} {path!r}"
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            what = "removes" if new is None else "makes"
            raise self._make_located_error(
                path,
                f"`forward` {what} the {where}, which a captured model would repeat in each call\n"
                f"{ONCE}",
            )
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise self._make_located_error(
                path,
                f"`forward` changes the shape or dtype of the {where} from {list(old.shape)} "
                f"{old.dtype} to {list(new.shape)} {new.dtype}\n{ONCE}",
            )
        if registry != "buffer":
            raise self._make_located_error(
                path,
                f"`forward` replaces the {where} by another tensor, which a captured model would "
                "not read\ncopy the new values into it: `self.x.copy_(new)`",
            )
        return old, new

    def _make_located_error(self, path: str, message: str) -> CaptureError:
        return located(self._codes, path, message)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def _get_registered_members(module: nn.Module) -> Registered:
    registries: dict[str, Mapping[str, object]] = {
        "parameter": own_parameters(module),
        "buffer": own_buffers(module),
        "submodule": own_modules(module),
    }
    return {
        # `register_buffer(name, None)` reserves a name; filling it makes a buffer.
        registry: {name: held for name, held in members.items() if held is not None}
        for registry, members in registries.items()
    }
