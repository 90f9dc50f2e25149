"""The least seconds of recomputation with which the activations of a stage fit into memory.

    C = P_s + I_s A (a_s - f)        the memory of stage s
    r_s(f)                           its seconds of recomputation per micro-batch

    C           memory limit of a stage: bytes of all its devices together
    P_s         bytes of the stage's parameters, gradients and optimizer state
    A, a_s      bytes of activations that a micro-batch saves without recomputation in the whole
                model, and the fraction of them that the stage saves
    I_s         micro-batches in flight
    f, r_s(f)   fraction of the model's activations that recomputation in the stage frees, and its
                least seconds

r_s is the lower convex hull over the options of all blocks of the stage
(`search/recompute/blocks.py`), each operator cut in the fastest way for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwright.core.cost.flops import work_of
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import default_storage
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.search.recompute.blocks import RecomputeBlocks

Vertex = tuple[float, float]
"""Point of the convex curve of least recomputation time: (fraction of activations that is freed,
recomputation seconds per micro-batch)."""


@dataclass(frozen=True)
class BlockOption:
    """An option to recompute activations of a block, which equal blocks share.

    Args:
        freed: fraction of the model's saved activations that the option frees in one block.
        recomputed: number of equal operators that one block recomputes, by the name of the first of
            these operators.
    """

    freed: float
    recomputed: Mapping[str, int]


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks with equal recomputation options.

    Args:
        members: for each block, the name of one of its operators.
    """

    options: Sequence[BlockOption]
    members: Sequence[str]


@dataclass(frozen=True)
class RecomputeOptions:
    """The options to recompute the activations of each block of a model, for any batch size.

    Args:
        blocks: for each depth of the module tree at which modules may be recomputed as blocks, the
            groups of equal blocks.
        saved_fractions: fraction of the model's saved activations that each operator saves, by
            operator name.
        saved_bytes: bytes that one device would save for a micro-batch without recomputation.
        result_bytes: bytes of the results of all operators, to which `saved_bytes` is proportional
            in graphs of other batch sizes.
    """

    blocks: Sequence[Sequence[EqualBlocks]]
    saved_fractions: Mapping[str, float]
    saved_bytes: int
    result_bytes: int

    @classmethod
    def of(cls, graph: Graph, recompute: Mapping[str, Recompute]) -> RecomputeOptions:
        """Return the recomputation options of `graph`.

        Args:
            recompute: recomputation marked by the user, by operator name.
        """
        # One device: the bound divides by devices itself, as if all tensors were sharded evenly.
        mesh = prime_mesh(1)
        decisions = Decisions({}, default_storage(graph, mesh, {}), recompute=recompute)
        blocks = RecomputeBlocks(graph, mesh, decisions)
        saved_by_op = blocks.saved_without_blocks
        saved = sum(saved_by_op.values())
        by_depth = [
            # A model without gradients saves nothing.
            _group_equal_blocks(graph, blocks.freed_and_recomputed(depth), max(saved, 1))
            for depths in blocks.depths()
            for depth in depths
        ]
        fractions = {name: size / max(saved, 1) for name, size in saved_by_op.items()}
        return cls(by_depth, fractions, saved, result_bytes(graph))

    def saved_bytes_in(self, graph: Graph) -> float:
        """Return the bytes of activations that the model saves with the batch size of `graph`."""
        return self.saved_bytes * result_bytes(graph) / max(self.result_bytes, 1)

    def stage_curves(
        self, seconds_of: Callable[[str], float], stage_of: Callable[[str], int], stages: int
    ) -> list[list[Vertex]]:
        """Return the least recomputation time of each of `stages` stages, as vertices (freed
        fraction of the model's activations, seconds per micro-batch) of a convex function.

        Args:
            seconds_of: function from the name of an operator to the seconds of its forward pass.
            stage_of: function from the name of an operator to the index of its stage.
        """
        vertices = [[(0.0, 0.0)] for _ in range(stages)]
        for blocks_at_depth in self.blocks:
            # (fraction freed, seconds) by stage; each has the slope of one option.
            segments: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
            for equal_blocks in blocks_at_depth:
                points = [
                    (each.freed, sum(n * seconds_of(name) for name, n in each.recomputed.items()))
                    for each in equal_blocks.options
                ]
                hull = _lower_convex_hull([(0.0, 0.0), *points])
                for stage, number in Counter(map(stage_of, equal_blocks.members)).items():
                    for (start, low), (end, high) in pairwise(hull):
                        segments[stage].append((number * (end - start), number * (high - low)))
            for stage, of_stage in enumerate(segments):
                freed = seconds = 0.0
                # Cheapest seconds per freed byte first: the fractional knapsack, whose time is
                # convex.
                for width, height in sorted(of_stage, key=lambda each: each[1] / each[0]):
                    freed, seconds = freed + width, seconds + height
                    vertices[stage].append((freed, seconds))
        return [_lower_convex_hull(each) for each in vertices]


def result_bytes(graph: Graph) -> int:
    """Return the total bytes of the results of all operators, unsharded."""
    return sum(value.numel * value.itemsize for op in graph.ops for value in op.outputs)


def least_recompute_seconds(curve: Sequence[Vertex], freed: float) -> float:
    """Return the least seconds in which recomputation frees the fraction `freed`, or those of full
    recomputation if it frees less."""
    if freed <= 0.0:
        return 0.0
    index = bisect_left(curve, freed, key=lambda vertex: vertex[0])
    if index == len(curve):
        return curve[-1][1]
    (start, low), (end, high) = curve[index - 1 : index + 1]
    return low + (freed - start) / (end - start) * (high - low)


def _group_equal_blocks(
    graph: Graph,
    options_of_blocks: Iterable[Sequence[tuple[int, Sequence[str]]]],
    saved_bytes: int,
) -> list[EqualBlocks]:
    """Group the blocks with equal recomputation options.

    Args:
        options_of_blocks: for each block and each of its options, the bytes that the option frees
            and the names of the operators that it recomputes.
        saved_bytes: bytes that all blocks save without recomputation.
    """
    representatives: dict[int, str] = {}
    members: dict[tuple[tuple[int, tuple[tuple[str, int], ...]], ...], list[str]] = {}

    def representative(op: Op) -> str:
        # `work_of` returns one object for operators with one rule, as in repeated layers.
        return representatives.setdefault(id(work_of(op)), op.name)

    for options in options_of_blocks:
        # An option that frees memory recomputes an operator, which is in the block.
        member = next((name for _, names in options for name in names), None)
        if member is None:
            continue
        key = tuple(
            (freed, tuple(Counter(representative(graph.by_name[n]) for n in names).items()))
            for freed, names in options
        )
        members.setdefault(key, []).append(member)
    return [
        EqualBlocks([BlockOption(freed / saved_bytes, dict(names)) for freed, names in key], names)
        for key, names in members.items()
    ]


def _lower_convex_hull(points: Sequence[Vertex]) -> list[Vertex]:
    """Return the vertices of the increasing part of the lower convex hull of `points`, by ascending
    x."""
    hull: list[Vertex] = []
    for x, y in sorted(points):
        # Sorted by x, then by y: of points with equal x the first is the lowest.
        if hull and x <= hull[-1][0]:
            continue
        # Points that free less and take longer than this one are on no hull.
        while hull and y <= hull[-1][1] and len(hull) > 1:
            hull.pop()
        # Slopes must rise: the last vertex is not below the line from the one before to (x, y).
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (
            y - hull[-2][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    return hull
