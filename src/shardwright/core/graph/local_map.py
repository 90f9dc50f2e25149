"""`LocalCall`: the operator that stands for a part of a model which runs as it is.

A `local_map` is opaque: its Python, its kernels and its data-dependent shapes are never traced. In
a graph it is one operator whose inputs are the tensors of the call, then the parameters and buffers
of the module; on each rank it runs the original code eagerly on local shards, and autograd records
what it does. What a plan knows of it is its `Declaration`. Parameters and buffers are inputs
without sharded names, so they may be stored sharded and are gathered before the call, and the
gradients of all shards are summed.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.core.graph.float64 import double_dtype, everything_in_float64
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.local_declaration import Declaration
from shardwright.core.graph.local_gradients import empty_results, on_each_rank
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.activation_checkpoint import recomputed_in
from shardwright.core.torch_internals.distributed import by_rank
from shardwright.core.torch_internals.modules import TensorSlots
from shardwright.core.torch_internals.tensors import FakeTensor, version
from shardwright.errors import CaptureError, PlanError

log = logging.getLogger("shardwright.cost")


class Body(Protocol):
    """The original code."""

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        """Calls it, with `state` in place of its parameters and buffers.

        Returns:
            Its result, and what it puts in the place of some of `state`, by number.
        """

    @property
    def text(self) -> str:
        """Tells it from others: equal for layers that differ only in their parameters."""


@dataclass(frozen=True, eq=False)
class FunctionBody:
    """A function."""

    function: Callable[..., Any]

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        with recomputed_in(nullcontext):
            return self.function(*args, **kwargs), {}

    @property
    def text(self) -> str:
        return function_text(self.function)


def function_text(function: Callable[..., Any]) -> str:
    """Module and name of a function, with the arguments that it is bound to; equal on all ranks."""
    if isinstance(function, functools.partial):
        bound = [*map(_argument_text, function.args)]
        bound += [f"{name}={_argument_text(x)}" for name, x in function.keywords.items()]
        return f"{function_text(function.func)}({', '.join(bound)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _argument_text(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"Tensor {list(argument.shape)}"
    is_plain = isinstance(argument, (str, int, float, complex, bool, type(None), torch.dtype))
    return repr(argument) if is_plain else type(argument).__qualname__


@dataclass(frozen=True)
class _BoundModule:
    """A module with what a call changes of it for as long as it runs.

    Args:
        caching: configurations by which models of `transformers` return a cache of keys and values,
            which a captured model does not.
    """

    module: nn.Module
    slots: TensorSlots
    caching: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[Sequence[str]]) -> _BoundModule:
        configs = {id(c): c for part in module.modules() if (c := getattr(part, "config", None))}
        caching = (c for c in configs.values() if getattr(c, "use_cache", None) is True)
        return cls(module, TensorSlots.of(module, names), tuple(caching))

    def call(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The result of `forward`, and what is then in the place of `state`."""

        def swapped() -> AbstractContextManager[None]:
            return self.slots.holding(state)

        for config in self.caching:
            config.use_cache = False
        try:
            # What is checkpointed inside runs again in the backward pass, and reads the same.
            with recomputed_in(swapped), swapped():
                return self.module.forward(*args, **kwargs), self.slots.tensors()
        finally:
            for config in self.caching:
                config.use_cache = True


@dataclass(frozen=True, eq=False)
class ModuleBody:
    """The module at a path of a model.

    Args:
        root: gives the model, or None once it has been deleted.
        path: of the module in it.
        names: of each parameter and buffer all names in the module, more than one if it is tied.
        parameters: how many of them are parameters; the buffers follow.
        text: its class and its submodules.
    """

    root: Callable[[], nn.Module | None]
    path: str
    names: tuple[tuple[str, ...], ...]
    parameters: int
    text: str
    _bound: dict[int, _BoundModule] = field(default_factory=dict)

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        module = self._module()
        is_first = id(module) not in self._bound
        if is_first:
            self._bound[id(module)] = _BoundModule.of(module, self.names)
        # Of a change by a normalization no version tells, so the first call compares values.
        copies = [t.detach().clone() for t in state[self.parameters :]] if is_first else []
        versions = list(map(version, state))
        result, after = self._bound[id(module)].call(args, kwargs, state)
        changed = {
            number: tensor
            for number, (tensor, before) in enumerate(zip(after, state, strict=True))
            if tensor is not before or version(tensor) != versions[number]
        }
        for number, copied in enumerate(copies, self.parameters):
            if _differ(after[number], copied):
                changed[number] = after[number]
        return result, changed

    def _module(self) -> nn.Module:
        root = self.root()
        if root is None:
            raise PlanError(
                f"the model that the local_map {self.path or 'of the whole model'!r} belongs to has"
                " been deleted\nkeep a reference to it as long as its plan is used"
            )
        return root.get_submodule(self.path)


def _container_text(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {', '.join(type(part).__name__ for part in result)}"
    return f"a {type(result).__name__}"


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or isinstance(one, FakeTensor):
        return False
    return not torch.equal(one.detach().nan_to_num(), other.nan_to_num())


@dataclass(frozen=True, eq=False)
class LocalCall:
    """One call of a `local_map`: an operator's target. Its arguments are tensors only.

    Args:
        name: the path of the module, or the name of the function.
        body: runs it on tensors with values.
        sample: runs it on tensors without values, apart from the model; None where it cannot.
        structure: of the arguments of the call.
        constants: the leaves of the arguments that are no tensors, by position.
        results: shape and dtype of each result, whole; those of changed buffers last.
        changed: which of the parameters and buffers, by number, it changes.
        autocast: the dtype of the region of autocast that the call is made in; None outside.
        random: whether it draws random numbers.
        flops, saved_bytes: of a forward pass of the whole batch, as the user states them:
            operations, and what is kept for the backward pass; None if counted on `sample`.
        in_float64: whether all floating-point tensors are in float64, to compare the last digits.
    """

    name: str
    declaration: Declaration
    body: Body
    sample: Body | None
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    changed: tuple[int, ...] = ()
    autocast: torch.dtype | None = None
    random: bool = False
    flops: float | None = None
    saved_bytes: float | None = None
    in_float64: bool = False

    def __post_init__(self) -> None:
        # As a function has them: graphs, programs and fingerprints name a target by these.
        object.__setattr__(self, "__name__", "local_map")
        object.__setattr__(self, "__qualname__", repr(self))

    @property
    def _key(self) -> tuple[Any, ...]:
        """Equal for calls that differ in names, models and sizes: their arguments tell those."""
        dtypes = tuple(dtype for _, dtype in self.results)
        constants = repr(self.constants)
        return (self.declaration, self.body.text, constants, dtypes, self.autocast)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LocalCall) and self._key == other._key)

    def __hash__(self) -> int:
        return hash((self.declaration, self.body.text))

    def __repr__(self) -> str:
        return f"local_map({self.name!r}, {self.declaration.text!r})"

    def as_float64(self) -> LocalCall:
        """The same call where all floating-point tensors are in float64."""
        results = tuple((shape, double_dtype(dtype)) for shape, dtype in self.results)
        return replace(self, results=results, in_float64=True)

    @property
    def is_opaque(self) -> bool:
        """Whether it is unknown what its backward pass reads, and which inputs get gradients."""
        return self.sample is None or self.saved_bytes is not None

    def is_mean(self, output: int) -> bool:
        """Whether the mean of a result over shards is the result; of changed buffers it is."""
        partial = self.declaration.partial
        return output >= len(partial) or partial[output] == "mean"

    def __call__(self, *tensors: Tensor) -> Any:
        """The results: a tensor if there is one, else a tuple.

        Raises:
            CaptureError: if a result is not as declared, or an input is changed in place.
        """
        results = self.run(tensors)
        return results[0] if len(results) == 1 else results

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results as a tuple, whatever their number."""
        if any(by_rank(tensor) is not None for tensor in tensors):
            return on_each_rank(self.run, tensors)
        if all(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._without_values(tensors)
        versions = list(map(version, tensors))
        with self._region(tensors):
            results = self._call(self.body, tensors)
        for number, before in enumerate(versions):
            if version(tensors[number]) != before:
                raise CaptureError(self._changes(number))
        return results

    def _call(self, body: Body, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results, and the new values of the buffers that change.

        Raises:
            CaptureError: if they are not as declared.
        """
        given = len(self.declaration.inputs)
        leaves: list[Any] = list(tensors[:given])
        for position, constant in self.constants:
            # In ascending order, so that each position is that of the call.
            leaves.insert(position, constant)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        state = list(tensors[given:])
        for number in self.changed:
            # A copy: the new value is a result, combined over all shards before it is assigned.
            state[number] = state[number].clone()
        result, after = body.run(args, kwargs, state)
        for number in after:
            if number not in self.changed:
                raise CaptureError(self._changes(given + number))
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if self.sample is None:
            self._check_container(result, len(results))
        buffers = [after.get(number, state[number]).detach() for number in self.changed]
        return self._checked([*results, *buffers], tensors)

    def _check_container(self, result: Any, count: int) -> None:
        """
        Raises:
            CaptureError: if code around the call was traced with another container of its `count`
                tensors, as that is unknown of a part that needs values.
        """
        is_whole = isinstance(self.body, ModuleBody) and not self.body.path
        if isinstance(result, (tuple, list)):
            fits = count > 1 and all(isinstance(part, Tensor) for part in result)
        else:
            fits = isinstance(result, Tensor) or count > 1 or is_whole
        if not fits:
            expected = "a tensor" if count == 1 else f"a tuple of {count} tensors"
            raise CaptureError(
                f"local_map {self.name!r} returns {_container_text(result)}; it needs values to "
                f"run, so the code around it was captured as if it returned {expected}\n"
                f"return {expected}"
            )

    def _region(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        if self.in_float64:
            return everything_in_float64()
        if self.autocast is None:
            return nullcontext()
        kind = tensors[0].device.type
        return torch.autocast("cpu" if kind == "meta" else kind, self.autocast)

    def _expected(self, tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each result for these inputs."""
        sizes, outputs = self.declaration.sizes(tensors), len(self.declaration.outputs)
        return [
            (self.declaration.shape(n, sizes, shape) if n < outputs else shape, dtype)
            for n, (shape, dtype) in enumerate(self.results)
        ]

    def _checked(self, found: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results, which must be as declared."""
        expected, own = self._expected(tensors), len(self.changed)
        if len(found) != len(expected):
            raise CaptureError(
                f"local_map {self.name!r} returns {len(found) - own} tensors\n"
                f"`{self.declaration.text}` declares {len(expected) - own}: write an entry for each"
            )
        for number, (tensor, (shape, dtype)) in enumerate(zip(found, expected, strict=True)):
            # A kernel may still return another dtype than float64.
            mixed = self.in_float64 and tensor.is_floating_point()
            if tuple(tensor.shape) != shape or not (tensor.dtype == dtype or mixed):
                raise CaptureError(self._differs(number, tensor, shape, dtype))
        return tuple(found)

    def _differs(
        self, number: int, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> str:
        returned, declared = f"{list(tensor.shape)}", f"{list(shape)}"
        if tuple(tensor.shape) == shape:
            remedy = f"state it: `dtypes=({tensor.dtype},)`, one for each result"
            returned, declared = str(tensor.dtype), str(dtype)
        else:
            entry = " ".join("_" * tensor.ndim) or "()"
            remedy = (
                f"`{self.declaration.text}` says so: write another name, or the number of a size "
                f"that no input has, such as `{entry}`"
            )
        return (
            f"local_map {self.name!r}: result {number} is {returned} on this rank, and declared to "
            f"be {declared}\n{remedy}"
        )

    def _changes(self, number: int) -> str:
        given = len(self.declaration.inputs)
        what = f"input {number}"
        if number >= given and isinstance(self.body, ModuleBody):
            what = f"its {self.body.names[number - given][0]!r}"
        return (
            f"local_map {self.name!r} changes {what} in place, which other ranks would not see\n"
            "change a copy (`x = x.clone()`), or call the layer that does it outside of local_map"
        )

    def _without_values(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results as tensors without values, of the original code where it runs on such."""
        if self.sample is not None and self.saved_bytes is None:
            try:
                with self._region(tensors):
                    return self._call(self.sample, tensors)
            except Exception as error:
                # The user's code, which may depend on values on shards, though not on the batch.
                log.info(
                    "local_map %r: what it saves for the backward pass is not counted, as it does"
                    " not run without values on shards (%s): state saved_bytes=",
                    *(self.name, error),
                )
        return empty_results(self._expected(tensors), tensors, self._saved_bytes(tensors))

    def _saved_bytes(self, tensors: Sequence[Tensor]) -> int | None:
        """This rank's share of what the user states, as of the elements of the results."""
        if self.saved_bytes is None:
            return None
        whole = sum(math.prod(shape) for shape, _ in self.results)
        share = sum(math.prod(shape) for shape, _ in self._expected(tensors))
        return int(self.saved_bytes * share / max(whole, 1))


def bound_to(graph: Graph, root: nn.Module) -> Graph:
    """`graph`, whose `local_map` modules are those of `root`; itself if it has none."""
    if not any(is_module_call(op.target) for op in graph.ops):
        return graph

    def bound(target: Any) -> Any:
        if not is_module_call(target):
            return target
        body = target.body
        return replace(target, body=replace(body, root=lambda: root, _bound={}))

    return replace(graph, ops=tuple(replace(op, target=bound(op.target)) for op in graph.ops))


def is_opaque(target: object) -> bool:
    """Whether a target is a `local_map` of which gradients and saved tensors are unknown."""
    return isinstance(target, LocalCall) and target.is_opaque


def is_module_call(target: object) -> bool:
    """Whether a target runs a module, and not a function."""
    return isinstance(target, LocalCall) and isinstance(target.body, ModuleBody)
