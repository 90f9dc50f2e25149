"""The tree of a plan's page: modules as they are nested, repeated ones once, with why and how."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import llama
from shardwright.core.cost.memory import bytes_text
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.plan.rows import shape_text
from shardwright.tools.report.page import Branch, Operator
from shardwright.tools.report.tree import MAX_DEPTH, page_tree


def operators(nodes: tuple[Branch | Operator, ...]) -> Iterator[Operator]:
    for node in nodes:
        if isinstance(node, Branch):
            yield from operators(node.children)
        else:
            yield node


def by_path(plan: sw.Plan) -> dict[str, Operator]:
    return {each.path: each for each in operators(page_tree(plan)[0])}


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    net, args, kwargs = llama(batch=8, layers=3)
    options = {"cluster": "h100", "hsdp": {"threshold": 0}}
    return sw.plan(net, args, kwargs, devices=4, mode="data_parallel", **options)  # type: ignore[arg-type]


def test_layers_are_one_branch_with_all_that_is_in_them(plan: sw.Plan) -> None:
    (model,) = [each for each in page_tree(plan)[0] if each.name == "model"]
    assert isinstance(model, Branch)
    (layers,) = [each for each in model.children if each.name.startswith("layers")]
    assert isinstance(layers, Branch) and layers.name == "layers.{0..2}"
    mlp = [each for each in layers.children if each.name == "mlp"]
    assert isinstance(mlp[0], Branch)
    assert {"gate_proj", "up_proj", "down_proj"} <= {each.name for each in mlp[0].children}


def test_sums_are_those_of_the_rows(plan: sw.Plan) -> None:
    tree, _ = page_tree(plan)
    assert sum(each.count for each in tree) == len(plan.operators)
    assert sum(each.bytes for each in tree) == sum(row.bytes for row in plan.operators)
    seconds = sum(row.seconds for row in plan.operators)
    assert sum(each.seconds for each in tree) == pytest.approx(seconds)
    assert plan.step is not None
    kinds = ("matrix products", "attention", "other operators")
    assert seconds == pytest.approx(sum(p.seconds for p in plan.step.parts if p.kind in kinds))


def test_an_operator_shows_its_cuts_layouts_storage_and_redistributions(plan: sw.Plan) -> None:
    shown = by_path(plan)["model.layers.{0..2}.mlp.up_proj"]
    row = plan.row("model.layers.0.mlp.up_proj")
    weight = row.inputs[1][0]
    assert shown.count == 3 and shown.bytes == 3 * row.bytes
    assert shown.cuts == (("b", (0,)),)
    assert [each.name for each in shown.inputs] == [name for name, *_ in row.inputs]
    assert [each.placement for each in shown.inputs] == [e.placement for e in row.input_layouts]
    assert shown.inputs[0].local_shape == shape_text((2, *row.inputs[0][1][1:]))
    assert shown.inputs[1].stored == TensorLayout(plan.mesh, plan.storage[weight]).placement
    (gather,) = shown.redistributions
    assert gather[0] == weight and gather[1].startswith("all_gather dim 0 over fsdp")
    assert gather[2].startswith(f"{bytes_text(row.redistributions[0].forward_bytes)} forward")


def test_tensors_of_one_layout_share_a_picture(plan: sw.Plan) -> None:
    tree, pictures = page_tree(plan)
    layouts = {
        layout for row in plan.operators for layout in (*row.input_layouts, *row.output_layouts)
    }
    used = {t.picture for each in operators(tree) for t in (*each.inputs, *each.outputs)}
    assert used == set(range(len(pictures)))
    assert len(pictures) <= len(layouts)


class Kinds(nn.Module):
    """An operator that is pinned, one that is decided, one that follows, one without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned, self.decided = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.decided(self.pinned(x)))
        return torch.trace(y).sum()


def test_each_operator_says_where_its_cuts_come_from() -> None:
    net = Kinds()
    sw.shard(net.pinned, in_strategy=((2, 1), (1, 1)))
    shown = by_path(sw.plan(net, (torch.randn(8, 8),), devices=2))
    assert [shown[name].why for name in ("pinned", "decided", "relu", "trace")] == [
        "pinned",
        "decided",
        "follows",
        "no rule",
    ]
    assert dict(shown["pinned"].facts)["why"] == "pinned by the user to ((2,1),(1,1))"
    assert "rule" not in dict(shown["trace"].facts)


def test_modules_that_are_nested_without_end_end_somewhere(plan: sw.Plan) -> None:
    path = ".".join(f"m{level}" for level in range(5000))
    (row, *_) = plan.operators
    (top,) = page_tree(replace(plan, operators=(replace(row, name=path),)))[0]
    assert isinstance(top, Branch) and top.name.count(".") < MAX_DEPTH
    (shown,) = top.children
    assert isinstance(shown, Operator) and shown.path == path
