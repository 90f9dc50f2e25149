"""From counts and layouts to cuts, and every way in which an operator cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest

from core.constraints.operators import aten, cuts_of, linear, named, of, op_of
from shardwright.core.graph.graph import Op
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.errors import LayoutError, StrategyError

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))


@pytest.mark.parametrize(
    ("devices", "inputs", "expected"),
    [
        (8, ((2, 4), (1, 4)), {"b": "a", "k": "bc"}),
        (8, ((1, 4), (2, 4)), {"k": "ab", "j": "c"}),
        (8, ((4, 1), (1, 1)), {"b": "ab"}),
        (8, ((1, 1), (1, 1)), {}),
        (8, (None, (8, 1)), {"j": "abc"}),
        (8, (None, (2, 4)), {"j": "a", "k": "bc"}),
        (8, ((2, 2), None), {"b": "a", "k": "b"}),
        (12, ((3, 2), (2, 2)), {"b": "c", "k": "a", "j": "b"}),
        (12, ((6, 1), (2, 1)), {"b": "ac", "j": "b"}),
    ],
)
def test_counts_take_axes_from_the_outermost_in_the_order_of_the_factors(
    devices: int, inputs: tuple[Any, ...], expected: dict[str, str]
) -> None:
    cuts = cuts_of(linear(12 * 8, 12, 24), *inputs, devices=devices)
    assert named(prime_mesh(devices), cuts) == expected


def test_a_layout_says_axes_and_their_order() -> None:
    cuts = cuts_of(linear(), LAYOUT("mp", ("sp", "dp")), LAYOUT("None", ("sp", "dp")))
    assert named(prime_mesh(8), cuts) == {"b": "c", "k": "ba"}


def test_counts_beside_a_layout_take_the_axes_that_it_leaves() -> None:
    assert cuts_of(linear(), LAYOUT("dp", "None"), (4, 1)) == {"b": (0,), "j": (1, 2)}
    assert cuts_of(linear(), (2, 2), LAYOUT("None", "dp")) == {"b": (1,), "k": (0,)}


def test_one_axis_of_a_layout_may_be_several_of_the_device_matrix() -> None:
    tp = Layout((8,), ("tp",))
    assert cuts_of(linear(), tp("None", "tp"), tp("None", "tp")) == {"k": (0, 1, 2)}


def test_one_tensor_read_twice_has_an_entry_for_each_time() -> None:
    assert cuts_of(op_of(aten.mul.Tensor, of(8, 4), of(8, 4)), (2, 4), None) == {
        "b": (0,),
        "s": (1, 2),
    }


def test_a_scalar_has_an_empty_tuple() -> None:
    assert cuts_of(op_of(aten.mul.Tensor, of(8, 4), of()), (2, 4), ()) == {"b": (0,), "s": (1, 2)}


CASES: list[tuple[str, Op, tuple[Any, ...], str]] = [
    (
        "an indivisible dimension",
        linear(),
        ((3, 1), (1, 1)),
        r"^fc: strategy \(\(3,1\),\(1,1\)\) for aten.linear\(x \[16, 32\], w \[64, 32\]\): "
        r"dimension 0 of input 0 has size 16, which is not divisible into 3 shards\n"
        r"valid numbers of shards are 1, 2, 4, 8$",
    ),
    (
        "factors that disagree, and the weight's order",
        linear(),
        ((2, 4), (4, 1)),
        r"conflicting shard counts for factor 'k' of `b k, j k -> b j`: dimension 1 of input 0 has"
        r" 4 shards, dimension 1 of input 1 has 1 shard; the weight of nn.Linear is stored as"
        r" \(out_features, in_features\)\n"
        r"a valid strategy is \(\(2,4\),\(1,4\)\)$",
    ),
    (
        "factors that disagree in a product of matrices",
        op_of(aten.matmul.default, of(16, 32), of(32, 64)),
        ((2, 4), (2, 1)),
        r"dimension 1 of input 0 has 4 shards, dimension 0 of input 1 has 2 shards\n"
        r"a valid strategy is \(\(2,4\),\(4,1\)\)$",
    ),
    (
        "factors that disagree where only the first can give way",
        op_of(aten.matmul.default, of(16, 32), of(32, 64)),
        ((1, 4), (1, 8)),
        r"dimension 0 of input 1 has 1 shard\na valid strategy is \(\(1,1\),\(1,8\)\)$",
    ),
    (
        "a count that several entries must share and the devices cannot be divided by",
        op_of(aten.scaled_dot_product_attention.default, *[of(2, 24, 24, 8)] * 3),
        ((1, 8, 1, 1), (1, 3, 1, 1), (1, 3, 1, 1)),
        r"8 shards, dimension 1 of input 1 has 3 shards\n"
        r"a valid strategy is \(\(1,8,1,1\),\(1,8,1,1\),\(1,8,1,1\)\)$",
    ),
    (
        "two factors that disagree at once",
        op_of(aten.scaled_dot_product_attention.default, *[of(2, 24, 24, 8)] * 3),
        ((1, 2, 3, 1), (1, 4, 1, 1), (1, 1, 6, 1)),
        r"a valid strategy is \(\(1,4,1,1\),\(1,4,1,1\),\(1,4,1,1\)\)$",
    ),
    (
        "layouts that cut a factor by different axes",
        linear(),
        (LAYOUT("None", "dp"), LAYOUT("None", "sp")),
        r"input 0 has 2 shards over dp, dimension 1 of input 1 has 2 shards over sp; the",
    ),
    (
        "an axis that cuts two factors",
        linear(),
        (LAYOUT("dp", "None"), LAYOUT("dp", "None")),
        r"axis 'dp' shards both factor 'b' and factor 'j' of `b k, j k",
    ),
    (
        "the dimension of a sort",
        op_of(aten.argsort.default, of(16, 32), 1),
        ((4, 2),),
        r"dimension 1 of input 0 cannot be sharded \(sharding rule: `b _ -> b _`\)\n"
        r"use 1, the only valid number of shards",
    ),
    (
        "normalized dimensions",
        op_of(aten.native_layer_norm.default, of(16, 32), [32], of(32), of(32), 1e-5),
        ((4, 2), (1,), (1,)),
        r"dimension 1 of input 0 cannot be sharded",
    ),
    (
        "more parts than devices",
        linear(),
        ((4, 2), (2, 2)),
        r"would have 16 shards \(b 4 · k 2 · j 2\), but there are only 8 devices",
    ),
    (
        "too few dimensions",
        linear(),
        ((2,), (1, 1)),
        r"input 0 \[16, 32\] has 2 dimensions, but \(2,\) has 1\nuse an entry with 2 dimensions$",
    ),
    (
        "a layout of too many dimensions",
        linear(),
        ((2, 1), LAYOUT("None", "None", "dp")),
        r"input 1 \[64, 32\] has 2 dimensions, but \(None, None, dp\) .* has 3\n"
        r"use an entry with 2 dimensions$",
    ),
    (
        "too few inputs",
        linear(),
        ((2, 4),),
        r"1 entries for 2 tensor inputs\ngive no entry for the bias: a separate operator adds it",
    ),
    (
        "too many inputs",
        op_of(aten.relu.default, of(8, 8)),
        ((2, 4), (1, 1)),
        r"2 entries for 1 tensor inputs\nuse one entry per tensor input$",
    ),
    (
        "a dimension that a view splits",
        op_of(aten.unflatten.int, of(24), 0, (2, 12)),
        ((4,),),
        r"the number of shards of dimension 0 of input 0 must divide 2: .*\n"
        r"valid numbers of shards are 1, 2$",
    ),
]


@pytest.mark.parametrize(
    ("op", "inputs", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_cannot_be_is_refused(op: Op, inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        cuts_of(op, *inputs)


def test_parts_that_do_not_divide_the_devices_are_refused() -> None:
    with pytest.raises(
        StrategyError,
        match=r"of shards, 4 \(b 4\), does not divide the 6 devices\nvalid total .* are 1, 2, 3, 6",
    ):
        cuts_of(linear(), (4, 1), (1, 1), devices=6)


def test_an_operator_without_a_rule_is_refused() -> None:
    with pytest.raises(
        StrategyError, match=r"fc: .*aten.trace\(x \[8, 8\]\): the operator has no sharding rule"
    ):
        cuts_of(op_of(aten.trace.default, of(8, 8)), (2, 1))


def test_a_layout_that_the_device_matrix_cannot_express_is_refused() -> None:
    layout = Layout((4, 3), ("x", "y"))
    with pytest.raises(LayoutError, match=r"fc: cannot use the layout \(x, None\) on \(x 4, y 3\)"):
        cuts_of(linear(), layout("x", "None"), None, mesh=Layout((2, 3, 2), ("a", "b", "c")))
