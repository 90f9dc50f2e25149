"""Graphs, plans, programs and errors, compared letter by letter with the files of `golden/`.

A test never changes a file by itself. Where a change is meant, `make golden` writes the files anew
(SHARDWRIGHT_GOLDEN=write), and the diff is read before it is committed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from commands_page import commands_page
from errors_page import errors_page
from markdown_fences import ROOT
from operators_page import operators_page
from sample_models import mlp, network
from shardwright.core.api.save_graphs import program_text
from shardwright.core.graph.printer import graph_text
from shardwright.core.plan.plan_file import json_schema

FOLDER = Path(__file__).parent / "golden"


def compare(name: str, found: str) -> None:
    compare_file(FOLDER / f"{name}.txt", found)


def compare_file(path: Path, found: str) -> None:
    if os.environ.get("SHARDWRIGHT_GOLDEN") == "write":
        path.write_text(found, encoding="utf-8")
        pytest.skip(f"{path.name} written; read the diff")
    assert path.is_file(), f"there is no {path.name}; `make golden` writes it"
    assert found == path.read_text(encoding="utf-8"), "if this is meant: `make golden`"


def published() -> sw.Plan:
    """Golden case A: the network of the documents on 8 devices."""
    net, args, kwargs = network(batch=32)
    return sw.plan(net, args, kwargs, devices=8, order="topology")


def pinned() -> sw.Plan:
    """Two pinned layers: one left as a reduce-scatter, one by layouts in another order of axes, its
    weight stored otherwise than it is used."""
    net, args, kwargs = mlp()
    layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
    sw.shard(net.layers[0], ((1, 8), (1, 8)), out_strategy=((8, 1),))
    sw.shard(
        net.layers[1],
        (layout("None", ("mp", "sp")), layout("dp", ("mp", "sp"))),
        parameter_plan={"weight": (1, 8)},
    )
    return sw.plan(net, args, kwargs, devices=8, mode="semi_auto")


def test_the_graph_of_the_network() -> None:
    graph = published().graph
    assert graph is not None
    compare("network_graph", graph_text(graph))


def test_the_plan_of_the_network() -> None:
    compare("network_plan", published().dump())


def test_the_program_of_the_network_on_rank_0() -> None:
    compare("network_program_rank0", program_text(published()))


def test_the_plan_of_pinned_layers() -> None:
    compare("pinned_plan", pinned().dump())


def test_the_program_of_pinned_layers_on_rank_0() -> None:
    compare("pinned_program_rank0", program_text(pinned()))


def test_a_plan_from_a_file_has_the_same_dump() -> None:
    for plan in (published(), pinned()):
        assert sw.Plan.from_json(plan.to_json()).dump() == plan.dump()


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1).values


class Ranking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = Sorted()
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.out(self.norm(self.scores(x))), x[:, :4])


LINE = sw.Layout((2, 2), ("x", "y"))

FAILURES: dict[str, Callable[[Any], Any]] = {
    "counts that do not divide": lambda net: sw.shard(net.out, ((3, 1), (1, 1))),
    "factors that disagree": lambda net: sw.shard(net.out, ((2, 4), (4, 1))),
    "a sorted dimension that is cut": lambda net: sw.shard(net.scores, ((1, 2),)),
    "more parts than devices": lambda net: sw.shard(net.out, ((8, 2), (1, 2))),
    "a wrong number of inputs": lambda net: sw.shard(net.out, ((8, 1), (1, 1), (1,))),
    "a wrong number of dimensions": lambda net: sw.shard(net.out, ((8,), (1, 1))),
    "a layout of another number of devices": lambda net: sw.shard(
        net.out, (LINE("x", "y"), LINE("None", "y"))
    ),
    "an output that cannot be": lambda net: sw.shard(net.out, ((2, 4), (1, 4)), ((1, 8),)),
    "a parameter that cannot be stored so": lambda net: sw.shard(
        net.out, ((8, 1), (1, 1)), parameter_plan={"weight": (8, 1)}
    ),
    "pins in a mode that takes none": lambda net: sw.shard(net.out, ((8, 1), (1, 1))),
    "a batch that does not divide": lambda net: net,
}


def failure(what: str) -> str:
    """The error's class and text."""
    net = Ranking()
    FAILURES[what](net)
    batch = 6 if what == "a batch that does not divide" else 8
    mode = "data_parallel" if "mode" in what or "batch" in what else "semi_auto"
    with pytest.raises(sw.ShardwrightError) as caught:
        sw.plan(net, (torch.randn(batch, 8),), devices=8, mode=mode)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_the_texts_of_planning_errors() -> None:
    compare("errors", "\n\n".join(f"# {what}\n{failure(what)}" for what in FAILURES) + "\n")


def test_a_value_that_is_read_in_two_ways_is_converted_twice_in_the_dump() -> None:
    class Gram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)
            self.product = sw.Op(torch.matmul)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return self.product(y, y).sum()

    net = Gram()
    sw.shard(net.product, ((2, 1), (1, 4)))
    plan = sw.plan(net, (torch.randn(8, 8),), devices=8, mode="semi_auto")
    lines = [line.strip() for line in plan.dump().splitlines()]
    ways = [lines[i + 1] for i, line in enumerate(lines) if line.startswith("input linear ")]
    assert len(ways) >= 2 and ways[0] != ways[1]
    assert all("all_" in way for way in ways[:2])
    assert all(
        way.split(": ")[0] in plan.explain("product").replace("\n    ", ", then ")
        for way in ways[:2]
    )


def test_the_page_of_commands() -> None:
    compare_file(ROOT / "docs" / "commands.md", commands_page())


def test_the_page_of_operators() -> None:
    compare_file(ROOT / "docs" / "operators.md", operators_page())


def test_the_page_of_errors() -> None:
    compare_file(ROOT / "docs" / "errors.md", errors_page())


def test_the_published_schema_of_plan_files() -> None:
    schema = ROOT / "src" / "shardwright" / "core" / "plan" / "plan.schema.json"
    compare_file(schema, json_schema())
