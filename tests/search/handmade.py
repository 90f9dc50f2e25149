"""Graphs made by hand, in the canonical form of capture, for tests of the searches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwright.graph.graph import Graph, Kind, Op, Value

aten = torch.ops.aten


class GraphBuilder:
    """Adds operators one by one; `build` makes the graph that returns the last one's outputs."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.parameters: list[Value] = []
        self.ops: list[Op] = []

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Value:
        self.inputs.append(Value(name, shape, dtype, Kind.INPUT))
        return self.inputs[-1]

    def parameter(self, name: str, *shape: int) -> Value:
        self.parameters.append(Value(name, shape, torch.float32, Kind.PARAMETER, True))
        return self.parameters[-1]

    def op(self, name: str, target: Any, *args: Any, **kwargs: Any) -> Value:
        """One operator with one output, whose shape meta tensors tell."""

        def meta(value: Value) -> torch.Tensor:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")

        made = target(
            *pytree.tree_map_only(Value, meta, args), **pytree.tree_map_only(Value, meta, kwargs)
        )
        output = Value(name, tuple(made.shape), made.dtype, Kind.ACTIVATION, True)
        self.ops.append(Op(name, target, args, kwargs, (output,)))
        return output

    def linear(self, name: str, x: Value, features: int, bias: bool = False) -> Value:
        """As capture writes it: the bias is an operator of its own."""
        weight = self.parameter(f"{name}.weight", features, x.shape[-1])
        y = self.op(name, aten.linear.default, x, weight)
        if not bias:
            return y
        return self.op(f"{name}.bias", aten.add.Tensor, y, self.parameter(f"{name}.b", features))

    def build(self) -> Graph:
        spec = pytree.tree_flatten((tuple(self.inputs), {}))[1]
        outputs = self.ops[-1].outputs if self.ops else ()
        return Graph(
            tuple(self.ops), tuple(self.inputs), spec, outputs, spec, tuple(self.parameters)
        )


def case_a(batch: int = 32, bias: bool = True) -> Graph:
    """The published example: Flatten, then Linear 784-512-512-1 with ReLU between."""
    net = GraphBuilder()
    x = net.input("x", batch, 1, 28, 28)
    x = net.op("flatten", aten.view.default, x, [batch, 784])
    x = net.op("relu1", aten.relu.default, net.linear("layer1", x, 512, bias))
    x = net.op("relu2", aten.relu.default, net.linear("layer2", x, 512, bias))
    net.linear("layer3", x, 1, bias)
    return net.build()


def case_w() -> Graph:
    """Two products with a wide dimension between, the batch fed directly."""
    net = GraphBuilder()
    x = net.linear("up", net.input("x", 32, 1024), 8192)
    net.linear("down", x, 1024)
    return net.build()


def one_product(rows: int, columns: int, summed: int) -> Graph:
    """One product behind an operator that cannot be cut, so that nothing is redistributed."""
    net = GraphBuilder()
    x = net.op("sort", aten.flip.default, net.input("x", summed, rows), [0, 1])
    x = net.op("transposed", aten.t.default, x)
    net.linear("product", x, columns)
    return net.build()


def residual_mlp(batch: int = 32, width: int = 512, blocks: int = 3) -> Graph:
    """`x + down(relu(up(x)))`, several times."""
    net = GraphBuilder()
    x = net.linear("stem", net.input("x", batch, width), width)
    for i in range(blocks):
        y = net.op(f"{i}.relu", aten.relu.default, net.linear(f"{i}.up", x, 4 * width))
        x = net.op(f"{i}.add", aten.add.Tensor, x, net.linear(f"{i}.down", y, width))
    return net.build()
