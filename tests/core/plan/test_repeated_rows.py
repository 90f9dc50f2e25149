"""Blocks that repeat are one in the text of a plan, on however many stages they lie."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.plan.repeated_rows import fold_crossings, fold_names, fold_rows
from shardwright.core.plan.rows import CrossingRow


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Blocks(nn.Module):
    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


def plan_of(layers: int, stages: int, schedule: str = "1f1b") -> sw.Plan:
    batch = torch.randn(64, 64), torch.zeros(64, dtype=torch.long)
    return sw.plan(
        Blocks(layers),
        batch,
        devices=4 * stages,
        stages=stages,
        micro_batches=8,
        mem_coeff=100.0,
        schedule=schedule,
    )


@pytest.fixture(scope="module")
def deep() -> sw.Plan:
    return plan_of(layers=16, stages=4)


def test_the_text_of_many_layers_on_many_stages_is_as_long_as_that_of_few(deep: sw.Plan) -> None:
    few = plan_of(layers=2, stages=2)
    long, short = (len(plan.text(every=True).splitlines()) for plan in (deep, few))
    assert abs(long - short) <= 4


def test_a_row_names_all_its_layers_and_their_stages(deep: sw.Plan) -> None:
    folds = {fold.row.name: fold for fold in fold_rows(deep.operators)}
    assert folds["layers.{0..15}.up"].stages == "0..3"
    assert folds["head"].stages == "3"


def test_layers_that_are_computed_again_are_named_in_the_row_of_all(deep: sw.Plan) -> None:
    def mark(layers: Iterable[int]) -> str:
        again = {f"layers.{n}.up" for n in layers}
        rows = [replace(row, segment="s" if row.name in again else "") for row in deep.operators]
        return next(
            fold.recomputed for fold in fold_rows(rows) if fold.row.name == "layers.{0..15}.up"
        )

    assert [mark([0, 1, 5]), mark(range(16)), mark([])] == [
        "recomputed in 0..1,5",
        "recomputed",
        "",
    ]


def test_layers_that_are_cut_otherwise_have_a_row_of_their_own(deep: sw.Plan) -> None:
    rows = [replace(row, cuts={}) if row.name == "layers.6.up" else row for row in deep.operators]
    names = {fold.row.name for fold in fold_rows(rows)}
    assert {"layers.{0..5,7..15}.up", "layers.6.up"} <= names


def test_equal_crossings_are_one_line(deep: sw.Plan) -> None:
    ((stages, crossing),) = fold_crossings(deep.crossings)
    assert stages == "each of stages 0..2 to the next"
    assert len(crossing.values) == 1
    assert crossing.values[0].startswith("layers.{")


def test_crossings_of_a_v_go_there_and_back() -> None:
    rows = [CrossingRow(a, b, (f"layers.{n}",), 8, 8) for n, (a, b) in enumerate(V_OF_THREE)]
    crossings = [(stages, row.values) for stages, row in fold_crossings(rows)]
    assert crossings == [
        ("each of stages 0..1 to the next", ("layers.{0..1}",)),
        ("each of stages 1..2 to the previous", ("layers.{2..3}",)),
    ]


V_OF_THREE = [(0, 1), (1, 2), (2, 1), (1, 0)]


def test_names_that_differ_in_two_numbers_stand_by_themselves() -> None:
    names = ["a.0.b.0", "a.1.b.1", "c", "d.3", "d.4"]
    assert fold_names(names) == ["a.0.b.0, a.1.b.1", "c", "d.{3..4}"]


def test_rows_of_experts_in_layers_are_one_row_as_far_as_all_layers_have_all(
    deep: sw.Plan,
) -> None:
    row = deep.row("head")
    places = [(layer, expert) for layer in range(4) for expert in range(6)]

    def names(places: list[tuple[int, int]]) -> list[tuple[str, int]]:
        rows = [replace(row, name=f"layers.{a}.experts.{b}.up") for a, b in places]
        return [(fold.row.name, fold.count) for fold in fold_rows(rows)]

    assert names(places) == [("layers.{0..3}.experts.{0..5}.up", 24)]
    assert names(places[:-1]) == [
        ("layers.0.experts.{0..5}.up", 6),
        ("layers.1.experts.{0..5}.up", 6),
        ("layers.2.experts.{0..5}.up", 6),
        ("layers.3.experts.{0..4}.up", 5),
    ]
