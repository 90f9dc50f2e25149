"""`LocalCall`: the operator that stands for a part of a model which runs as it is.

A `local_map` is opaque: its Python, its kernels and its data-dependent shapes are never traced. In
a graph it is one operator whose inputs are the tensors of the call, then the parameters and buffers
of the module; on each rank it runs the original code eagerly on local shards, and autograd records
what it does. What a plan knows of it is its declaration:

    "b s _h, _h -> b s _h"   a name is a dimension that may be sharded, `_` or `_h` one that may not

- an input without a sharded name is read in full, and its gradient is a partial sum; parameters
  and buffers are such inputs, so they may be stored sharded and are gathered before the call;
- a result without a sharded name must be declared a partial sum or a partial mean.

Sizes, on one rank as in the graph, follow from the inputs by their names. Example, cut into two
along `b`: inputs `[8, 4, 16]` and `[16]` become `[4, 4, 16]` and `[16]`, the result `[4, 4, 16]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardwright.core.graph.graph import Graph
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.activation_checkpoint import recomputed_in
from shardwright.core.torch_internals.distributed import by_rank, of_ranks, on_simulated_rank
from shardwright.core.torch_internals.modules import TensorSlots
from shardwright.core.torch_internals.tensors import FakeTensor, requires_grad, version
from shardwright.errors import CaptureError, PlanError

Dims = tuple[str | None, ...]
"""The name of each dimension of a tensor; None for one that is never sharded."""

Entry = tuple[str, ...]
"""The notation of each dimension of a tensor: a name, `_`, `_name`, or the size of a result."""

Partial = Literal["sum", "mean"] | None
"""How the results of shards make up the whole, where a result lacks a sharded name."""


class Body(Protocol):
    """The original code."""

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> Any:
        """Calls it, with `state` in place of its parameters and buffers."""

    @property
    def text(self) -> str:
        """Tells it from others: equal for layers that differ only in their parameters."""


@dataclass(frozen=True, eq=False)
class FunctionBody:
    """A function."""

    function: Callable[..., Any]

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> Any:
        return self.function(*args, **kwargs)

    @property
    def text(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"{getattr(self.function, '__module__', '')}.{name}"


@dataclass(frozen=True, eq=False)
class ModuleBody:
    """The module at a path of a model.

    Args:
        root: gives the model, or None once it has been deleted.
        path: of the module in it.
        names: of each parameter and buffer all names in the module, more than one if it is tied.
        text: its class and its submodules.
    """

    root: Callable[[], nn.Module | None]
    path: str
    names: tuple[tuple[str, ...], ...]
    text: str
    _slots: dict[int, TensorSlots] = field(default_factory=dict)

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> Any:
        module = self._module()
        if id(module) not in self._slots:
            self._slots[id(module)] = TensorSlots.of(module, self.names)
        slots = self._slots[id(module)]

        def swapped() -> AbstractContextManager[None]:
            return slots.holding(state)

        # What is checkpointed inside runs again in the backward pass, and reads the same tensors.
        with recomputed_in(swapped), swapped():
            return module.forward(*args, **kwargs)

    def _module(self) -> nn.Module:
        root = self.root()
        if root is None:
            raise PlanError(
                f"the model that the local_map {self.path or 'of the whole model'!r} belongs to has"
                " been deleted\nkeep a reference to it as long as its plan is used"
            )
        return root.get_submodule(self.path)


@dataclass(frozen=True)
class Declaration:
    """What a user declares of a `local_map`.

    Args:
        inputs: an entry for each tensor that it is called with.
        outputs: one for each result.
        partial: of each result, how shards make it up where it lacks a sharded name.
        text: the notation as the user wrote it.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    partial: tuple[Partial, ...]
    text: str

    @cached_property
    def input_dims(self) -> tuple[Dims, ...]:
        return tuple(map(_dims, self.inputs))

    @cached_property
    def output_dims(self) -> tuple[Dims, ...]:
        """Names that no input has are not sharded: nothing says which part a rank computes."""
        given = {name for dims in self.input_dims for name in dims}
        return tuple(
            tuple(name if name in given else None for name in _dims(entry))
            for entry in self.outputs
        )

    def sizes(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The size of each name, of the tensors of a call."""
        return {
            name: size
            for entry, tensor in zip(self.inputs, tensors, strict=False)
            for name, size in zip(entry, tensor.shape, strict=True)
            if name != "_"
        }

    def shape(self, output: int, sizes: dict[str, Any], whole: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of a result for these sizes; dimensions without a size are as in `whole`."""
        pairs = zip(self.outputs[output], whole, strict=True)
        return tuple(sizes.get(name, size) for name, size in pairs)


def _dims(entry: Entry) -> Dims:
    return tuple(None if token[0] == "_" or token.isdigit() else token for token in entry)


@dataclass(frozen=True, eq=False)
class LocalCall:
    """One call of a `local_map`: an operator's target. Its arguments are tensors only.

    Args:
        name: the path of the module, or the name of the function.
        body: runs it on tensors with values.
        sample: runs it on tensors without values, apart from the model; None where it cannot.
        structure: of the arguments of the call.
        constants: the leaves of the arguments that are no tensors, by position.
        results: shape and dtype of each result, whole.
        autocast: the dtype of the region of autocast that the call is made in; None outside.
        random: whether it draws random numbers.
        flops, saved_bytes: of a forward pass of the whole batch, as the user states them: operations
            and what is kept for the backward pass; None if they are counted on `sample`.
    """

    name: str
    declaration: Declaration
    body: Body
    sample: Body | None
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    autocast: torch.dtype | None = None
    random: bool = False
    flops: float | None = None
    saved_bytes: float | None = None

    def __post_init__(self) -> None:
        # As a function has them: graphs, programs and fingerprints name a target by these.
        object.__setattr__(self, "__name__", "local_map")
        object.__setattr__(self, "__qualname__", repr(self))

    @property
    def _key(self) -> tuple[Any, ...]:
        """Calls alike have equal costs; their names and models do not count."""
        constants = repr(self.constants)
        return (self.declaration, self.body.text, constants, self.results, self.autocast)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LocalCall) and self._key == other._key)

    def __hash__(self) -> int:
        return hash((self.declaration, self.results))

    def __repr__(self) -> str:
        return f"local_map({self.name!r}, {self.declaration.text!r})"

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
            return _on_each_rank(self, tensors)
        if all(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._without_values(tensors)
        versions = [version(tensor) for tensor in tensors]
        with self._region(tensors):
            results = self._flat(self._call(self.body, tensors), tensors)
        for number, (tensor, before) in enumerate(zip(tensors, versions, strict=True)):
            if version(tensor) != before:
                raise CaptureError(self._changed(number))
        return results

    def _call(self, body: Body, tensors: Sequence[Tensor]) -> Any:
        given = len(self.declaration.inputs)
        leaves: list[Any] = list(tensors[:given])
        for position, constant in self.constants:
            leaves.insert(position, constant)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return body.run(args, kwargs, tensors[given:])

    def _region(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        kind = tensors[0].device.type
        return torch.autocast("cpu" if kind == "meta" else kind, self.autocast)

    def _expected(self, tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each result for these inputs."""
        sizes = self.declaration.sizes(tensors)
        double = any(tensor.dtype == torch.float64 for tensor in tensors)
        return [
            (
                self.declaration.shape(number, sizes, shape),
                torch.float64 if double and dtype.is_floating_point else dtype,
            )
            for number, (shape, dtype) in enumerate(self.results)
        ]

    def _flat(self, result: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of a result.

        Raises:
            CaptureError: if they are not as declared.
        """
        found = tuple(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
        expected = self._expected(tensors)
        if len(found) != len(expected):
            raise CaptureError(
                f"local_map {self.name!r} returns {len(found)} tensors"
                f"\n`{self.declaration.text}` declares {len(expected)}: write an entry for each"
            )
        for number, (tensor, (shape, dtype)) in enumerate(zip(found, expected, strict=True)):
            # Where all is computed in float64, a kernel may still return another dtype.
            mixed = dtype == torch.float64 and tensor.is_floating_point()
            if tuple(tensor.shape) != shape or not (tensor.dtype == dtype or mixed):
                raise CaptureError(self._differs(number, tensor, shape, dtype))
        return found

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

    def _changed(self, number: int) -> str:
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
                    return self._flat(self._call(self.sample, tensors), tensors)
            except Exception:  # The user's code: on shards it may depend on values after all.
                pass
        results: tuple[Tensor, ...] = _Unknown.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return results


class _Unknown(torch.autograd.Function):
    """Results without values of code that needs values, which keep for the backward pass what the
    user states, or else the inputs and results."""

    @staticmethod
    def forward(ctx: Any, call: LocalCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        like, ctx.tensors = tensors[0], [(t.shape, t.dtype, t.device) for t in tensors]
        results = tuple(
            torch.empty(shape, dtype=dtype, device=like.device)
            for shape, dtype in call._expected(tensors)
        )
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        if call.saved_bytes is None:
            ctx.save_for_backward(*tensors, *results)
        else:
            whole = max(1, sum(torch.Size(shape).numel() for shape, _ in call.results))
            share = sum(result.numel() for result in results) / whole
            size = int(call.saved_bytes * share)
            ctx.kept = torch.empty(size, dtype=torch.uint8, device=like.device)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = zip(ctx.tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(
            torch.empty(shape, dtype=dtype, device=device) if need else None
            for (shape, dtype, device), need in wanted
        )


def linked(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results, through which every input gets a gradient: zeros where no path leads to it.

    Ranks reduce gradients together, and data-dependent code may read a parameter on some only.
    """
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if not trained or not any(result.requires_grad for result in results):
        return tuple(results)
    edges = [get_gradient_edge(tensor) for tensor in trained]
    reached = _reached(results, {edge.node for edge in edges})
    missed = [
        tensor
        for tensor, edge in zip(trained, edges, strict=True)
        if (edge.node, edge.output_nr) not in reached
    ]
    if not missed:
        return tuple(results)
    joined: tuple[Tensor, ...] = _Linked.apply(len(results), *results, *missed)  # type: ignore[no-untyped-call]
    return joined


def _reached(results: Sequence[Tensor], ends: set[Any]) -> set[tuple[Any, int]]:
    """The edges of the autograd graph that lead to the nodes `ends`."""
    edges = map(get_gradient_edge, filter(requires_grad, results))
    waiting: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in edges]
    reached = set(waiting)
    seen: set[Any] = set()
    while waiting:
        node, _ = waiting.pop()
        if node in seen or node in ends:
            continue
        seen.add(node)
        further = [(n, number) for n, number in node.next_functions if n is not None]
        reached.update(further)
        waiting.extend(further)
    return reached


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, missed = tensors[:count], tensors[count:]
        ctx.missed = [(t.shape, t.dtype, t.device) for t in missed]
        ctx.set_materialize_grads(False)
        views = tuple(result.view_as(result) for result in results)
        ctx.mark_non_differentiable(
            *(v for v, r in zip(views, results, strict=True) if not r.requires_grad)
        )
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        zeros = (torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.missed)
        return None, *gradients, *zeros


def _on_each_rank(call: LocalCall, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of simulated ranks, each of which runs by itself: the code may depend on values,
    which differ between ranks."""
    results: tuple[Tensor, ...] = _OnEachRank.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return results


class _OnEachRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: LocalCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        local = [by_rank(tensor) for tensor in tensors]
        ranks = sorted(next(shards for shards in local if shards is not None))
        ctx.runs = {}
        for rank in ranks:
            with on_simulated_rank(rank), torch.enable_grad():
                inputs = [
                    (whole if shards is None else shards[rank]).detach()
                    for whole, shards in zip(tensors, local, strict=True)
                ]
                for tensor, need in zip(inputs, ctx.needs_input_grad[1:], strict=True):
                    tensor.requires_grad_(need)
                ctx.runs[rank] = inputs, linked(call.run(inputs), inputs)
        first = ctx.runs[ranks[0]][1]
        results = tuple(
            of_ranks({rank: ctx.runs[rank][1][number].detach() for rank in ranks})
            for number in range(len(first))
        )
        ctx.mark_non_differentiable(
            *(r for r, one in zip(results, first, strict=True) if not one.requires_grad)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        local = [by_rank(gradient) for gradient in gradients]
        found: dict[int, list[Tensor | None]] = {}
        for rank, (inputs, results) in ctx.runs.items():
            with on_simulated_rank(rank):
                pairs = [
                    (result, gradient if shards is None else shards[rank])
                    for result, gradient, shards in zip(results, gradients, local, strict=True)
                    if result.requires_grad
                ]
                trained = [tensor for tensor in inputs if tensor.requires_grad]
                ends, starts = [r for r, _ in pairs], [g for _, g in pairs]
                some = torch.autograd.grad(ends, trained, starts, retain_graph=True)
                left = iter(some)
                found[rank] = [next(left) if t.requires_grad else None for t in inputs]
        count = len(ctx.needs_input_grad) - 1
        return None, *(_joined(found, number) for number in range(count))


def _joined(found: dict[int, list[Tensor | None]], number: int) -> Tensor | None:
    of_rank = {rank: tensor for rank, g in found.items() if (tensor := g[number]) is not None}
    return of_ranks(of_rank) if of_rank else None


def bound_to(graph: Graph, root: nn.Module) -> Graph:
    """`graph`, whose `local_map` modules are those of `root`; itself if it has none."""
    if not any(is_module_call(op.target) for op in graph.ops):
        return graph

    def bound(target: Any) -> Any:
        if not is_module_call(target):
            return target
        body = target.body
        return replace(target, body=replace(body, root=lambda: root, _slots={}))

    return replace(graph, ops=tuple(replace(op, target=bound(op.target)) for op in graph.ops))


def is_module_call(target: object) -> bool:
    """Whether a target runs a module, and not a function."""
    return isinstance(target, LocalCall) and isinstance(target.body, ModuleBody)
