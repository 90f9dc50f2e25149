"""Graphs as JSON: what is read is what was written, and no code in it is run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sample_models
import shardwright as sw
from shardwright.core.graph.graph import Graph, Op, Value, WholeBatch
from shardwright.core.graph.serialize import FORMAT, dumps, loads, with_header
from shardwright.core.torch_internals.pytree import treespec_loads

NOT_A_GRAPH = r"not a graph|serialized graph"


def small() -> Graph:
    return sw.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),))


class WithConstants(nn.Module):
    """Constants of several dtypes, an infinite number, a slice, and a nested result."""

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
        mask = torch.tensor([True, False, True, True])
        x = x.masked_fill(mask, float("-inf")) * torch.tensor(3, dtype=torch.float64)
        return {"x": (x[:, 1:], None), "mean": x.to(torch.bfloat16).mean() * scale}


class Updating(nn.Module):
    """In micro-batches: reads the prologue, updates buffers, and returns values of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.linear(x) - self.mean
        self.mean.lerp_(z.detach().mean(0), 0.1)
        return nn.functional.cross_entropy(z, y, ignore_index=0), z, z.detach().std(), (y > 1).sum()


def in_micro_batches() -> Graph:
    batch = torch.randn(4, 4), torch.arange(4)
    graph = sw.plan(Updating(), batch, devices=1, micro_batches=2).graph
    assert graph is not None
    return graph


def models() -> dict[str, Callable[[], Graph]]:
    def of_sample(name: str) -> Callable[[], Graph]:
        def captured() -> Graph:
            net, args, kwargs = getattr(sample_models, name)(batch=4)
            return sw.capture(net, args, kwargs)

        return captured

    named = {name: of_sample(name) for name in ("mlp", "resnet", "llama", "gpt2")}
    constants = lambda: sw.capture(WithConstants(), (torch.ones(3, 4, dtype=torch.float64),))  # noqa: E731
    return {**named, "constants": constants, "micro-batches": in_micro_batches}


def described(thing: Any, names: dict[int, str]) -> Any:
    """A graph without the identities of its values."""
    if isinstance(thing, (Graph, Op, WholeBatch)):
        return [described(getattr(thing, each.name), names) for each in fields(thing)]
    if isinstance(thing, Value):
        number = names.setdefault(id(thing), f"value {len(names)}")
        return number, [getattr(thing, each.name) for each in fields(thing)]
    if isinstance(thing, dict):
        return [described(list(item), names) for item in thing.items()]
    if isinstance(thing, (list, tuple)):
        return type(thing) is list, [described(each, names) for each in thing]
    return thing.tolist() if isinstance(thing, torch.Tensor) else thing


@pytest.mark.parametrize("model", models().values(), ids=models())
def test_a_graph_that_is_read_is_the_one_that_was_written(model: Callable[[], Graph]) -> None:
    graph = model()
    again = loads(dumps(graph))
    assert again.fingerprint == graph.fingerprint
    assert described(again, {}) == described(graph, {})
    assert [op.target for op in again.ops] == [op.target for op in graph.ops]


def planted(change: Callable[[Any], Any]) -> bytes:
    """A graph that is written, and then changed."""

    def walk(content: Any) -> Any:
        if isinstance(content, list):
            content = [walk(each) for each in content]
        return change(content)

    return with_header(json.dumps(walk(json.loads(body_of(dumps(small()))))).encode())


def body_of(content: bytes) -> bytes:
    return content.partition(b"\n")[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: ["operator", "load_library.x.y"] if c[:1] == ["operator"] else c,
            NOT_A_GRAPH,
        ),
        (lambda c: ["function", "eval"] if c[:1] == ["operator"] else c, "KeyError: 'eval'"),
        (lambda c: ["dtype", "hub"] if c[:1] == ["dtype"] else c, "in place of a dtype"),
        (lambda c: "0\nimport os" if c == "0" else c, "control characters"),
        (
            lambda c: ["dict", "x=open('run')", 1] if c == ["dict"] else c,
            "keywords that are not identifiers",
        ),
        (lambda c: ["module", "os"] if c[:1] == ["tuple"] else c, "KeyError: 'module'"),
        (
            lambda c: c[1:] if c[:1] == ["Graph"] else c,
            NOT_A_GRAPH,
        ),
    ],
    ids=["operator", "function", "dtype", "newline", "keyword", "kind", "shape"],
)
def test_a_planted_reference_to_code_is_refused(change: Callable[[Any], Any], message: str) -> None:
    content = planted(lambda c: change(c) if isinstance(c, (list, str)) else c)
    assert content != dumps(small())
    with pytest.raises(ValueError, match=message):
        loads(content)


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"{", b"[" * 100_000, b'["Graph"]', b"\xff"])
def test_what_is_no_graph_is_a_value_error(content: bytes) -> None:
    for each in (content, with_header(content)):
        with pytest.raises(ValueError, match=NOT_A_GRAPH):
            loads(each)


def test_a_graph_with_any_bit_flipped_is_refused() -> None:
    content = dumps(small())
    for position in range(len(content)):
        for bit in (0, 6):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with pytest.raises(ValueError, match=NOT_A_GRAPH):
                loads(bytes(damaged))


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c[:200], lambda c: c + b" "])
def test_a_graph_that_is_cut_short_or_longer_is_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match="its checksum differs"):
        loads(change(dumps(small())))


def test_a_graph_of_another_key_is_refused() -> None:
    content = dumps(small(), "one")
    assert loads(content, "one").fingerprint == small().fingerprint
    with pytest.raises(ValueError, match="its checksum differs"):
        loads(content, "two")


def test_a_graph_of_another_format_is_refused_by_its_number() -> None:
    content = dumps(small()).replace(b"format %d," % FORMAT, b"format 99,")
    with pytest.raises(ValueError, match=f"graph of format 99, but this release reads {FORMAT}"):
        loads(content)


def test_a_graph_without_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="no header"):
        loads(body_of(dumps(small())))


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return Path.mkdir, (tmp_path / "run",)

    content = pickle.dumps(Planted())
    with pytest.raises(ValueError, match=NOT_A_GRAPH):
        loads(content)
    assert not (tmp_path / "run").exists()


def test_what_the_format_does_not_know_is_not_written() -> None:
    graph = small()
    for tag in (object(), lambda: None, {1}):
        ops = (replace(graph.ops[0], tags=(tag,)), *graph.ops[1:])
        with pytest.raises(TypeError, match="cannot be serialized"):
            dumps(replace(graph, ops=ops))


FACTORY = {
    "default_factory_module": "os",
    "default_factory_name": "abort",
    "dict_context": ["a"],
}
LEAF = {"type": None, "context": None, "children_spec": []}
ENUM = json.dumps([{"__enum__": True, "fqn": "planted_module_of_a_structure:Kind", "name": "A"}])


@pytest.mark.parametrize(
    ("structure", "named"),
    [
        ({"type": "collections.defaultdict", "context": FACTORY}, "calls `os.abort`"),
        ({"type": "builtins.dict", "context": ENUM}, "refers to `planted_module"),
        ({"type": "builtins.dict", "context": "["}, "not a serialized `TreeSpec`"),
    ],
)
def test_a_structure_imports_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, structure: dict[str, Any], named: str
) -> None:
    (tmp_path / "planted_module_of_a_structure.py").write_text("open('run', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=named):
        treespec_loads(json.dumps([1, {**structure, "children_spec": [LEAF]}]))
    assert not (tmp_path / "run").exists()
