"""Copy of a model's module tree with the model's parameters and buffers, but not its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.modules import own_buffers, own_modules, own_parameters


class ModuleTree(nn.Module):
    """Module with the tensors of a model, whose `forward` calls a function.

    Args:
        model: the model.
        program: function that `forward` calls with this module, the leaves of the arguments, and
            further tensors by name; returns the leaves of the result.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Callable[[nn.Module, Sequence[Any], Mapping[str, Tensor]], list[Any]],
    ) -> None:
        super().__init__()
        submodules: dict[str, nn.Module] = {"": self}
        for path, module in model.named_modules(remove_duplicate=False):
            # Parents precede their children in `named_modules`.
            submodule = submodules.setdefault(path, nn.Module())
            if path:
                parent, _, name = path.rpartition(".")
                own_modules(submodules[parent])[name] = submodule
            own_parameters(submodule).update(own_parameters(module))
            own_buffers(submodule).update(own_buffers(module))
            submodule.training = module.training
        self._program = program

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], constants: Mapping[str, Tensor]
    ) -> list[Any]:
        return self._program(self, pytree.tree_leaves((args, kwargs)), constants)
