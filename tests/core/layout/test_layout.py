"""Device matrices and layouts: who holds what."""

import json
import pickle
import re
import subprocess
import sys
from itertools import islice
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.layout.axes import axis_names, common_axes, prime_factors
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.errors import LayoutError

CUBE = Layout((2, 2, 2), ("dp", "sp", "mp"))


def test_a_dimension_cut_by_two_axes_lies_on_ranks_that_are_no_neighbors():
    """[[a0, a1, a2, a3], [a4, a5, a6, a7]]: row 0 on ranks 0, 4, 2, 6."""
    laid = CUBE("mp", ("sp", "dp"))
    assert [laid.ranks_of((0, column)) for column in range(4)] == [(0,), (4,), (2,), (6,)]
    assert [laid.ranks_of((1, column)) for column in range(4)] == [(1,), (5,), (3,), (7,)]
    assert laid.slices(4, (2, 4)) == (slice(0, 1), slice(1, 2))


def test_a_layout_says_its_matrix_counts_and_map_from_the_right():
    laid = CUBE("mp", ("sp", "dp"), "None", ("None", "None"))
    assert laid.device_matrix == (2, 2, 2) and laid.alias_names == ("dp", "sp", "mp")
    assert laid.tensor_map == (0, (1, 2), -1, -1)
    assert laid.shard_counts == (2, 4, 1, 1)
    assert laid.axes == ((2,), (1, 0), (), ())


def test_none_beside_a_name_is_dropped():
    assert CUBE(("None", "dp"), ("sp", "None", "mp")) == CUBE("dp", ("sp", "mp"))
    assert CUBE(("None", "dp")).tensor_map == (2,)


def test_a_scalar_has_one_block_on_all_ranks():
    laid = CUBE()
    assert laid.tensor_map == () and laid.slices(5, ()) == ()
    assert laid.ranks_of(()) == tuple(range(8))


def test_a_rank_list_says_where_each_rank_stands():
    layout = Layout((2, 2), ("a", "b"), (3, 1, 2, 0))
    assert layout.coordinates(2) == (1, 0)
    assert layout("a").ranks_of((0,)) == (3, 1)
    assert layout(("b", "a")).slices(1, (8,)) == (slice(4, 6),)


@given(st.permutations(range(3)), st.integers(0, 3), st.permutations(range(8)))
def test_blocks_cover_the_tensor_equally_often(order, cut, ranks):
    layout = Layout((2, 2, 2), ("a", "b", "c"), tuple(ranks))
    laid = TensorLayout(layout, (tuple(order[:cut]), tuple(order[cut : cut + 1])))
    covered = {}
    for rank in layout.ranks:
        rows, columns = laid.slices(rank, (8, 8))
        for row in range(rows.start, rows.stop):
            for column in range(columns.start, columns.stop):
                covered[row, column] = covered.get((row, column), 0) + 1
        assert rank in laid.ranks_of(laid.block(rank))
    assert len(covered) == 64
    assert set(covered.values()) == {8 // prod(laid.shard_counts)}


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (([2, 2], ("a", "b")), "device_matrix must be a tuple"),
        (((2, 2), ["a", "b"]), "alias_names must be a tuple"),
        (((2, 2), "ab"), "alias_names must be a tuple"),
        (((2, 2), ("a",)), "has 2 axes, but alias_names .* has 1 names"),
        (((2, 0), ("a", "b")), "contains 0\nevery size must be an int of at least 1"),
        (((2, 2.0), ("a", "b")), "contains 2.0\nevery size"),
        (((2, True), ("a", "b")), "contains True\nevery size"),
        (((2, 2), ("a", 1)), "contains 1\nuse non-empty strings"),
        (((2, 2), ("a", "")), "contains ''\nuse non-empty strings"),
        (((2, 2), ("a", "a")), "'a' twice"),
        (((2, 2), ("a", "None")), "an axis is called 'None'"),
        (((2, 2), ("a", "b"), [0, 1, 2, 3]), "rank_list must be a tuple"),
        (((2, 2), ("a", "b"), (0, 1, 2)), "must contain 4 different ranks"),
        (((2, 2), ("a", "b"), (0, 1, 2, 2)), "must contain 4 different ranks"),
        (((2,), ("a",), (-1, 0)), "must contain 2 different ranks"),
    ],
)
def test_a_device_matrix_that_cannot_be_says_why(given, text):
    with pytest.raises(LayoutError, match=text):
        Layout(*given)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CUBE("tp"), "unknown axis 'tp'\nuse one of 'dp', 'sp', 'mp', 'None'"),
        (lambda: CUBE("dp", "dp"), "axis 'dp' is used more than once"),
        (lambda: CUBE(("dp", "sp"), "sp"), "axis 'sp' is used more than once"),
        (lambda: CUBE(["dp"]), "invalid entry .*\nuse the name of an axis"),
        (lambda: CUBE(1), "invalid entry of a dimension: 1"),
        (lambda: CUBE(("dp", 1)), "a tuple of names, or 'None'"),
        (lambda: TensorLayout(CUBE, ((3,),)), "no such axis"),
        (lambda: TensorLayout(CUBE, ((0,),), frozenset({0})), "'dp' is used more than once"),
        (lambda: CUBE("dp", ("sp", "mp")).shard_shape((4, 6)), "dimension 1 of size 6 .* 4 shards"),
        (lambda: CUBE("dp").shard_shape((4, 6)), r"has 1 dimensions, but the shape \(4, 6\) has 2"),
        (lambda: CUBE("dp").slices(8, (4,)), "no rank 8\nuse one of its ranks, from 0 to 7"),
        (
            lambda: CUBE("dp").ranks_of((2,)),
            r"no shard has the index \(2,\)\nuse indices .* the numbers of shards \(2,\)",
        ),
        (lambda: CUBE("dp").visualize((3,)), "dimension 0 of size 3"),
        (lambda: prime_mesh(0), "at least one device"),
    ],
)
def test_a_layout_that_cannot_be_says_why(make, text):
    with pytest.raises(LayoutError, match=text):
        make()


def test_a_layout_error_is_a_value_error():
    with pytest.raises(ValueError):
        CUBE("dp", "dp")


# --- equality, text, JSON ------------------------------------------------------------------------


def test_equal_layouts_are_one_key():
    assert CUBE("dp") == Layout((2, 2, 2), ("dp", "sp", "mp"))("dp")
    assert len({CUBE("dp"), CUBE("dp"), CUBE(("None", "dp")), CUBE("sp")}) == 2
    assert CUBE("dp") != TensorLayout(CUBE, ((0,),), frozenset({1}))


def test_the_hash_is_the_same_in_every_process():
    text = pickle.dumps(CUBE("mp", ("sp", "dp")))
    code = f"import pickle; print(hash(pickle.loads({text!r})))"
    run = [sys.executable, "-c", code]
    paths = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run(run, capture_output=True, text=True, check=True, env=paths)
    assert int(found.stdout) == hash(CUBE("mp", ("sp", "dp")))


def test_a_layout_reads_as_its_names():
    assert repr(CUBE("mp", ("sp", "dp"))) == "(mp, sp·dp) on (dp 2, sp 2, mp 2)"
    marked = TensorLayout(CUBE, ((), (1,)), frozenset({0}), frozenset({2}))
    assert repr(marked) == "(None, sp; partial dp; varying mp) on (dp 2, sp 2, mp 2)"


@pytest.mark.parametrize(
    "laid",
    [
        CUBE("mp", ("sp", "dp"), "None"),
        CUBE(),
        TensorLayout(CUBE, ((), (1,)), frozenset({0}), frozenset({2})),
        Layout((2, 2), ("a", "b"), (3, 1, 2, 0))("b"),
        prime_mesh(1)("None"),
    ],
)
def test_json_holds_a_whole_layout(laid):
    assert TensorLayout.from_dict(json.loads(json.dumps(laid.to_dict()))) == laid


def test_json_has_the_map_from_the_right():
    assert CUBE("dp", "mp").to_dict() == {
        "device_matrix": [2, 2, 2],
        "alias_names": ["dp", "sp", "mp"],
        "tensor_map": [2, 0],
    }


def test_a_picture_shows_which_rank_holds_which_block():
    assert CUBE("mp", ("sp", "dp")).visualize((2, 8)).splitlines() == [
        "    | 0:2 | 2:4 | 4:6 | 6:8 |",
        "----+-----+-----+-----+-----+",
        "0:1 |   0 |   4 |   2 |   6 |",
        "1:2 |   1 |   5 |   3 |   7 |",
    ]


def test_a_picture_of_three_dimensions_has_a_grid_for_each_leading_block():
    picture = CUBE("dp", "None", "sp").visualize()
    first, second = picture.split("\n\n")
    assert first.splitlines()[0] == "[0, :, :]" and first.splitlines()[-1] == "0 | 0 1 | 2 3 |"
    assert second.splitlines()[0] == "[1, :, :]" and second.splitlines()[-1] == "0 | 4 5 | 6 7 |"


@pytest.mark.parametrize("laid", [CUBE(), CUBE("dp"), CUBE("None", ("dp", "mp"))])
def test_every_rank_is_in_the_picture_once(laid):
    cells = " ".join(line.split("|", 1)[-1] for line in laid.visualize().splitlines()[2:])
    assert sorted(cells.replace("|", " ").split()) == list("01234567")


# --- axes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrices", "common"),
    [
        (((8,), (2, 4), (2, 2, 2)), (2, 2, 2)),
        (((12,),), (2, 2, 3)),
        (((12,), (3, 4)), (3, 2, 2)),
        (((2, 6), (4, 3)), (2, 2, 3)),
        (((1,), ()), ()),
    ],
)
def test_device_matrices_share_the_axes_of_their_refinement(matrices, common):
    assert common_axes(*matrices) == common


@pytest.mark.parametrize(
    ("matrices", "text"),
    [
        (((2, 3), (3, 2)), "groups of 2 and groups of 3 neighboring devices do not nest"),
        (((8,), (2, 2)), "different numbers of devices: 4, 8"),
    ],
)
def test_device_matrices_without_common_axes_say_why(matrices, text):
    with pytest.raises(LayoutError, match=text):
        common_axes(*matrices)


def test_a_layout_can_be_expressed_on_a_finer_matrix():
    coarse = Layout((4, 2), ("x", "y"))
    laid = TensorLayout(coarse, ((1,),), frozenset({0}))
    fine = laid.on(prime_mesh(8))
    assert fine == TensorLayout(prime_mesh(8), ((2,),), frozenset({0, 1}))
    varying = TensorLayout(coarse, ((1,),), varying=frozenset({0}))
    assert varying.on(prime_mesh(8)).varying == {0, 1}


@pytest.mark.parametrize("ranks", [None, (0, 2, 4, 6, 1, 3, 5, 7), (0, 4, 1, 5, 2, 6, 3, 7)])
def test_on_another_matrix_every_rank_holds_the_same(ranks):
    coarse = Layout((4, 2), ("x", "y"), ranks)
    for laid in (coarse("x", "y"), coarse(("y", "x"), "None"), coarse("None", "x")):
        fine = laid.on(prime_mesh(8))
        for rank in range(8):
            assert fine.slices(rank, (8, 8)) == laid.slices(rank, (8, 8))


@pytest.mark.parametrize(
    ("coarse", "fine"),
    [
        (Layout((2, 3), ("x", "y")), Layout((3, 2), ("x", "y"))),
        (Layout((8,), ("x",), (0, 1, 2, 4, 3, 5, 6, 7)), prime_mesh(8)),
        (Layout((8,), ("x",), (7, 6, 5, 4, 3, 2, 1, 0)), prime_mesh(8)),
        (prime_mesh(8), Layout((8,), ("x",))),
    ],
)
def test_a_matrix_that_does_not_refine_says_so(coarse, fine):
    with pytest.raises(LayoutError, match="is not a product of axes of the device matrix"):
        coarse(coarse.alias_names[0]).on(fine)


def test_a_matrix_of_other_ranks_says_so():
    with pytest.raises(LayoutError, match="do not have the same ranks"):
        Layout((2,), ("x",), (4, 5))("x").on(prime_mesh(2))


def test_plans_are_made_on_prime_factors():
    assert prime_mesh(12) == Layout((2, 2, 3), ("a", "b", "c"))
    assert prime_mesh(1) == Layout((), ())
    assert [prime_factors(n) for n in (1, 7, 360)] == [(), (7,), (2, 2, 2, 3, 3, 5)]
    names = list(islice(axis_names(), 26 + 26 * 26 + 1))
    assert names[25:28] == ["z", "aa", "ab"] and names[-1] == "aaa" and len(set(names)) == 703


@pytest.mark.parametrize("spelling", ["alias_names", "alias_name", "name"])
def test_names_may_be_given_by_each_of_their_spellings(spelling: str) -> None:
    assert Layout((2, 4), **{spelling: ("dp", "mp")}) == Layout((2, 4), ("dp", "mp"))


def test_names_are_given_once() -> None:
    for spelled in ({}, {"alias_names": ("dp",), "name": ("dp",)}):
        with pytest.raises(LayoutError, match="exactly one of `alias_names`"):
            Layout((2,), **spelled)


def test_an_interleaved_axis_has_no_devices_and_cuts_nothing() -> None:
    interleaved = Layout((2, 4, 2), ("dp", "mp", "interleaved_parallel"))
    plain = Layout((2, 4), ("dp", "mp"))
    assert interleaved == plain and interleaved.num_devices == 8
    entries = (("dp", "interleaved_parallel"), "mp")
    assert interleaved(*entries) == plain("dp", "mp")
    with pytest.raises(LayoutError, match="unknown axis 'interleaved_parallel'"):
        plain(*entries)
    with pytest.raises(LayoutError, match="must be the last axis"):
        Layout((2, 4), ("interleaved_parallel", "mp"))


def test_a_drawing_in_a_notebook_has_the_cells_of_its_text_and_a_color_for_each_block() -> None:
    layout = Layout((2, 2, 2), ("a", "b", "c"))
    for entries in (("a", "b"), ("a", "None"), ("a", "b", "c"), ("a",), ()):
        drawn = layout(*entries).visualize()
        html = drawn._repr_html_()
        colors = dict(re.findall(r"<td style=\"background: (.*?); color: #000\">(.*?)</td>", html))
        blocks = {tuple(map(int, ranks.split())) for ranks in colors.values()}
        assert blocks == set(layout(*entries)._ranks_of_block.values())
        assert len(colors) == len(blocks)
        for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", html):
            assert cell in str(drawn)
        assert html in layout(*entries)._repr_html_()
