"""Sharding rules: how each operator can be sharded, in terms of named factors.

A rule names the dimensions of an operator's tensors like an einsum: a linear layer is `"b s k, j k
-> b s j"`. Sharding factor `b` over axes of the device matrix shards every tensor that has `b`. An
input without `b` is replicated over these axes, and its gradient is a partial sum; a factor that
the output lacks is *reduced*, and the output is a partial sum. Propagation, search, cost and
lowering all use this one rule. (Shardy's sharding rules are built on the same idea.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.layout.collective_spec import MovedRows
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout, interned_layout
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError

Dims = tuple[str | None, ...]
"""Factor of each dimension of a tensor; None for dimensions that cannot be sharded."""

Cuts = Mapping[str, tuple[int, ...]]
"""Indices of the mesh axes that shard each factor, most significant first, by factor."""

OperatorLayouts = tuple[tuple[TensorLayout, ...], tuple[TensorLayout, ...]]
"""Layouts of the inputs and of the outputs of an operator."""


@dataclass(frozen=True)
class MainFactors:
    """Factors of an expensive operator, among which the search chooses its cuts by cost.

    Args:
        labels: the label of each factor in the literature (`I`, `J`, `K`), by factor. The search
            shards only these factors; ties go to the first.
        weight: index of the input that is the weight; the search adds the cost of replicating it,
            times `mem_coeff`. None without a weight.
        exclusive: pairs of factors of which the search shards at most one, such as J and K of a
            matrix product.
    """

    labels: Mapping[str, str]
    weight: int | None = 1
    exclusive: tuple[tuple[str, str], ...] = ()


# Values of `Reduction.operation`, which `runtime/kernel_collectives.py` binds to process groups.
MIRROR, PREVIOUS, NEXT, RING, GATHER = "mirror", "previous", "next", "ring", "gather"
MOVE = "move"


@dataclass(frozen=True)
class Reduction:
    """A collective inside a kernel.

    Args:
        factors: the factors whose mesh axes span the process group.
        operation: `"sum"` or `"max"` for an all-reduce; `"gather"` for an all-gather along
            dimension 0; or an exchange of tensors between the n shards:

            - `"mirror"`: shard i swaps with shard n - 1 - i;
            - `"previous"`: shard i receives from shard i - 1, the first from the last;
            - `"next"`: shard i receives from shard i + 1, the last from the first;
            - `"ring"`: n - 1 exchanges of kind `"previous"`, overlapped with computation, until
              each tensor has visited all devices; the backward pass repeats them, for the tensors
              and their gradients;
            - `"move"`: each shard sends blocks of rows to others, as `moved` lists them.
        varying: whether the gradients of the result differ between devices, so that the backward
            pass runs a collective: a reduce-scatter for an all-gather, otherwise the forward
            collective.
        differentiable: whether the result has a gradient.
        shape, dtype: shape and dtype of the tensor that one device contributes, or of the result of
            an all-gather.
        moved: the rows that change their shard, if `operation` is `"move"`.
    """

    factors: tuple[str, ...]
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: bool = False
    differentiable: bool = True
    moved: MovedRows | None = None

    @property
    def ordered(self) -> bool:
        """Whether the result of the collective depends on the order of the shards."""
        # Not of a mirror, which reverses the coordinate on each axis, in whatever order axes are.
        return self.operation in (PREVIOUS, NEXT, RING, GATHER, MOVE)

    @property
    def collective(self) -> str:
        """Name, in `COLLECTIVES`, of the collective of the forward pass."""
        if self.operation == GATHER:
            return "all_gather"
        if self.moved is not None:
            return "all_to_all" if self.moved.is_even else "all_to_all_v"
        # A ring counts as its single exchanges, whose number `num_collectives` returns.
        return "permute" if self.operation in (MIRROR, PREVIOUS, NEXT, RING) else "all_reduce"

    @property
    def backward_collective(self) -> str:
        """Name, in `COLLECTIVES`, of the collective of the backward pass."""
        # The gradient of a permutation is the inverse permutation, which sends equally many bytes;
        # that of an all-reduce with a varying result is an all-reduce.
        return "reduce_scatter" if self.operation == GATHER else self.collective

    def num_collectives(self, group_size: int, differentiable: bool) -> tuple[int, int]:
        """Return the numbers of collectives in the forward and in the backward pass.

        Args:
            group_size: number of devices in the process group.
            differentiable: whether the operator has a backward pass.
        """
        # The keys of a device itself need no transfer, so n - 1 of n steps send.
        forward = group_size - 1 if self.operation == RING else 1
        has_backward = self.varying and self.differentiable and differentiable
        # In the backward pass of a ring both the tensors and their gradients travel.
        return forward, (2 if self.operation == RING else 1) * forward if has_backward else 0


TensorFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reduce:
    """A `Reduction` bound to its process group: a function that maps the local tensor to the
    result.

    Args:
        run: the complete, differentiable collective.
        start, end: the two halves of the collective, launch and wait, without gradient, so that
            computation can run in between.
        call_site: function that returns the line of the program that calls the collective, for
            errors in the backward pass.
    """

    run: TensorFunction
    start: TensorFunction
    end: TensorFunction
    call_site: Callable[[], object] = lambda: None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


@dataclass(frozen=True)
class TwoPhaseKernel:
    """A kernel that can launch its communication early.

    `start` needs only a few inputs, such as the targets of a loss; `finish` waits for the other
    devices.

    Args:
        reads: indices into `Op.inputs` of the inputs that `start` takes.
        start: function of the local tensors of the inputs in `reads`; launches the communication.
        finish: function of the result of `start` and the kernel's arguments; computes the outputs.
    """

    reads: tuple[int, ...]
    start: Callable[..., torch.Tensor]
    finish: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In the order of `Op.inputs`, which flattens the arguments in the same way.
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return self.finish(self.start(*(inputs[i] for i in self.reads)), *args, **kwargs)


@dataclass(frozen=True)
class LocalSharding:
    """The sharding of an operator on one device, from which its kernel is built.

    Args:
        shard_counts: the number of shards of each factor of the rule (1 if it is not sharded).
        index: function from a factor to the index of this device's shard: an int, or a `SymInt` if
            many ranks are simulated at once. Kernels call it while they are built, not in each run.
        output_shapes: shapes of the local outputs.
        reduce: one bound collective per entry of the rule's `reductions`, in order.
    """

    shard_counts: Mapping[str, int]
    index: Callable[[str], int | torch.SymInt]
    output_shapes: tuple[tuple[int, ...], ...]
    reduce: tuple[Reduce, ...] = ()


Kernel = Callable[[Op, LocalSharding], Callable[..., Any]]
"""Builds the function that computes an operator's local outputs on one device; the function takes
the operator's `args` and `kwargs`, with local tensors in place of graph values."""


def no_reductions(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """Return no reductions, for rules whose kernel has no collectives."""
    return ()


@dataclass(frozen=True)
class ShardingRule:
    """Shardable factors of one operator, and its local computation.

    Args:
        inputs: the factor of each dimension of each tensor input, in the order of `Op.inputs`.
        outputs: the factor of each dimension of each output.
        capacity: the number that the shard count of a factor must divide, by factor: usually the
            factor's size; for a dimension that a view splits, the size of the leading part.
        reduced: factors that an output lacks and that can be sharded: the local outputs are then
            partial sums.
        complete: factors that the kernel itself reduces (`reductions`): outputs without these
            factors are replicated, not partial sums.
        main: the factors among which the search chooses by cost; None if the operator follows the
            cuts of its neighbors.
        kernel: builder of the local computation; None if the operator itself runs on local tensors.
        reductions: function that returns the collectives inside the kernel, given the operator and
            the shard count of each factor.
        sizes: index of the positional argument that holds the sizes of the output (`view`,
            `expand`), which the program replaces by the local sizes; None without such an argument.
        random: whether the operator draws random numbers; programs then seed it.
        joined: outer factors with their inner factors, such as `s` with `ring`: both shard one
            dimension, the inner factor within shards of the outer. A search uses only one of them.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    capacity: Mapping[str, int]
    reduced: frozenset[str] = frozenset()
    complete: frozenset[str] = frozenset()
    main: MainFactors | None = None
    kernel: Kernel | None = None
    reductions: Callable[[Op, Mapping[str, int]], tuple[Reduction, ...]] = no_reductions
    sizes: int | None = None
    random: bool = False
    joined: Mapping[str, str] = field(default_factory=dict)
    factors: tuple[str, ...] = field(init=False)
    # A cache of `layouts`, so it takes no part in comparisons of rules.
    _layouts: dict[object, OperatorLayouts] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        # A dict, as its order, unlike that of a set of strings, is the same in every process.
        named = {f: None for dims in (*self.inputs, *self.outputs) for f in dims if f is not None}
        object.__setattr__(self, "factors", tuple(f for f in named if self.can_shard(f)))

    def __str__(self) -> str:
        """Return the rule in notation: `b s k, j k -> b s j`.

        `_` is a dimension that is never sharded, `()` a scalar, `s/ring` a dimension that two
        factors shard.
        """

        def tensors_text(tensors: tuple[Dims, ...]) -> str:
            named = ([self.factors_of_dim(d) or "_" for d in dims] for dims in tensors)
            return ", ".join(" ".join(map("/".join, dims)) or "()" for dims in named)

        return f"{tensors_text(self.inputs)} -> {tensors_text(self.outputs)}".lstrip()

    def can_shard(self, factor: str) -> bool:
        """Whether `factor` can be split into more than one shard."""
        if self.capacity.get(factor, 1) < 2:
            return False
        summed = self.reduced | self.complete
        # Devices would compute different values of an output that lacks the factor, unless these
        # are terms of a sum.
        return factor in summed or all(factor in self.factors_of(dims) for dims in self.outputs)

    def factors_of_dim(self, name: str | None) -> tuple[str, ...]:
        """Return the factors that shard a dimension with factor `name`: `name` and its outer
        factors.

        Returns () if `name` is None.
        """
        if name is None:
            return ()
        return (name, *(outer for outer, inner in self.joined.items() if inner == name))

    def factors_of(self, dims: Dims) -> frozenset[str]:
        """Return the factors that shard any dimension of a tensor with dimensions `dims`."""
        return frozenset(factor for name in dims for factor in self.factors_of_dim(name))

    def indivisible_factor(self, mesh: DeviceMatrix, cuts: Cuts) -> str | None:
        """Return the first inner factor in `joined` that has too many shards, or None.

        Its shard count times those of its outer factors must divide its capacity.
        """
        # The capacity of a factor that is alone on its dimension already bounds its own cuts.
        for factor in self.joined.values():
            shards = prod(mesh.size(cuts.get(f, ())) for f in self.factors_of_dim(factor))
            if self.capacity[factor] % shards:
                return factor
        return None

    def layouts(self, mesh: DeviceMatrix, cuts: Cuts) -> OperatorLayouts:
        """Return the layouts of inputs and outputs if the operator is sharded by `cuts`.

        Raises:
            StrategyError: if joined factors shard one dimension, and the product of their shard
                counts does not divide it.
        """
        # A search asks for the same layouts again and again: operators with equal shapes share
        # this rule, and each is tried with all cuts.
        key = mesh, tuple(cuts.items())
        if key not in self._layouts:
            self._layouts[key] = self._compute_layouts(mesh, cuts)
        return self._layouts[key]

    def _compute_layouts(self, mesh: DeviceMatrix, cuts: Cuts) -> OperatorLayouts:
        # The inverse of `cuts` is unique, since an axis shards at most one factor of an operator.
        cut_axes = {axis: factor for factor, axes in cuts.items() for axis in axes}
        factor = self.indivisible_factor(mesh, cuts)
        if factor is not None:
            factors = " and ".join(f"`{name}`" for name in self.factors_of_dim(factor))
            size = self.capacity[factor]
            raise StrategyError(
                f"`{self}`: the product of the shard counts of {factors} does not divide {size}\n"
                f"shard only one of them, or use shard counts whose product divides {size}"
            )

        def axes_of(dims: Dims) -> tuple[tuple[int, ...], ...]:
            # The axes of an outer factor come first: the inner one subdivides its shards.
            return tuple(
                tuple(axis for f in reversed(self.factors_of_dim(name)) for axis in cuts.get(f, ()))
                for name in dims
            )

        def missing_axes(dims: Dims) -> frozenset[int]:
            """Return the axes that shard the operator but not a tensor with dimensions `dims`."""
            present = self.factors_of(dims)
            return frozenset(axis for axis, name in cut_axes.items() if name not in present)

        # An input is replicated over missing axes, but each device uses the input for another shard
        # of the operator, so that its gradient is partial over these axes: `varying`.
        inputs = tuple(
            interned_layout(mesh, axes_of(dims), varying=missing_axes(dims)) for dims in self.inputs
        )
        # The kernel has reduced over these axes already, so that its outputs are no partial sums.
        complete = {axis for axis, factor in cut_axes.items() if factor in self.complete}
        outputs = tuple(
            interned_layout(mesh, axes_of(dims), partial=missing_axes(dims) - complete)
            for dims in self.outputs
        )
        return inputs, outputs

    def factors_of_moved_rows(self, op: Op) -> frozenset[str]:
        """Return the factors along which shards of outputs have rows of any shards of inputs."""
        if self.reductions is no_reductions:
            return frozenset()
        reductions = self.reductions(op, dict.fromkeys(self.factors, 2))
        moves = (each for each in reductions if each.operation in (MIRROR, MOVE))
        return frozenset(factor for each in moves for factor in each.factors)

    def local_output_shapes(
        self, op: Op, shard_counts: Mapping[str, int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the local outputs of `op`, given the shard count of each factor."""
        return tuple(
            # No factor is called "", so a dimension that cannot be sharded keeps its size.
            tuple(n // shard_counts.get(f or "", 1) for n, f in zip(value.shape, dims, strict=True))
            for value, dims in zip(op.outputs, self.outputs, strict=True)
        )

    def shard_counts(self, mesh: DeviceMatrix, cuts: Cuts) -> dict[str, int]:
        """Return the number of shards of each factor of the rule, 1 for factors not in `cuts`."""
        return {f: prod(mesh.device_matrix[a] for a in cuts.get(f, ())) for f in self.factors}


def depends_on_position(op: Op, rule: ShardingRule, factor: str) -> bool:
    """Whether a kernel sharded by `factor` depends on the shard's index, as a write to a shard
    does."""
    if rule.kernel is None:
        return False
    positions: list[str] = []

    def index(name: str) -> int:
        positions.append(name)
        return 0

    # Two shards, as kernels ask for their position only if the factor is sharded.
    counts = {name: 2 if name == factor else 1 for name in rule.factors}
    rule.kernel(op, LocalSharding(counts, index, rule.local_output_shapes(op, counts)))
    return bool(positions)


RuleMaker = Callable[[Op], ShardingRule | None]
# By operator, class of callable objects, or name (`rule_for`); a rule is built per call, as shapes
# and arguments decide which dimensions can be sharded.
_RULES: dict[Any, RuleMaker] = {}


def rule_for(*targets: Any) -> Callable[[RuleMaker], RuleMaker]:
    """Register the decorated function as the builder of the rules of `targets`.

    Args:
        targets: ATen operators, other functions, classes of callable objects, or names of library
            operators, `"library.operator.default"`, whose library need not be importable.

    Raises:
        ValueError: if an operator already has a rule.
    """

    def register(maker: RuleMaker) -> RuleMaker:
        for target in targets:
            if target in _RULES:
                builder = _RULES[target].__qualname__
                raise ValueError(
                    f"`{target}` already has a sharding rule, built by `{builder}`\n"
                    "remove one of the two rules"
                )
            _RULES[target] = maker
        return maker

    return register


def find_rule_maker(target: Any) -> RuleMaker | None:
    """Return the function that builds the rule of `target` or of its class; None if no rule is
    registered."""
    # By class for `LocalCall` objects, by name for operators of libraries that are not imported.
    return _RULES.get(target) or _RULES.get(type(target)) or _RULES.get(str(target))


def num_rules() -> int:
    """Return the number of registered rules; caches compare it to detect registrations."""
    return len(_RULES)


def registered_rules() -> Mapping[Any, RuleMaker]:
    """Return a read-only view of the rule builders, by operator, class or operator name."""
    return MappingProxyType(_RULES)
