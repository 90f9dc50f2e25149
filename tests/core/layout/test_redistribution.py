"""Redistributions: a simulator that knows only what each kind of step means, and their bytes."""

from fractions import Fraction
from itertools import islice, permutations
from math import prod
from time import process_time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.core.layout import route_search
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.layout.redistribution import (
    Redistribution,
    redistribution,
    redistribution_steps,
)
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.errors import LayoutError

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


def run(step: RedistributionStep, blocks: Blocks) -> Blocks:
    """What each kind means: from the groups' arrays alone, not from the layouts."""
    after = {}
    for group in groups_of(step.source.layout, step.axes):
        held, p = [blocks[rank] for rank in group], len(group)
        if step.operation == "slice":
            made = [np.split(held[i], p, step.dim)[i] for i in range(p)]
        elif step.operation == "vary":
            made = held
        elif step.operation == "all_reduce":
            made = [sum(held)] * p
        elif step.operation == "reduce_scatter":
            made = np.split(sum(held), p, step.dim)
        elif step.operation == "all_gather":
            made = [np.concatenate(held, step.dim)] * p
        elif step.operation == "all_to_all":
            pieces = [np.split(block, p, step.to_dim) for block in held]
            made = [np.concatenate([pieces[j][i] for j in range(p)], step.dim) for i in range(p)]
        else:
            assert step.operation == "permute" and list(step.axes) == sorted(step.axes)
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
    for step in redistribution_steps(source, target, shape, differentiable):
        assert step.source == here
        here, blocks = step.target, run(step, blocks)
        for block in blocks.values():
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
    assert "vary" not in [s.operation for s in redistribution_steps(source, target, shape, False)]


@settings(max_examples=100, deadline=None)
@given(pairs(), st.data())
def test_axes_partial_on_both_sides_stay_partial(pair, data):
    source, target, shape = pair
    common = frozenset(data.draw(st.sets(st.sampled_from(sorted(source.partial or {-1})))))
    common -= target.sharded | {-1}
    target = TensorLayout(target.layout, target.axes, common, target.varying - common)
    check(source, target, shape)


# --- cost ----------------------------------------------------------------------------------------


def exact_cost(step, shape):
    """Elements sent, forward and backward, as fractions, by the formulas of the ring algorithms."""
    p = prod(step.source.device_matrix[axis] for axis in step.axes)
    before, after = (Fraction(prod(side.shard_shape(shape))) for side in (step.source, step.target))
    ring = Fraction(p - 1, p)
    varying = step.target.varying.issuperset(step.axes)
    return {
        "slice": ring * before,
        "vary": 2 * ring * before,
        "all_reduce": 2 * ring * before,
        "reduce_scatter": 2 * ring * before,
        "all_gather": ring * after * (2 if varying else 1),
        "all_to_all": 2 * ring * before,
        "permute": 2 * before,
    }[step.operation]


def gather_and_slice_cost(source, target, shape):
    """All-reduce, gather every dimension that changes, cut it anew, vary."""
    matrix, total = source.device_matrix, Fraction(0)
    local = Fraction(prod(source.shard_shape(shape)))
    if summed := source.partial - target.partial:
        p = prod(matrix[a] for a in summed)
        total += 2 * Fraction(p - 1, p) * local
    for dim, axes in enumerate(source.axes):
        if axes == target.axes[dim]:
            continue
        for axis in reversed(axes):
            local *= matrix[axis]
            ring = Fraction(matrix[axis] - 1, matrix[axis]) * local
            total += ring * (2 if axis in target.varying else 1)
    for dim, axes in enumerate(target.axes):
        if source.axes[dim] != axes:
            p = prod(matrix[a] for a in axes)
            total += Fraction(p - 1, p) * local
            local /= p
    varied = target.varying - source.sharded
    p = prod(matrix[a] for a in varied)
    return total + 2 * Fraction(p - 1, p) * local


def gathers_of_two_kinds():
    """Those whose gradients are reduce-scatters are to come first, while the tensor is small."""
    mesh = mesh_of((2, 2, 2, 2))
    source = TensorLayout(mesh, ((1, 3), (0, 2)))
    return source, TensorLayout(mesh, ((), ()), varying=frozenset({1, 3})), (4, 4)


@settings(max_examples=300, deadline=None)
@given(pairs(((2, 2, 2), (2, 2, 3), (2, 2, 2, 2), (2, 2, 2, 2, 2))))
@example(gathers_of_two_kinds())
def test_no_redistribution_costs_more_than_gather_and_slice(pair):
    found = sum(exact_cost(step, pair[2]) for step in redistribution_steps(*pair))
    assert found <= gather_and_slice_cost(*pair)


def all_steps(here, target, shape, changing, moving):
    """Every step that changes only these dimensions and axes, wherever it leads."""
    mesh = here.layout
    axes_of_mesh = sorted(moving | here.sharded)
    free = [a for a in axes_of_mesh if a not in here.sharded | here.partial | here.varying]

    def made(kind, axes, dims, partial=here.partial, varying=here.varying):
        after = TensorLayout(mesh, dims, partial, varying)
        if any(dims[dim] != axes for dim, axes in enumerate(target.axes) if dim not in changing):
            return
        if all(size % n == 0 for size, n in zip(shape, after.shard_counts, strict=True)):
            yield RedistributionStep(kind, axes, None, None, here, after)

    def changed(changes):
        return tuple(changes.get(dim, axes) for dim, axes in enumerate(here.axes))

    subsets = [s for n in range(len(axes_of_mesh)) for s in permutations(axes_of_mesh, n + 1)]
    for axes in subsets:
        some = frozenset(axes)
        for dim, old in enumerate(here.axes):
            if some <= set(free):
                yield from made("slice", axes, changed({dim: old + axes}))
            if some <= here.partial:
                dims = changed({dim: old + axes})
                yield from made("reduce_scatter", axes, dims, here.partial - some)
            if old[-len(axes) :] == axes:
                rest = old[: -len(axes)]
                if not some & target.varying:
                    yield from made("all_gather", axes, changed({dim: rest}))
                elif some <= target.varying:
                    dims, varying = changed({dim: rest}), here.varying | some
                    yield from made("all_gather", axes, dims, varying=varying)
                for to_dim, entered in enumerate(here.axes):
                    if to_dim != dim:
                        dims = changed({dim: rest, to_dim: entered + axes})
                        yield from made("all_to_all", axes, dims)
        if list(axes) == sorted(axes):
            if some <= here.partial:
                yield from made("all_reduce", axes, here.axes, here.partial - some)
            if some <= set(free) and some <= target.varying:
                yield from made("vary", axes, here.axes, varying=here.varying | some)
    usable = [*free, *here.sharded]
    lengths = [len(axes) for axes in here.axes]
    for order in permutations(usable, sum(lengths)):
        left = iter(order)
        dims = tuple(tuple(islice(left, length)) for length in lengths)
        after = TensorLayout(mesh, dims, here.partial, here.varying)
        if after.shard_counts == here.shard_counts and after != here:
            yield from made("permute", (), dims)


def least_cost(source, target, shape):
    """By trying everything, axis by axis (Bellman and Ford on the whole graph of layouts)."""
    changing = {dim for dim, axes in enumerate(source.axes) if axes != target.axes[dim]}
    moving = source.sharded | source.partial | target.sharded | target.varying
    costs, queue = {source: Fraction(0)}, [source]
    while queue:
        here = queue.pop(0)
        for step in all_steps(here, target, shape, changing, moving):
            spent = costs[here] + exact_cost(step, shape)
            if spent < costs.get(step.target, spent + 1) and spent < costs.get(target, spent + 1):
                costs[step.target] = spent
                queue.append(step.target)
    return costs[target]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pairs(((2, 2), (2, 3), (2, 2, 3))))
def test_no_sequence_of_steps_is_cheaper(pair):
    source, target, shape = pair
    shape, source, target = shape[:2], cropped(source), cropped(target)
    found = sum(exact_cost(step, shape) for step in redistribution_steps(source, target, shape))
    assert found == least_cost(source, target, shape)


def cropped(layout):
    return TensorLayout(layout.layout, layout.axes[:2], layout.partial, layout.varying)


def test_a_tensor_that_moves_between_dimensions_needs_one_all_to_all():
    a, b = mesh_of((2, 4))("b", "None"), mesh_of((2, 4))("None", "b")
    assert [(s.operation, s.axes, s.dim, s.to_dim) for s in redistribution_steps(a, b, (8, 8))] == [
        ("all_to_all", (1,), 0, 1)
    ]


MESH = mesh_of((2, 4))


def state(*axes, partial=(), varying=()):
    return TensorLayout(MESH, axes, frozenset(partial), frozenset(varying))


@pytest.mark.parametrize(
    ("source", "target", "kind", "backward", "sent"),
    [
        # 8 x 8 elements of 4 bytes; axis 1 has 4 devices.
        (state((), ()), state((1,), ()), "slice", "all_gather", (0, 192)),
        (state((), ()), state((), (), varying=[1]), "vary", "all_reduce", (0, 384)),
        (state((), (), partial=[1]), state((), ()), "all_reduce", None, (384, 0)),
        (
            state((), (), partial=[1]),
            state((1,), ()),
            "reduce_scatter",
            "all_gather",
            (192, 192),
        ),
        (state((1,), ()), state((), ()), "all_gather", None, (192, 0)),
        (
            state((1,), ()),
            state((), (), varying=[1]),
            "all_gather",
            "reduce_scatter",
            (192, 192),
        ),
        (state((1,), ()), state((), (1,)), "all_to_all", "all_to_all", (48, 48)),
        (state((0, 1), ()), state((1, 0), ()), "permute", "permute", (32, 32)),
    ],
)
def test_each_kind_of_step_sends_the_bytes_of_its_ring(source, target, kind, backward, sent):
    found = redistribution(source, target, (8, 8), itemsize=4)
    assert [(step.operation, step.backward) for step in found.steps] == [(kind, backward)]
    assert (found.forward_bytes, found.backward_bytes) == sent


def test_bytes_are_rounded_up():
    [step] = redistribution_steps(state(partial=[0, 1]), state(), ())
    assert step.forward_bytes((), 1) == 2  # 2 * 7/8
    assert step.forward_bytes((), 4) == 7


def test_local_sizes_count_what_other_axes_cut():
    source, target = state((0,), (), partial=[1]), state((0,), ())
    assert redistribution(source, target, (8, 8)).forward_bytes == 192


def test_joined_axes_are_one_collective():
    [step] = redistribution_steps(state((), (), partial=[0, 1]), state((), ()), (8, 8))
    assert (step.operation, step.axes, step.group_size) == ("all_reduce", (0, 1), 8)
    [step] = redistribution_steps(state((1, 0), ()), state((), ()), (8, 8))
    assert (step.operation, step.axes) == ("all_gather", (1, 0))
    [step] = redistribution_steps(state((), ()), state((1, 0), ()), (8, 8))
    assert (step.operation, step.axes) == ("slice", (1, 0))


def test_slices_come_first_and_gathers_last():
    kinds = [s.operation for s in redistribution_steps(state((1,), ()), state((), (0,)), (8, 8))]
    assert kinds == ["slice", "all_gather"]
    kinds = [
        s.operation
        for s in redistribution_steps(state((0,), (), partial=[1]), state((), (1,)), (8, 8))
    ]
    assert kinds == ["reduce_scatter", "all_gather"]


def test_swapping_equal_axes_of_two_dimensions_is_a_permute():
    mesh = mesh_of((2, 2))
    [step] = redistribution_steps(mesh("a", "b"), mesh("b", "a"), (4, 4))
    assert (step.operation, step.axes, step.permutation()) == ("permute", (0, 1), (0, 2, 1, 3))


def test_a_permute_may_exchange_a_sharded_axis_for_a_replicated_one():
    mesh = mesh_of((2, 2))
    source, target = mesh("a", "None"), mesh("b", "None")
    [step] = redistribution_steps(source, target, (4, 4), differentiable=True)
    assert (step.operation, step.permutation()) == ("permute", (0, 2, 1, 3))


def test_only_a_permute_has_a_permutation():
    [step] = redistribution_steps(state((1,), ()), state((), ()), (8, 8))
    with pytest.raises(LayoutError, match="'all_gather' has no permutation"):
        step.permutation()


def test_nothing_is_to_do_between_equal_layouts():
    found = redistribution(state((1,), ()), state((1,), ()), (8, 8))
    assert found.steps == () and found.forward_bytes == 0
    assert "nothing to do" in str(found)


def test_a_redistribution_reads_as_a_list_of_steps():
    text = str(redistribution(state((0,), (), partial=[1]), state((), (1,)), (8, 8)))
    assert text.splitlines() == [
        "(a, None; partial b) on (a 2, b 4) -> (None, b) on (a 2, b 4), shape (8, 8)",
        "  reduce_scatter b, dimension 1: 96 bytes forward, 96 backward (all_gather)",
        "  all_gather a, dimension 0: 32 bytes forward, 0 backward",
    ]


def test_a_step_that_would_not_divide_is_avoided():
    # b cannot enter dimension 1 (size 2): no all-to-all in between may cut it in four.
    source, target = state((1,), (0,)), state((0,), ())
    for step in redistribution_steps(source, target, (8, 2)):
        step.target.shard_shape((8, 2))


@pytest.mark.parametrize(
    ("source", "target", "shape", "text"),
    [
        (state((1,)), mesh_of((4, 2))("a"), (8,), "different device matrices"),
        (state((1,)), state((), (1,)), (8,), "has 2 dimensions, but the shape .* has 1"),
        (state((1,)), state(()), (6,), "dimension 0 of size 6 is not divisible into 4 shards"),
        (state((), varying=[0]), state(()), (8,), "varying, but only the target"),
        (state(()), state((), partial=[0]), (8,), "but no redistribution creates partial sums"),
    ],
)
def test_what_cannot_be_converted_says_why(source, target, shape, text):
    with pytest.raises(LayoutError, match=text):
        redistribution_steps(source, target, shape)


def random_pairs(axes, count):
    draw = np.random.default_rng(axes)
    mesh = prime_mesh(2**axes)
    for _ in range(count):
        found = []
        for other in ("partial", "varying"):
            where = draw.integers(-2, 3, axes)
            order = draw.permutation(axes).tolist()
            dims = tuple(tuple(a for a in order if where[a] == dim) for dim in range(3))
            special = frozenset(a for a in order if where[a] == -1)
            found.append(TensorLayout(mesh, dims, **{other: special}))
        yield (*found, (2**axes,) * 3)


def test_steps_do_not_depend_on_what_was_asked_before():
    first = [redistribution_steps.__wrapped__(*pair) for pair in random_pairs(4, 20)]
    route_search.route.cache_clear()
    again = [
        redistribution_steps.__wrapped__(*pair) for pair in reversed(list(random_pairs(4, 20)))
    ]
    assert first == again[::-1]


@pytest.mark.parametrize("axes", [4, 10, 12])
def test_random_redistributions_on_many_axes_take_milliseconds(axes):
    given_pairs = list(random_pairs(axes, 20))
    began = process_time()
    for pair in given_pairs:
        redistribution_steps(*pair)
    assert (process_time() - began) / 20 < 0.3  # some 3 ms on an idle core


@pytest.mark.parametrize("pair", list(random_pairs(6, 4)))
def test_ways_on_many_axes_are_right_too(pair):
    check(*pair)


def test_a_redistribution_holds_its_question():
    found = redistribution(state((1,), ()), state((), ()), (8, 8), itemsize=2)
    assert isinstance(found, Redistribution) and found.itemsize == 2 and found.shape == (8, 8)
    assert found.forward_bytes == 96


def test_layouts_convert_over_different_device_matrices() -> None:
    """(2,2,2) → (8,): the document's layout becomes eight rows."""
    a = Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"))
    b = Layout((8,), ("tp",))("tp", "None")
    found = redistribution(a, b, (8, 8), itemsize=8)
    assert found.itemsize == 8
    assert found.source.shard_counts == (2, 4)
    assert found.target.shard_counts == (8, 1)
    whole = 8 * 8 * 8
    assert 0 < found.forward_bytes < whole * 7 // 8
    assert "all_to_all" in str(found) or "permute" in str(found)


def test_layouts_without_common_axes_do_not_convert() -> None:
    a, b = Layout((2, 3), ("a", "b"))("a"), Layout((3, 2), ("a", "b"))("a")
    with pytest.raises(LayoutError, match="no common axes"):
        redistribution(a, b, (6,))


def test_gathers_over_outer_axes_come_first_and_reduce_scatters_over_them_last():
    mesh = Layout((2, 2), ("outer", "inner"))
    cut = mesh("inner", "outer")
    whole = mesh.replicated(2)
    gathers = redistribution_steps(cut, whole, (8, 8))
    assert [step.axes for step in gathers] == [(0,), (1,)]
    assert (gathers[0].source, gathers[-1].target) == (cut, whole)
    summed = TensorLayout(mesh, ((), ()), partial=frozenset({0, 1}))
    scatters = redistribution_steps(summed, cut, (8, 8))
    assert [step.axes for step in scatters] == [(1,), (0,)]
    assert (scatters[0].source, scatters[-1].target) == (summed, cut)
