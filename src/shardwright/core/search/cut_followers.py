"""Operators that no search weighs take the cuts of their neighbors where that sends no more.

A search decides some operators by cost and lets the others follow: a norm between a residual
stream that is whole and a product that is cut along the batch is then as the stream is, though the
stream can be sliced before the norm as well as behind it, and each device computes only its part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import sub

from shardwright.core.cost.symbolic import REDISTRIBUTION_PER_ELEMENT
from shardwright.core.graph.graph import Kind, Op
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.rules.rule import Cuts, ShardingRule
from shardwright.core.search.cut_moves import (
    CutMoves,
    FactorOfAxis,
    SharedTensor,
    factor_of_axis,
    least_sent,
)
from shardwright.core.search.decided_layouts import (
    DecidedLayouts,
    bare,
    inner_reductions,
    tensor_context,
)
from shardwright.core.search.request import CutsOfGraph, SearchRequest

MESSAGE = 2**20
"""The bytes that a link sends while a message is on its way: 0.8 μs at 450 GB/s, 3 μs at 300."""


def with_cut_followers(request: SearchRequest, cuts: CutsOfGraph) -> list[CutsOfGraph]:
    """`cuts` with followers cut as their neighbors are; then, if that differs, `cuts` themselves:
    the prediction of a whole plan knows more of what is sent."""
    followed = cut_followers(request, cuts)
    return [followed] if followed == cuts else [followed, cuts]


def cut_followers(request: SearchRequest, cuts: Mapping[str, Cuts]) -> CutsOfGraph:
    """`cuts`, with operators that have no cost of their own cut on further axes as a neighbor is.

    First one by one, forward and backward, then together all that are whole on an axis and next to
    each other. Pinned operators stay.
    """
    ops, followers = request.graph.ops, _Followers(request, cuts)
    free = [op for op in ops if op.name not in request.pinned and followers.may_follow(op)]
    for op in (*free, *reversed(free)):
        followers.follow(op)
    settled = set()
    for axis in followers.axes:
        # Of axes that are alike it is enough to try one, if nothing follows on it.
        alike = tuple(cut.get(axis) for cut in followers.cut.values())
        regions = () if alike in settled else followers.regions(free, axis)
        followed = [followers.follow_together(region, axis) for region in regions]
        if not any(followed):
            settled.add(alike)
    return {op.name: followers.cuts[op.name] for op in ops if followers.cuts[op.name]}


class _Followers(DecidedLayouts):
    """Decisions about all operators, some of which may follow others."""

    def __init__(self, request: SearchRequest, cuts: Mapping[str, Cuts]) -> None:
        super().__init__(request.graph, request.mesh, request.outputs)
        for value in self.graph.input_values:
            if value.name in request.arrivals:
                self.sources[value] = TensorLayout(self.mesh, request.arrivals[value.name])
        self.cut: dict[str, FactorOfAxis] = {}
        self.near = {op.name: tuple(dict.fromkeys(self._near(op))) for op in self.graph.ops}
        for op in self.graph.ops:
            self.decide(op, cuts.get(op.name, {}))
        self.axes = tuple(axis for axis, size in enumerate(self.mesh.device_matrix) if size > 1)
        self.reduced = {frozenset(), *self._varying(self.graph.ops)}

    def _near(self, op: Op) -> Iterator[str]:
        """The names of those next to `op`, and of those that read an activation as it does."""
        for value in op.inputs:
            if value.requires_grad and value.kind is not Kind.PARAMETER:
                yield from (
                    reader.name for reader, _ in self.graph.consumers[value] if reader is not op
                )
        yield from (other.name for _, other in self.neighbors(op))

    def decide(self, op: Op, cuts: Cuts) -> None:
        super().decide(op, cuts)
        self.cut[op.name] = factor_of_axis(cuts)

    def may_follow(self, op: Op) -> bool:
        rule = self.rules[op.name]
        return rule is not None and rule.main is None and bool(rule.factors)

    def follow(self, op: Op) -> None:
        """Cuts `op` further as the first neighbor for which that costs no more."""
        for further in self._further(op, self.axes):
            if self._keeps([op], partial(self.decide, op, further)):
                return

    def regions(self, ops: Sequence[Op], axis: int) -> Iterator[list[Op]]:
        """Those that are whole on `axis`, each with those it is joined to by values."""
        whole = {op.name: op for op in ops if axis not in self.cut[op.name]}
        while whole:
            region = [whole.pop(next(iter(whole)))]
            borders = False
            for op in region:
                borders |= any(axis in self.cut[name] for name in self.near[op.name])
                region += [whole.pop(name) for name in self.near[op.name] if name in whole]
            if borders:
                yield region

    def follow_together(self, region: Sequence[Op], axis: int) -> bool:
        """Lets a region follow its neighbors as far as it can, if that costs no more; whether."""

        def spread() -> None:
            members = {op.name: op for op in region}
            queue = deque(region)
            while queue:
                op = queue.popleft()
                for further in islice(self._further(op, (axis,)), 1):
                    self.decide(op, further)
                    queue.extend(members[name] for name in self.near[op.name] if name in members)

        return self._keeps(region, spread)

    def _keeps(self, ops: Sequence[Op], change: Callable[[], None]) -> bool:
        """Whether `change` of these operators stays: it sends no more, gradients of parameters are
        summed up with others, and take less than what it saves is worth."""
        before, costs = {op: self.cuts[op.name] for op in ops}, self._costs(ops)
        change()
        messages, sent, gradients, held = map(sub, self._costs(ops), costs)
        sends_more = sent > 0 or sent + MESSAGE * messages > 0 or self._varying(ops) - self.reduced
        if sends_more or gradients * REDISTRIBUTION_PER_ELEMENT + held > 0:
            for op, cuts in before.items():
                self.decide(op, cuts)
        return any(self.cuts[op.name] != cuts for op, cuts in before.items())

    def _costs(self, ops: Sequence[Op]) -> tuple[int, int, int, int]:
        """Messages that follow each other and bytes for activations, bytes for gradients of
        parameters, and bytes of activations on one device, of these operators."""
        calls: list[tuple[str, int]] = []
        sent = gradients = held = 0
        for value in dict.fromkeys(value for op in ops for value in (*op.inputs, *op.outputs)):
            context = tensor_context(value, ())
            for step, size in (each for path in self.paths(value) for each in context.steps(*path)):
                kinds = step.forward, step.backward if context.differentiable else None
                calls += [(kind, step.group_size) for kind in kinds if kind is not None]
                sent += size
        for op in ops:
            if (rule := self.rules[op.name]) is not None:
                for inner, size in inner_reductions(op, rule, self.mesh, self.cuts[op.name]):
                    calls.append((inner.reduction.collective, self.mesh.size(inner.axes)))
                    sent += size
            for index, value in enumerate(op.inputs):
                layout = self.reads[value][op.name, index]
                context = tensor_context(value, ())
                if context.stored:
                    gradients += context.traffic(bare(layout), layout, ())
                else:
                    held += context.local_bytes(layout)
            held += sum(tensor_context(v, ()).local_bytes(self.sources[v]) for v in op.outputs)
        messages = sum(
            1 + COLLECTIVES[kind].rounds * (devices - 1).bit_length()
            for kind, devices in calls
            if devices > 1
        )
        return messages, sent, gradients, held

    def _varying(self, ops: Sequence[Op]) -> set[frozenset[int]]:
        """The axes over which gradients of parameters of these operators are summed up."""
        return {
            self.reads[value][op.name, index].varying
            for op in ops
            for index, value in enumerate(op.inputs)
            if value.kind is Kind.PARAMETER and value.requires_grad
        }

    def _further(self, op: Op, axes: Axes) -> Iterator[Cuts]:
        """The cuts of `op` with those of a neighbor over `axes` that do not cut it yet."""
        cuts, rule = self.cuts[op.name], self.rules[op.name]
        taken, near = self.cut[op.name], self.near[op.name]
        free = [a for a in axes if a not in taken and any(a in self.cut[name] for name in near)]
        if rule is None or not free:
            return
        limits = least_sent(rule)
        for tensor in self._shared(op, rule):
            moves = CutMoves(self.mesh, limits, (tensor,))
            (move,) = moves.followed()
            more = {axis: factor for axis, factor in move.items() if axis in free}
            order = {f: a for f, a in zip(tensor.dims, tensor.layout.axes, strict=True) if f}
            further = moves.divisible({**taken, **more}, order) if more else cuts
            if sum(map(len, further.values())) > len(taken):
                yield further

    def _shared(self, op: Op, rule: ShardingRule) -> Iterator[SharedTensor]:
        """The tensors of `op` as its neighbors lay them out."""
        tensors = (*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs)
        for value, dims in zip(*tensors, strict=True):
            if value.kind is not Kind.PARAMETER:
                source = () if value in op.outputs else (self.sources[value],)
                # Few objects stand for the layouts of many readers.
                reads = {id(layout): layout for layout in self.reads[value].values()}
                yield from (SharedTensor(dims, layout) for layout in (*source, *reads.values()))
