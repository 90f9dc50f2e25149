"""The code that a `local_map` runs: a function, or a module with parameters and buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.core.torch_internals.activation_checkpoint import recomputed_in
from shardwright.core.torch_internals.modules import TensorSlots
from shardwright.core.torch_internals.tensors import FakeTensor, version
from shardwright.errors import PlanError

ForkGenerators = Callable[[], AbstractContextManager[Callable[[int], object]]]
"""Function that returns a context for random numbers: it yields a function that seeds the
generators, and restores their states at the end."""


class Body(Protocol):
    """The user's function or module that a `local_map` runs on local shards."""

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        """Run the function or module with `state` in place of its parameters and buffers.

        Returns:
            The result, and the new values of changed parameters and buffers, by index in `state`.
        """

    def with_seeded_backward(self, fork: ForkGenerators) -> Body:
        """Return a copy whose backward pass draws random numbers seeded by its forward pass."""

    @property
    def description(self) -> str:
        """Text that identifies the function or module; equal for layers that differ in parameters
        only."""


@dataclass(frozen=True, eq=False)
class FunctionBody:
    """A function that a `local_map` runs; it has no parameters and buffers."""

    function: Callable[..., Any]

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        # Makes reentrant checkpoints in the user's code non-reentrant.
        with recomputed_in(nullcontext):
            return self.function(*args, **kwargs), {}

    def with_seeded_backward(self, fork: ForkGenerators) -> FunctionBody:
        return self

    @property
    def description(self) -> str:
        return function_text(self.function)


def function_text(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function, with the arguments bound by `functools.partial`.

    The text contains no addresses, so that ranks can compare it.
    """
    if isinstance(function, functools.partial):
        bound = [*map(_format_argument, function.args)]
        bound += [f"{name}={_format_argument(x)}" for name, x in function.keywords.items()]
        return f"{function_text(function.func)}({', '.join(bound)})"
    # An object with `__call__` has no `__qualname__`.
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _format_argument(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"Tensor {list(argument.shape)}"
    # The `repr` of other objects may have an address, which differs between ranks.
    is_plain = isinstance(argument, (str, int, float, complex, bool, type(None), torch.dtype))
    return repr(argument) if is_plain else type(argument).__qualname__


@dataclass(frozen=True)
class _LocalMapModule:
    """Module that a `local_map` runs, with other tensors in place of its parameters and buffers.

    Args:
        module: the module.
        slots: the attributes that contain the module's parameters and buffers.
        caching: configurations of `transformers` models with `use_cache=True`. It is set to False
            during calls, since captured models return no cache of keys and values.
    """

    module: nn.Module
    slots: TensorSlots
    caching: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[Sequence[str]]) -> _LocalMapModule:
        # By identity, as submodules share one configuration object.
        configs = {id(c): c for each in module.modules() if (c := getattr(each, "config", None))}
        caching = (c for c in configs.values() if getattr(c, "use_cache", None) is True)
        return cls(module, TensorSlots.of(module, names), tuple(caching))

    def call(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Run `forward` with `state` in place of parameters and buffers.

        Returns:
            The result, and the module's parameters and buffers after the call.
        """

        def with_state() -> AbstractContextManager[None]:
            return self.slots.holding(state)

        for config in self.caching:
            config.use_cache = False
        try:
            # Checkpointed parts of the module are recomputed in the backward pass, and must then
            # read the same tensors.
            with recomputed_in(with_state), with_state():
                return self.module.forward(*args, **kwargs), self.slots.tensors()
        finally:
            for config in self.caching:
                config.use_cache = True


@dataclass(frozen=True, eq=False)
class ModuleBody:
    """A module that a `local_map` runs, found by its path in the model.

    Args:
        root: returns the model, or None if it has been deleted.
        path: path of the module in the model.
        names: all names of each parameter and buffer in the module, parameters first; several names
            for a tied tensor.
        parameters: number of parameters in `names`; the buffers follow.
        description: class and submodules of the module.
    """

    root: Callable[[], nn.Module | None]
    path: str
    names: tuple[tuple[str, ...], ...]
    parameters: int
    description: str
    _bound: dict[int, _LocalMapModule] = field(default_factory=dict)

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        module = self._submodule()
        is_first = id(module) not in self._bound
        if is_first:
            self._bound[id(module)] = _LocalMapModule.of(module, self.names)
        # Normalizations change running statistics without increasing their version counter, so the
        # first call compares the values of buffers.
        copies = [t.detach().clone() for t in state[self.parameters :]] if is_first else []
        versions = list(map(version, state))
        result, after = self._bound[id(module)].call(args, kwargs, state)
        changed = {
            index: tensor
            for index, (tensor, before) in enumerate(zip(after, state, strict=True))
            # Assigned anew, or changed in place.
            if tensor is not before or version(tensor) != versions[index]
        }
        for index, copied in enumerate(copies, self.parameters):
            if _differs_from_earlier_copy(after[index], copied):
                changed[index] = after[index]
        return result, changed

    def with_seeded_backward(self, fork: ForkGenerators) -> ModuleBody:
        return self

    def _submodule(self) -> nn.Module:
        root = self.root()
        if root is None:
            raise PlanError(
                f"the model of the `local_map` at path {self.path!r} has been deleted\n"
                "keep a reference to the model as long as its plan is used"
            )
        return root.get_submodule(self.path)


def _differs_from_earlier_copy(tensor: Tensor, copied: Tensor) -> bool:
    """Whether a tensor has other values than `copied`; False for a meta or fake tensor."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    # Without `nan_to_num`, a NaN would differ from itself.
    return not torch.equal(tensor.detach().nan_to_num(), copied.nan_to_num())
