"""Parameters, buffers and submodules that `forward` makes, as modules do that wait for their first
call: a captured model would make them anew in each call."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils.hooks import RemovableHandle

from shardwright.errors import CaptureError
from shardwright.torch_internals.modules import own_buffers, own_modules, own_parameters

ONCE = "make it in `__init__`, or call the model once, with the longest input, before `plan`"
Registered = dict[str, dict[str, object]]
"""What a module holds under which name, by its kind."""


class RegisteredTensors:
    """What modules hold when `forward` begins, and when it ends.

    Args:
        modules: by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._by_path = dict(modules)
        self._before: dict[str, Registered] = {}
        self._assigned: set[int] = set()
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        """Takes what the modules hold as it is, and sees which buffers are assigned until `end`."""
        self._before = {path: _registered(module) for path, module in self._by_path.items()}
        self._handle = register_module_buffer_registration_hook(
            lambda module, name, buffer: self._assigned.add(id(buffer))
        )

    def check(self) -> None:
        """Raises:
        CaptureError: if another tensor or module is registered now.
        """
        for path, module in self._by_path.items():
            for kind, now in _registered(module).items():
                before = self._before[path][kind]
                for name in {**before, **now}:
                    if now.get(name) is not before.get(name):
                        where = f"{kind} {f'{path}.{name}'.removeprefix('.')!r}"
                        self._check(where, before.get(name), now.get(name))

    def end(self) -> None:
        """Sees no more."""
        if self._handle is not None:
            self._handle.remove()

    def _check(self, where: str, old: object, new: object) -> None:
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            what = "removes" if new is None else "makes"
            raise CaptureError(
                f"`forward` {what} the {where}: a captured model would do so in each call; {ONCE}"
            )
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise CaptureError(
                f"`forward` gives the {where} another shape or dtype, {list(new.shape)} "
                f"{new.dtype} instead of {list(old.shape)} {old.dtype}; {ONCE}"
            )
        if id(new) not in self._assigned:
            raise CaptureError(
                f"`forward` puts another tensor in the place of the {where}, which a captured "
                "model would not see: change it in place (`copy_`)"
            )


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
