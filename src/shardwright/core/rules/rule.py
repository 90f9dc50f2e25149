"""Sharding rules: how each operator can be cut, in terms of named factors.

A rule names the dimensions of an operator's tensors like an einsum: a linear layer is
`"b s k, j k -> b s j"`. *Cutting* factor `b` over axes of the device matrix shards every tensor
that carries `b`. A tensor that lacks it is read whole and its gradient is a partial sum; if the
output lacks it, the factor is *reduced* and the output is a partial sum. Propagation, search, cost
and lowering all use this one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout, one_layout
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError

Dims = tuple[str | None, ...]
"""The factor that each dimension of a tensor carries; None for dimensions that cannot be cut."""

Cuts = Mapping[str, tuple[int, ...]]
"""For each cut factor the axes of the device matrix that cut it, most significant first."""

OperatorLayouts = tuple[tuple[TensorLayout, ...], tuple[TensorLayout, ...]]
"""The layouts of the inputs of an operator and of its outputs."""


@dataclass(frozen=True)
class Main:
    """Marks a main operator, one that is expensive enough for the search to decide by cost.

    Args:
        labels: factors with their label in the literature (`I`, `J`, `K`), in the order that breaks
            ties; the search does not choose factors that are not listed.
        weight: index of the input whose replication `mem_coeff` weighs, or None.
        exclusive: pairs of factors of which only one can be cut (J and K of a matrix product).
    """

    labels: Mapping[str, str]
    weight: int | None = 1
    exclusive: tuple[tuple[str, str], ...] = ()


MIRROR, PREVIOUS, RING = "mirror", "previous", "ring"


@dataclass(frozen=True)
class Reduction:
    """A collective inside a local operator: an all-reduce, for batch statistics or a cut class
    dimension, or an exchange of tensors, for equal shares of the work.

    Args:
        factors: it is over all axes that cut these factors.
        kind: `"sum"`, `"max"`, or an exchange: `"mirror"`, in which each device gets the tensor of
            the one whose shard is as far from the last as its own is from the first, or
            `"previous"`, that of the one with the shard before, and the first that of the last; or
            `"ring"`: the same until each tensor has been on all devices, beside the computation,
            and again in the backward pass, with its gradient.
        varying: whether the gradient is sent likewise, because different shards read the result.
        differentiable: whether a gradient passes.
        shape, dtype: of the reduced tensor on one device.
    """

    factors: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: bool = False
    differentiable: bool = True

    @property
    def ordered(self) -> bool:
        """Whether the order of the axes matters, of which the first counts most."""
        return self.kind in (PREVIOUS, RING)

    @property
    def collective(self) -> str:
        """Its kind of `COLLECTIVES`."""
        return "permute" if self.kind in (MIRROR, PREVIOUS, RING) else "all_reduce"

    def times(self, group: int, differentiable: bool) -> tuple[int, int]:
        """How often that collective runs in a group of so many devices, forward and backward.

        Args:
            differentiable: whether a gradient comes back to the operator.
        """
        forward = group - 1 if self.kind == RING else 1
        back = self.varying and self.differentiable and differentiable
        # Round a ring the gradient of each tensor follows it.
        return forward, (2 if self.kind == RING else 1) * forward if back else 0


Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reduce:
    """Executes a `Reduction` on the tensor of one device.

    Args:
        run: all of it, with its gradient.
        start, end: launch and wait, for a reduction without gradient; other work can run between.
        place: where in the program it is called, for errors in the backward pass.
    """

    run: Function
    start: Function
    end: Function
    place: Callable[[], object] = lambda: None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


@dataclass(frozen=True)
class TwoPhaseKernel:
    """A kernel that can launch its communication early.

    `start` needs only a few inputs, such as the targets of a loss; `finish` waits for the other
    devices.

    Args:
        reads: indices into `Op.inputs` of the inputs that `start` takes.
        start: the first half, called on their local tensors.
        finish: the second half, called on the result of `start` and the arguments of the kernel.
    """

    reads: tuple[int, ...]
    start: Callable[..., torch.Tensor]
    finish: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return self.finish(self.start(*(inputs[i] for i in self.reads)), *args, **kwargs)


@dataclass(frozen=True)
class Local:
    """The device on which a kernel runs, as far as a kernel needs to know it.

    Args:
        shard_counts: the number of shards of each factor of the rule (1 if it is not cut).
        index: from a factor to the index of this device's shard: an int, or a `SymInt` if many
            ranks are simulated at once.
        output_shapes: shapes of the local outputs.
        reduce: one function per reduction in the rule's `reductions`, in order.
    """

    shard_counts: Mapping[str, int]
    index: Callable[[str], int | torch.SymInt]
    output_shapes: tuple[tuple[int, ...], ...]
    reduce: tuple[Reduce, ...] = ()


Kernel = Callable[[Op, Local], Callable[..., Any]]
"""Builds the function that computes the local outputs from the operator's `args` and `kwargs`, with
local tensors in place of their values."""


def no_reductions(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    return ()


@dataclass(frozen=True)
class ShardingRule:
    """How one operator can be cut.

    Args:
        inputs: the factors of each tensor input, in the order of `Op.inputs`.
        outputs: the factors of each output.
        capacity: for each factor the number that its shard count must divide: usually its size; for
            a dimension that a view splits, the size of the leading part.
        reduced: factors that an output lacks but that can be cut: the local outputs are then terms
            of a sum.
        complete: factors that the kernel reduces itself (`reductions`): outputs that lack them are
            complete, and equal on all devices that differ only in them.
        main: set for operators that the search decides by cost.
        kernel: builds the local function if it is not simply `op.target` on local tensors.
        reductions: the collectives inside the kernel, given the shard counts of the factors.
        sizes: index of the argument with the sizes of the output (`view`, `expand`), which is
            replaced by the local sizes.
        random: whether the operator draws random numbers, which the plan then seeds.
        joined: for a factor that cuts also the dimensions of another, that other, which cuts them
            further if an operator is cut by both. Searches cut by one of the two.
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
    joined: Mapping[str, str] = field(default_factory=dict)
    factors: tuple[str, ...] = field(init=False)
    _layouts: dict[object, OperatorLayouts] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        named = {f: None for dims in (*self.inputs, *self.outputs) for f in dims if f is not None}
        object.__setattr__(self, "factors", tuple(f for f in named if self.may_cut(f)))

    def __str__(self) -> str:
        """The rule in notation: `b s k, j k -> b s j`; `_` is never cut, `()` is a scalar,
        and `s/ring` is cut by both."""

        def text(tensors: tuple[Dims, ...]) -> str:
            named = ([self.cutting(d) or "_" for d in dims] for dims in tensors)
            return ", ".join(" ".join(map("/".join, dims)) or "()" for dims in named)

        return f"{text(self.inputs)} -> {text(self.outputs)}".lstrip()

    def may_cut(self, factor: str) -> bool:
        """Whether `factor` can be cut at all: its capacity is above 1, and outputs that lack it may
        be partial sums."""
        if self.capacity.get(factor, 1) < 2:
            return False
        summed = self.reduced | self.complete
        return factor in summed or all(factor in self.carried(dims) for dims in self.outputs)

    def cutting(self, name: str | None) -> tuple[str, ...]:
        """The factors that cut a dimension of this name: its own, and those joined with it."""
        if name is None:
            return ()
        return (name, *(factor for factor, other in self.joined.items() if other == name))

    def carried(self, dims: Dims) -> frozenset[str]:
        """The factors that cut a tensor."""
        return frozenset(factor for name in dims for factor in self.cutting(name))

    def too_many(self, mesh: DeviceMatrix, cuts: Cuts) -> str | None:
        """A factor that does not divide further what others that are joined with it have left."""
        for factor in self.joined.values():
            shards = prod(mesh.size(cuts.get(each, ())) for each in self.cutting(factor))
            if self.capacity[factor] % shards:
                return factor
        return None

    def layouts(self, mesh: DeviceMatrix, cuts: Cuts) -> OperatorLayouts:
        """Those of an operator that is cut by `cuts`.

        Raises:
            StrategyError: if two factors cut the same dimension, which the two do not divide.
        """
        key = mesh, tuple(cuts.items())
        if key not in self._layouts:
            self._layouts[key] = self._layouts_of(mesh, cuts)
        return self._layouts[key]

    def _layouts_of(self, mesh: DeviceMatrix, cuts: Cuts) -> OperatorLayouts:
        cut_axes = {axis: factor for factor, axes in cuts.items() for axis in axes}
        factor = self.too_many(mesh, cuts)
        if factor is not None:
            size, shards = self.capacity[factor], " and ".join(self.cutting(factor))
            raise StrategyError(f"`{self}`: the shards of {shards} together do not divide {size}")

        def axes_of(dims: Dims) -> tuple[tuple[int, ...], ...]:
            # What cuts further dimensions too is the more significant.
            return tuple(
                tuple(axis for f in reversed(self.cutting(name)) for axis in cuts.get(f, ()))
                for name in dims
            )

        def lacking(dims: Dims) -> frozenset[int]:
            carried = self.carried(dims)
            return frozenset(axis for axis, factor in cut_axes.items() if factor not in carried)

        inputs = tuple(
            one_layout(mesh, axes_of(dims), varying=lacking(dims)) for dims in self.inputs
        )
        complete = {axis for axis, factor in cut_axes.items() if factor in self.complete}
        outputs = tuple(
            one_layout(mesh, axes_of(dims), partial=lacking(dims) - complete)
            for dims in self.outputs
        )
        return inputs, outputs

    def shard_counts(self, mesh: DeviceMatrix, cuts: Cuts) -> dict[str, int]:
        """The number of shards of each factor."""
        return {f: prod(mesh.device_matrix[a] for a in cuts.get(f, ())) for f in self.factors}


RuleMaker = Callable[[Op], ShardingRule | None]
_RULES: dict[Any, RuleMaker] = {}


def rule_for(*targets: Any) -> Callable[[RuleMaker], RuleMaker]:
    """Registers the decorated function as the one that builds the rule of these operators.

    Args:
        targets: ATen operators, other functions, or the names of operators of a library that need
            not be imported: `"library.operator.default"`.

    Raises:
        ValueError: if an operator already has a rule.
    """

    def register(maker: RuleMaker) -> RuleMaker:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"{target} already has a rule: {_RULES[target].__qualname__}")
            _RULES[target] = maker
        return maker

    return register


def find_rule_maker(target: Any) -> RuleMaker | None:
    """The function that builds the rule of `target`, or None."""
    return _RULES.get(target) or _RULES.get(str(target))


def num_rules() -> int:
    """How many operators (or their names) have a rule."""
    return len(_RULES)


def registry() -> Mapping[Any, RuleMaker]:
    """All operators (or their names) that have a rule."""
    return MappingProxyType(_RULES)
