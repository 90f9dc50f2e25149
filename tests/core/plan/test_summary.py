"""The summary of a plan: at most 25 lines, in the words of the field."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from sample_models import llama, network
from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.parallelism import parallelism_phrases
from shardwright.core.plan.summary import MAX_LINES, plan_summary
from shardwright.core.plan.text_columns import format_columns


class Wide(nn.Module):
    """Many layers of names without numbers, each of another size."""

    def __init__(self) -> None:
        super().__init__()
        for layer in range(24):
            name = f"a_layer_with_a_long_name_{layer:x}_of_its_own"
            self.add_module(name, nn.Sequential(nn.Linear(64 + layer % 3, 64 + (layer + 1) % 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = torch.relu(child(x))
        return x


def plans() -> dict[str, sw.Plan]:
    net, args, kwargs = llama(batch=16, layers=4)
    hsdp = {"threshold": 0}
    staged: dict[str, Any] = {"stages": 2, "micro_batches": 4, "cluster": "h100", "hsdp": hsdp}
    return {
        "tensor parallel": sw.plan(net, args, kwargs, devices=8, mem_coeff=10.0),
        "staged": sw.plan(net, args, kwargs, devices=8, mode="data_parallel", **staged),
        "wide": sw.plan(Wide(), (torch.randn(12, 64),), devices=12, mem_coeff=1.0),
        "alone": sw.plan(net, args, kwargs, devices=1),
        "odd": sw.plan(*network(batch=32), devices=40),
    }


@pytest.fixture(scope="module")
def made() -> dict[str, sw.Plan]:
    return plans()


@pytest.mark.parametrize("name", sorted(["tensor parallel", "staged", "wide", "alone", "odd"]))
@pytest.mark.parametrize("width", [80, 120, 160])
def test_it_has_at_most_25_lines_of_at_most_the_width(
    made: dict[str, sw.Plan], name: str, width: int
) -> None:
    for plan in (made[name], sw.Plan.from_json(made[name].to_json())):
        lines = plan_summary(plan, width).splitlines()
        assert len(lines) <= MAX_LINES
        assert max(map(len, lines)) <= width
        full = plan.text(full=True).splitlines()
        assert max(map(len, full)) <= 160


def test_layers_are_split_in_the_words_of_the_field(made: dict[str, sw.Plan]) -> None:
    plan = made["tensor parallel"]

    def words(name: str) -> str:
        return ", ".join(parallelism_phrases(plan, plan.row(f"model.layers.0.{name}")))

    assert words("mlp.up_proj").startswith("column-parallel over ")
    assert words("mlp.down_proj").startswith("row-parallel over ")
    assert words("self_attn.scaled_dot_product_attention").startswith("tensor-parallel over ")
    assert "mlp.{gate_proj,up_proj}" in plan_summary(plan, 160)


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        (None, "data-parallel over dp"),
        ({"level": "level1"}, "ZeRO-1 over fsdp"),
        ({"level": "level3"}, "FSDP over fsdp"),
        ({"level": "level3", "shard_size": 2}, "HSDP over dp·fsdp"),
    ],
)
def test_data_parallel_is_named_by_where_parameters_are_stored(
    sharding: dict[str, Any] | None, words: str
) -> None:
    net, args, kwargs = llama(batch=8)
    hsdp = None if sharding is None else {"threshold": 0, **sharding}
    plan = sw.plan(net, args, kwargs, devices=4, mode="data_parallel", hsdp=hsdp)
    assert parallelism_phrases(plan, plan.row("model.layers.0.mlp.up_proj")) == (words,)


def test_positions_are_sequence_parallel_and_the_rest_is_replicated() -> None:
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    sw.shard(net[0], in_strategy=((1, 4, 1), (1,), (1,)))
    sw.shard(net[1], in_strategy=((1, 1, 1), (1, 1)))
    plan = sw.plan(net, (torch.randn(2, 8, 16),), devices=4)
    (norm,) = (row for row in plan.operators if "layer_norm" in row.operator)
    assert parallelism_phrases(plan, norm)[0].startswith("sequence-parallel over ")
    assert parallelism_phrases(plan, plan.row("1")) == ("replicated",)


def test_a_sum_is_counted_where_it_arises_and_all_bytes_once(made: dict[str, sw.Plan]) -> None:
    plan = made["tensor parallel"]
    text = plan_summary(plan, 160)
    (down,) = (line for line in text.splitlines() if "mlp.down_proj" in line)
    sums = [
        each.forward_bytes + each.backward_bytes
        for row in plan.operators
        for each in row.redistributions
        if each.value.endswith("mlp.down_proj") and each.steps[0].startswith("all_reduce")
    ]
    assert sums and bytes_text(sum(sums)) in down


def test_a_file_without_meanings_is_read_by_the_names_of_its_axes() -> None:
    net, args, kwargs = llama(batch=8)
    plan = sw.plan(net, args, kwargs, devices=4, mode="data_parallel")
    text = plan.to_json().replace('"b": "batch"', "")
    old = sw.Plan.from_json(text)
    assert not any(row.meanings for row in old.operators)
    assert plan_summary(old, 100) == plan_summary(sw.Plan.from_json(plan.to_json()), 100)


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert format_columns(("", "split"), [("a", "b")], 80) == ["   split", "a  b"]


def test_a_plan_of_no_operators_has_an_answer_all_the_same() -> None:
    plan = sw.plan(nn.Identity(), (torch.randn(4, 8),), devices=1)
    assert plan.operators == ()
    assert str(plan).startswith("Plan for 1 device")
    assert plan.choices == ()


def test_what_all_rows_share_is_said_once() -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    text = sw.plan(net, (torch.randn(8, 16),), devices=1).text()
    assert text.count("all replicated") == 1
    assert "nothing else" not in text
    assert ", and" not in text
