"""Conversions: a simulator that knows only what each kind of step means, and their bytes."""

from fractions import Fraction
from itertools import product
from math import prod
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.conversion import Conversion, Step, conversion, steps
from shardwright.errors import LayoutError
from shardwright.layout import Layout, TensorLayout, prime_mesh

MESHES = ((2, 2), (2, 3), (2, 2, 2), (2, 2, 3))
Blocks = dict[int, np.ndarray]


def mesh_of(matrix):
    return Layout(matrix, tuple("abcdefghijkl"[: len(matrix)]))


# --- the simulator -------------------------------------------------------------------------------


def groups_of(layout, axes):
    """The ranks that differ only on `axes`: one list a group, in the order of the joined axes."""
    found = {}
    for rank in layout.ranks:
        place = layout.coordinates(rank)
        rest = tuple(c for axis, c in enumerate(place) if axis not in axes)
        found.setdefault(rest, []).append((tuple(place[axis] for axis in axes), rank))
    return [[rank for _, rank in sorted(members)] for members in found.values()]


def run(step: Step, blocks: Blocks) -> Blocks:
    """What each kind means: from the groups' arrays alone, not from the layouts."""
    after = {}
    for group in groups_of(step.source.layout, step.axes):
        held, p = [blocks[rank] for rank in group], len(group)
        if step.kind == "slice":
            made = [np.split(held[i], p, step.dim)[i] for i in range(p)]
        elif step.kind == "vary":
            made = held
        elif step.kind == "all_reduce":
            made = [sum(held)] * p
        elif step.kind == "reduce_scatter":
            made = np.split(sum(held), p, step.dim)
        elif step.kind == "all_gather":
            made = [np.concatenate(held, step.dim)] * p
        elif step.kind == "all_to_all":
            pieces = [np.split(block, p, step.to_dim) for block in held]
            made = [np.concatenate([pieces[j][i] for j in range(p)], step.dim) for i in range(p)]
        else:
            assert step.kind == "permute" and list(step.axes) == sorted(step.axes)
            made = [None] * p
            for sender, receiver in enumerate(step.permutation()):
                made[receiver] = held[sender]
        after.update(zip(group, made, strict=True))
    return after


def blocks_of(layout: TensorLayout, full: np.ndarray) -> Blocks:
    """What each rank holds; with partial axes random terms whose sum is its block."""
    found = {r: full[layout.slices(r, full.shape)] for r in layout.layout.ranks}
    if layout.partial:
        draw = np.random.default_rng(0)
        for group in groups_of(layout.layout, tuple(sorted(layout.partial))):
            shape = found[group[0]].shape
            terms = [draw.integers(-9, 9, shape) for _ in group[1:]]
            first = found[group[0]] - sum(terms)
            found.update(zip(group, [first, *terms], strict=True))
    return found


def check(source, target, shape, differentiable=True):
    full = np.arange(prod(shape)).reshape(shape)
    blocks = blocks_of(source, full)
    here = source
    for step in steps(source, target, shape, differentiable):
        assert step.source == here
        here, blocks = step.target, run(step, blocks)
        for rank, block in blocks.items():
            assert block.shape == here.shard_shape(shape)
    if differentiable:
        assert here == target
    if target.partial:
        groups = groups_of(target.layout, tuple(sorted(target.partial)))
        blocks = {r: sum(blocks[o] for o in g) for g in groups for r in g}
    for rank, block in blocks.items():
        np.testing.assert_array_equal(block, full[target.slices(rank, shape)])


# --- random layouts ------------------------------------------------------------------------------


@st.composite
def layouts(draw, mesh, ndim, other, allow_partial=()):
    """Each axis on a dimension, replicated, or in the `other` state; any order in a dimension."""
    dims = [[] for _ in range(ndim)]
    special = set()
    for axis in draw(st.permutations(range(len(mesh.device_matrix)))):
        where = draw(st.integers(-2, ndim - 1))
        if where >= 0:
            dims[where].append(axis)
        elif where == -1 and (other == "varying" or not allow_partial or axis in allow_partial):
            special.add(axis)
    return TensorLayout(mesh, tuple(map(tuple, dims)), **{other: frozenset(special)})


@st.composite
def pairs(draw, matrices=MESHES):
    mesh = mesh_of(draw(st.sampled_from(matrices)))
    ndim = draw(st.integers(1, 3))
    source = draw(layouts(mesh, ndim, "partial"))
    target = draw(layouts(mesh, ndim, "varying"))
    whole = mesh.num_devices
    sizes = [12, 12, 6] if whole == 12 else [whole, whole, whole // 2]
    counts = zip(source.shard_counts, target.shard_counts, strict=True)
    shape = tuple(
        int(np.lcm(size if draw(st.booleans()) else 1, np.lcm(*both)))
        for size, both in zip(sizes, counts, strict=False)
    )
    return source, target, shape


@settings(max_examples=400, deadline=None)
@given(pairs())
def test_steps_leave_each_rank_the_block_that_the_target_says(pair):
    check(*pair)


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_steps_without_gradients_end_in_the_same_blocks(pair):
    source, target, shape = pair
    check(source, target, shape, differentiable=False)
    assert "vary" not in [s.kind for s in steps(source, target, shape, False)]


@settings(max_examples=100, deadline=None)
@given(pairs(), st.data())
def test_axes_partial_on_both_sides_stay_partial(pair, data):
    source, target, shape = pair
    common = frozenset(data.draw(st.sets(st.sampled_from(sorted(source.partial or {-1})))))
    common -= target.sharded | {-1}
    target = TensorLayout(target.layout, target.axes, common, target.varying - common)
    check(source, target, shape)
