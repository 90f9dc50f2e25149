"""What may be cut: one sharding rule for each operator, with named factors.

A rule names the dimensions of an operator's tensors, as an einsum does: a linear layer is
`"b s k, j k -> b s j"`. To *cut* factor `b` over some axes of the device matrix shards every tensor
that carries `b`. A tensor that lacks it is read whole and its gradient is a partial sum; if the
output lacks it, the factor is *reduced* and the output is a partial sum. One rule serves
propagation, search, cost and lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from shardwright.graph.graph import Op
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.torch_internals import pytree

Dims = tuple[str | None, ...]
"""The factor that each dimension of a tensor carries; None where it must stay whole."""

Cuts = Mapping[str, tuple[int, ...]]
"""For each factor that is cut the axes of the device matrix that cut it, most significant first."""


@dataclass(frozen=True)
class Main:
    """What makes an operator a main one: it weighs enough for the search to decide it by cost.

    Args:
        labels: factors in the order in which ties are broken, with their letter of the literature
            (`I`, `J`, `K`); factors that are not listed are not chosen by the search.
        weight: index of the input whose replication `mem_coeff` weighs (the weight), or None.
        exclusive: pairs of factors of which only one may be cut (J and K of a MatMul).
    """

    labels: Mapping[str, str]
    weight: int | None = 1
    exclusive: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Reduction:
    """An all-reduce inside a local operator: batch statistics, a cut class dimension.

    Args:
        factors: over the joined axes that cut these factors.
        kind: `"sum"` or `"max"`.
        varying: whether the gradient is all-reduced too (the result is read by differing shards).
        differentiable: whether any gradient passes.
        shape, dtype: of the reduced tensor on one device.
    """

    factors: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: bool = False
    differentiable: bool = True


Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reduce:
    """What carries out a `Reduction`; called on the tensor of one device.

    Args:
        run: all of it, with its gradient.
        start, end: the two halves of one without gradient; between them other work may be done.
    """

    run: Function
    start: Function
    end: Function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


@dataclass(frozen=True)
class Ahead:
    """A kernel that begins early: what `start` does needs few inputs, such as the targets of a
    loss, and other devices need not be waited for until `finish`.

    Args:
        reads: which of `Op.inputs` the first half takes.
        start: of their local tensors.
        finish: takes what `start` gave, and then the arguments of the kernel.
    """

    reads: tuple[int, ...]
    start: Callable[..., torch.Tensor]
    finish: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return self.finish(self.start(*(inputs[i] for i in self.reads)), *args, **kwargs)


@dataclass(frozen=True)
class Local:
    """What a kernel may know about the device it runs on.

    Args:
        parts: in how many parts each factor of the rule is cut (1 where it is whole).
        index: gives for a factor which of its parts this device has: an int, or a `SymInt` where
            many ranks are simulated at once.
        output_shapes: shapes of the local outputs.
        reduce: one function for each of the rule's `reductions`, in order.
    """

    parts: Mapping[str, int]
    index: Callable[[str], int | torch.SymInt]
    output_shapes: tuple[tuple[int, ...], ...]
    reduce: tuple[Reduce, ...] = ()


Kernel = Callable[[Op, Local], Callable[..., Any]]
"""Makes the function that computes the local outputs from the operator's `args` and `kwargs`, the
values in them replaced by local tensors."""


def no_reductions(op: Op, parts: Mapping[str, int]) -> tuple[Reduction, ...]:
    return ()


@dataclass(frozen=True)
class ShardingRule:
    """How one operator may be cut.

    Args:
        inputs: the factors of each tensor input, in the order of `Op.inputs`.
        outputs: the factors of each output.
        capacity: for each factor the number that its number of parts must divide: usually its size;
            for a dimension that a view splits, the size of the leading part.
        reduced: factors that some output lacks and that may be cut all the same: the local outputs
            are then terms of a sum.
        complete: factors that the kernel reduces itself (`reductions`): outputs that lack them are
            whole and equal on all devices that differ only in them.
        main: given for operators that the search decides by cost.
        kernel: makes the local function where it is not simply `op.target` on local tensors.
        reductions: all-reduces inside the kernel, for the parts that are cut.
        sizes: index of the argument that holds the sizes of the output (`view`, `expand`); it is
            replaced by the local sizes.
        random: whether it draws random numbers; seeded by the plan then.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    capacity: Mapping[str, int]
    reduced: frozenset[str] = frozenset()
    complete: frozenset[str] = frozenset()
    main: Main | None = None
    kernel: Kernel | None = None
    reductions: Callable[[Op, Mapping[str, int]], tuple[Reduction, ...]] = no_reductions
    sizes: int | None = None
    random: bool = False
    factors: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        named = {f: None for dims in (*self.inputs, *self.outputs) for f in dims if f is not None}
        object.__setattr__(self, "factors", tuple(f for f in named if self.may_cut(f)))

    def __str__(self) -> str:
        """The rule in notation: `b s k, j k -> b s j`, `_` for whole, `()` for a scalar."""

        def text(tensors: tuple[Dims, ...]) -> str:
            return ", ".join(" ".join(d or "_" for d in dims) or "()" for dims in tensors)

        return f"{text(self.inputs)} -> {text(self.outputs)}".lstrip()

    def may_cut(self, factor: str) -> bool:
        """Whether `factor` can be cut at all: it has size, and outputs without it may be sums."""
        if self.capacity.get(factor, 1) < 2:
            return False
        summed = self.reduced | self.complete
        return factor in summed or all(factor in dims for dims in self.outputs)

    def layouts(
        self, mesh: Layout, cuts: Cuts
    ) -> tuple[tuple[TensorLayout, ...], tuple[TensorLayout, ...]]:
        """The layouts in which a cut operator reads its inputs and leaves its outputs."""
        cut_axes = {axis: factor for factor, axes in cuts.items() for axis in axes}

        def axes_of(dims: Dims) -> tuple[tuple[int, ...], ...]:
            return tuple(cuts.get(f, ()) if f is not None else () for f in dims)

        def lacking(dims: Dims) -> frozenset[int]:
            return frozenset(axis for axis, factor in cut_axes.items() if factor not in dims)

        inputs = tuple(
            TensorLayout(mesh, axes_of(dims), varying=lacking(dims)) for dims in self.inputs
        )
        complete = {axis for axis, factor in cut_axes.items() if factor in self.complete}
        outputs = tuple(
            TensorLayout(mesh, axes_of(dims), partial=lacking(dims) - complete)
            for dims in self.outputs
        )
        return inputs, outputs

    def parts(self, mesh: Layout, cuts: Cuts) -> dict[str, int]:
        """In how many parts each factor is cut."""
        return {f: prod(mesh.device_matrix[a] for a in cuts.get(f, ())) for f in self.factors}


RuleMaker = Callable[[Op], ShardingRule | None]
_RULES: dict[Any, RuleMaker] = {}


def rule_for(*targets: Any) -> Callable[[RuleMaker], RuleMaker]:
    """Registers the function that makes the rule of these operators.

    Args:
        targets: ATen operators, other functions, or, for operators of a library that need not be
            imported, their names: `"library.operator.default"`.

    Raises:
        ValueError: an operator has a rule already.
    """

    def register(maker: RuleMaker) -> RuleMaker:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"{target} has a rule already: {_RULES[target].__qualname__}")
            _RULES[target] = maker
        return maker

    return register


def registered(target: Any) -> RuleMaker | None:
    """The function that makes the rule of `target`, or None."""
    return _RULES.get(target) or _RULES.get(str(target))


def registry() -> Mapping[Any, RuleMaker]:
    """All operators (or their names) that have a rule."""
    return MappingProxyType(_RULES)
