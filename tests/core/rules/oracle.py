"""Compares an operator that runs on shards, cut in every way its rule allows, with the whole one.

`check(target, *args, **kwargs)` cuts every factor over meshes (2,), (3,) and (2, 2) where the
capacity permits it, and every pair of factors over (2, 2); values and gradients must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalIntNode, LocalTensor
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from shardwright.core.graph.graph import Op, Value
from shardwright.core.layout.collective_spec import MovedRows
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.rules import find_maker, rule_of
from shardwright.core.rules.rule import (
    GATHER,
    MIRROR,
    NEXT,
    PREVIOUS,
    RING,
    Cuts,
    LocalSharding,
    Reduce,
    Reduction,
    ShardingRule,
)
from shardwright.core.torch_internals.local_tensors import LocalTensorMode

Index = Callable[[str], int | torch.SymInt]
Reduces = tuple[Reduce, ...]
Blocks = tuple[tuple[int, ...], ...]


def operator_name(value: Any) -> str | None:
    """The name of what a test is of; arguments, whose tensors are random, are only numbered."""
    return str(value) if isinstance(value, torch._ops.OpOverload) else None


def op_of(target: Any, *args: Any, **kwargs: Any) -> Op:
    """The operator `target(*args, **kwargs)` with a value in place of each tensor."""
    outputs = _tensors(target(*args, **kwargs))
    values = pytree.tree_map_only(Tensor, _value, (args, kwargs))
    return Op("op", target, *values, tuple(_value(tensor) for tensor in outputs))


def check(target: Any, *args: Any, **kwargs: Any) -> ShardingRule:
    """Compares all cuts of `target(*args, **kwargs)` with the whole; returns the rule.

    Floating tensors should be float64; those given as `torch.nn.Buffer` get no gradient. Of
    operators that draw random numbers only shapes are compared.
    """
    op = op_of(target, *args, **kwargs)
    found = rule_of(op)
    assert found is not None, f"{target} has no rule"
    case = Case(op, _tensors((args, kwargs)), found)
    # Operators share a rule whether or not they have gradients.
    frozen = _without_gradients(op)
    rule_of_frozen = find_maker(target)(frozen)
    for mesh, cuts in cuts_of(case.rule):
        counts = found.shard_counts(mesh, cuts)
        assert found.reductions(frozen, counts) == rule_of_frozen.reductions(frozen, counts)
        try:
            case.compare(mesh, cuts)
        except Exception as error:
            error.add_note(f"{target}: {case.rule}, cuts {cuts} on {mesh.device_matrix}")
            raise
    return case.rule


def cuts_of(found: ShardingRule) -> Iterator[tuple[Layout, Cuts]]:
    """Every factor on three meshes (and the axes of the last swapped), every pair of factors."""
    two, three = Layout((2,), ("a",)), Layout((3,), ("a",))
    square = Layout((2, 2), ("a", "b"))
    for factor in found.factors:
        for mesh, axes in ((two, (0,)), (three, (0,)), (square, (0, 1)), (square, (1, 0))):
            if found.capacity[factor] % mesh.size(axes) == 0:
                yield mesh, {factor: axes}
    for first, second in combinations(found.factors, 2):
        cuts = {first: (0,), second: (1,)}
        halves = found.capacity[first] % 2 == 0 and found.capacity[second] % 2 == 0
        if halves and not found.indivisible_factor(square, cuts):
            yield square, cuts


@dataclass
class Case:
    """An operator with the tensors that it reads, a rule for it, and how far results may differ."""

    op: Op
    tensors: list[Tensor]
    rule: ShardingRule
    tolerance: float | None = None

    def __post_init__(self) -> None:
        whole = [_leaf(tensor, tensor) for tensor in self.tensors]
        outputs = _run(self.op.target, self.op, whole)
        torch.manual_seed(1)
        self.output_gradients = [
            torch.randn_like(output) if output.requires_grad else None for output in outputs
        ]
        self.gradients = _gradients(outputs, whole, self.output_gradients)
        self.outputs = [output.detach() for output in outputs]

    def compare(self, mesh: Layout, cuts: Cuts) -> None:
        """Runs the shards, puts their results together and compares."""
        reductions = self.rule.reductions(self.op, self.rule.shard_counts(mesh, cuts))
        if not reductions:
            self._compare(mesh, cuts, [self._on_rank(mesh, cuts, r) for r in mesh.ranks])
        if self.rule.kernel is not None:
            self._compare(mesh, cuts, self._on_all_ranks(mesh, cuts, reductions))

    def _compare(
        self, mesh: Layout, cuts: Cuts, results: list[tuple[list[Tensor], list[Tensor | None]]]
    ) -> None:
        inputs, outputs = self.rule.layouts(mesh, cuts)
        for i, (whole, layout) in enumerate(zip(self.outputs, outputs, strict=True)):
            parts = [result[0][i] for result in results]
            for part in parts:
                assert tuple(part.shape) == layout.shard_shape(tuple(whole.shape))
            if not self.rule.random:
                self._assert_close(_together(parts, layout, whole), whole)
        for i, (gradient, layout) in enumerate(zip(self.gradients, inputs, strict=True)):
            parts = [result[1][i] for result in results]
            assert {part is None for part in parts} == {gradient is None}
            if gradient is not None and not self.rule.random:
                self._assert_close(_together(parts, layout, gradient), gradient)

    def _assert_close(self, found: Tensor, whole: Tensor) -> None:
        at_most = self.tolerance
        assert_close(found, whole, rtol=at_most, atol=at_most, equal_nan=True)

    def _on_rank(
        self, mesh: Layout, cuts: Cuts, rank: int
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        inputs, outputs = self.rule.layouts(mesh, cuts)
        local = [_shard(t, layout, rank) for t, layout in zip(self.tensors, inputs, strict=True)]
        gradients = [
            None if g is None else _shard(g, layout, rank)
            for g, layout in zip(self.output_gradients, outputs, strict=True)
        ]
        return self._step(mesh, cuts, local, gradients, lambda f: _part(mesh, cuts, f, rank), ())

    def _on_all_ranks(
        self, mesh: Layout, cuts: Cuts, reductions: tuple[Reduction, ...]
    ) -> list[tuple[list[Tensor], list[Tensor | None]]]:
        inputs, outputs = self.rule.layouts(mesh, cuts)
        with _simulated(mesh) as mode:

            def place(tensor: Tensor, layout: TensorLayout) -> Tensor:
                return mode.rank_map(lambda rank: _shard(tensor, layout, rank))

            def index(factor: str) -> int | torch.SymInt:
                return torch.SymInt(
                    LocalIntNode({r: _part(mesh, cuts, factor, r) for r in mesh.ranks})
                )

            local = [place(t, layout) for t, layout in zip(self.tensors, inputs, strict=True)]
            gradients = [
                None if g is None else place(g, layout)
                for g, layout in zip(self.output_gradients, outputs, strict=True)
            ]
            reduce = tuple(_collective(mesh, cuts, reduction) for reduction in reductions)
            results = self._step(mesh, cuts, local, gradients, index, reduce)

            def on(rank: int, tensor: Tensor | None) -> Tensor | None:
                is_local = isinstance(tensor, LocalTensor)
                return tensor._local_tensors[rank] if is_local else tensor

            return [tuple([on(r, t) for t in group] for group in results) for r in mesh.ranks]

    def _step(
        self,
        mesh: Layout,
        cuts: Cuts,
        tensors: list[Tensor],
        output_gradients: list[Tensor | None],
        index: Index,
        reduce: Reduces,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        layouts = self.rule.layouts(mesh, cuts)[1]
        shapes = tuple(
            layout.shard_shape(value.shape)
            for layout, value in zip(layouts, self.op.outputs, strict=True)
        )
        kernel = self.op.target
        if self.rule.kernel is not None:
            local = LocalSharding(self.rule.shard_counts(mesh, cuts), index, shapes, reduce)
            kernel = self.rule.kernel(self.op, local)
        sizes = None if self.rule.sizes is None else (self.rule.sizes, list(shapes[0]))
        leaves = [_leaf(*pair) for pair in zip(tensors, self.tensors, strict=True)]
        outputs = _run(kernel, self.op, leaves, sizes)
        gradients = _gradients(outputs, leaves, output_gradients)
        return [output.detach() for output in outputs], gradients


def _value(tensor: Tensor) -> Value:
    is_trained = _is_trained(tensor, tensor)
    return Value("tensor", tuple(tensor.shape), tensor.dtype, requires_grad=is_trained)


def _without_gradients(op: Op) -> Op:
    """An equal operator that no gradient reaches."""
    freeze = partial(replace, requires_grad=False)
    args, kwargs, outputs = pytree.tree_map_only(Value, freeze, (op.args, op.kwargs, op.outputs))
    return Op(op.name, op.target, args, kwargs, outputs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _leaf(tensor: Tensor, given: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(_is_trained(tensor, given))


def _is_trained(tensor: Tensor, given: Tensor) -> bool:
    return tensor.is_floating_point() and not isinstance(given, torch.nn.Buffer)


def _shard(tensor: Tensor, layout: TensorLayout, rank: int) -> Tensor:
    return tensor.detach()[layout.slices(rank, tuple(tensor.shape))].clone()


def _part(mesh: Layout, cuts: Cuts, factor: str, rank: int) -> int:
    place, part = mesh.coordinates(rank), 0
    for axis in cuts.get(factor, ()):
        part = part * mesh.device_matrix[axis] + place[axis]
    return part


def _run(
    function: Any, op: Op, tensors: list[Tensor], sizes: tuple[int, list[int]] | None = None
) -> list[Tensor]:
    filled = dict(zip(op.inputs, tensors, strict=True))
    args, kwargs = op.arguments(lambda value: filled[value])
    if sizes is not None:
        args = (*args[: sizes[0]], sizes[1], *args[sizes[0] + 1 :])
    return _tensors(function(*args, **kwargs))


def _gradients(
    outputs: list[Tensor], inputs: list[Tensor], gradients: list[Tensor | None]
) -> list[Tensor | None]:
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    roots, seeds = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def _together(parts: list[Tensor], layout: TensorLayout, whole: Tensor) -> Tensor:
    """The whole tensor from the parts of all ranks: shards side by side, terms added."""
    mesh, shape = layout.layout, tuple(whole.shape)
    distinct = layout.sharded | layout.partial | layout.varying
    result = torch.zeros_like(whole)
    first: dict[tuple[int, ...], Tensor] = {}
    for rank, part in zip(mesh.ranks, parts, strict=True):
        place = mesh.coordinates(rank)
        key = tuple(place[axis] for axis in sorted(distinct))
        if key in first:
            assert_close(part, first[key], equal_nan=True, msg=f"replicas of {layout} differ")
            continue
        first[key] = part
        where = layout.slices(rank, shape)
        result[where] = result[where] + part if layout.partial | layout.varying else part
    return result


@contextmanager
def _simulated(mesh: Layout) -> Iterator[LocalTensorMode]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.num_devices)
    try:
        with LocalTensorMode(mesh.num_devices) as mode:
            yield mode
    finally:
        dist.destroy_process_group()


def _collective(mesh: Layout, cuts: Cuts, reduction: Reduction) -> Reduce:
    axes = {axis for factor in reduction.factors for axis in cuts.get(factor, ())}
    if mesh.size(frozenset(axes)) == 1:
        return lambda tensor: tensor
    if reduction.moved is not None:
        return _move(mesh, cuts, reduction, reduction.moved)
    if reduction.operation in (MIRROR, PREVIOUS, NEXT, RING):
        return _exchange(mesh, cuts, reduction)
    if reduction.operation == GATHER:
        return _gather(mesh, cuts, reduction)
    ranks = [
        rank
        for rank in mesh.ranks
        if all(axis in axes or not at for axis, at in enumerate(mesh.coordinates(rank)))
    ]
    assert len(ranks) == prod(mesh.device_matrix[axis] for axis in axes)
    group = dist.new_group(ranks).group_name

    def reduce(tensor: Tensor) -> Tensor:
        assert tuple(tensor.shape) == tuple(reduction.shape), "not the shape that was declared"
        assert tensor.dtype == reduction.dtype, "not the dtype that was declared"
        if not reduction.differentiable:
            return _reduced(tensor.detach(), reduction.operation, group)
        return _AllReduce.apply(tensor, reduction.operation, group, reduction.varying)

    return Reduce(reduce, reduce, lambda tensor: tensor)


def _gather(mesh: Layout, cuts: Cuts, reduction: Reduction) -> Reduce:
    """Gathers blocks as the sum of tensors that are zero outside of each rank's own block."""
    number = torch.SymInt(LocalIntNode({r: _block(mesh, cuts, reduction, r) for r in mesh.ranks}))
    reduce_sum = _collective(mesh, cuts, replace(reduction, operation="sum"))

    def gather(tensor: Tensor) -> Tensor:
        assert tuple(tensor.shape) == (1, *reduction.shape[1:]), "not the shape that was declared"
        count = reduction.shape[0]
        is_own = (torch.arange(count) == number).view(-1, *(1,) * (tensor.ndim - 1))
        return reduce_sum(torch.where(is_own, tensor, torch.zeros((), dtype=tensor.dtype)))

    return Reduce(gather, gather, lambda tensor: tensor)


def _block(mesh: Layout, cuts: Cuts, reduction: Reduction, rank: int) -> int:
    block = 0
    for factor in reduction.factors:
        size = mesh.size(frozenset(cuts.get(factor, ())))
        block = block * size + _part(mesh, cuts, factor, rank)
    return block


def _exchange(mesh: Layout, cuts: Cuts, reduction: Reduction) -> Reduce:
    (factor,) = reduction.factors
    count = mesh.size(cuts[factor])

    def source(rank: int) -> int:
        """The rank like this one that holds the block which this one gets."""
        mine = _part(mesh, cuts, factor, rank)
        wanted = {MIRROR: count - 1 - mine, NEXT: (mine + 1) % count}.get(
            reduction.operation, (mine - 1) % count
        )
        return next(
            r for r in mesh.ranks if _part(mesh, cuts, factor, r) == wanted and like(r, rank)
        )

    def like(one: int, other: int) -> bool:
        places = zip(mesh.coordinates(one), mesh.coordinates(other), strict=True)
        return all(a == b for axis, (a, b) in enumerate(places) if axis not in cuts[factor])

    came_from = {rank: source(rank) for rank in mesh.ranks}
    went_to = {source: rank for rank, source in came_from.items()}

    def sent(tensor: Tensor, sources: dict[int, int]) -> Tensor:
        assert isinstance(tensor, LocalTensor)
        assert tuple(tensor.shape) == tuple(reduction.shape), "not the shape that was declared"
        assert tensor.dtype == reduction.dtype, "not the dtype that was declared"
        parts = tensor._local_tensors
        return LocalTensor({rank: parts[sources[rank]].clone() for rank in mesh.ranks})

    def run(tensor: Tensor) -> Tensor:
        return _Exchange.apply(
            tensor, lambda x: sent(x, came_from), lambda gradient: sent(gradient, went_to)
        )

    return Reduce(run, lambda x: sent(x, came_from), lambda tensor: tensor)


def _move(mesh: Layout, cuts: Cuts, reduction: Reduction, moved: MovedRows) -> Reduce:
    """Looks up each block of each rank's new shard among the old shards of the ranks like it."""
    (factor,) = reduction.factors

    def like(rank: int) -> tuple[int, ...]:
        places = enumerate(mesh.coordinates(rank))
        return tuple(at for axis, at in places if axis not in cuts[factor])

    def sent(tensor: Tensor, before: Blocks, after: Blocks) -> Tensor:
        assert isinstance(tensor, LocalTensor)
        assert tuple(tensor.shape) == tuple(reduction.shape), "not the shape that was declared"
        assert tensor.dtype == reduction.dtype, "not the dtype that was declared"
        blocks = {
            (like(rank), number): block
            for rank in mesh.ranks
            for number, block in zip(
                before[_part(mesh, cuts, factor, rank)],
                tensor._local_tensors[rank].chunk(len(before[0]), moved.dim),
                strict=True,
            )
        }
        return LocalTensor(
            {
                rank: torch.cat(
                    [blocks[like(rank), n] for n in after[_part(mesh, cuts, factor, rank)]],
                    moved.dim,
                )
                for rank in mesh.ranks
            }
        )

    def run(tensor: Tensor) -> Tensor:
        return _Exchange.apply(
            tensor,
            lambda x: sent(x, moved.source, moved.target),
            lambda gradient: sent(gradient, moved.target, moved.source),
        )

    return Reduce(run, run, lambda tensor: tensor)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _reduced(tensor: Tensor, kind: str, group: str) -> Tensor:
    started = torch.ops._c10d_functional.all_reduce(tensor.contiguous(), kind, group)
    return torch.ops._c10d_functional.wait_tensor(started)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, kind: str, group: str, varying: bool) -> Tensor:
        ctx.group, ctx.varying = group, varying
        return _reduced(tensor, kind, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        found = _reduced(gradient, "sum", ctx.group) if ctx.varying else gradient
        return found, None, None, None
