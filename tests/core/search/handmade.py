"""Graphs made by hand, in the canonical form of capture, for tests of the searches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwright.core.graph.custom_ops import cross_entropy
from shardwright.core.graph.graph import Graph, Op, Origin, Value

aten = torch.ops.aten


class GraphBuilder:
    """Adds operators one by one; `build` makes the graph that returns the last one's outputs."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.parameters: list[Value] = []
        self.ops: list[Op] = []

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Value:
        self.inputs.append(Value(name, shape, dtype, Origin.INPUT))
        return self.inputs[-1]

    def parameter(self, name: str, *shape: int) -> Value:
        self.parameters.append(Value(name, shape, torch.float32, Origin.PARAMETER, True))
        return self.parameters[-1]

    def op(self, name: str, target: Any, *args: Any, **kwargs: Any) -> Value:
        """One operator with one output, whose shape meta tensors tell."""

        def meta(value: Value) -> torch.Tensor:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")

        made = target(
            *pytree.tree_map_only(Value, meta, args), **pytree.tree_map_only(Value, meta, kwargs)
        )
        output = Value(name, tuple(made.shape), made.dtype, Origin.ACTIVATION, True)
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


def llama(
    layers: int,
    *,
    batch: int = 8,
    sequence: int = 4096,
    width: int = 8192,
    hidden: int = 28672,
    heads: int = 64,
    kv_heads: int = 8,
    vocabulary: int = 32000,
) -> Graph:
    """LLaMA with the operators that capture finds in `transformers`; the defaults are 70B's."""
    net = GraphBuilder()
    head = width // heads
    ids = net.input("input_ids", batch, sequence, dtype=torch.int64)
    labels = net.input("labels", batch, sequence, dtype=torch.int64)
    angles = net.parameter("rotary.angles", 1, sequence, head)
    tables = [
        net.op(f"rotary.{name}", target, angles)
        for name, target in (("cos", aten.cos.default), ("sin", aten.sin.default))
    ]
    table = net.parameter("embed_tokens.weight", vocabulary, width)
    x = net.op("embed_tokens", aten.embedding.default, table, ids)
    for i in range(layers):
        y = _attention(net, f"{i}.attn", _rms_norm(net, f"{i}.norm1", x), tables, heads, kv_heads)
        x = net.op(f"{i}.add1", aten.add.Tensor, x, y)
        y = _rms_norm(net, f"{i}.norm2", x)
        gate = net.op(f"{i}.silu", aten.silu.default, net.linear(f"{i}.gate_proj", y, hidden))
        y = net.op(f"{i}.mul", aten.mul.Tensor, gate, net.linear(f"{i}.up_proj", y, hidden))
        x = net.op(f"{i}.add2", aten.add.Tensor, x, net.linear(f"{i}.down_proj", y, width))
    logits = net.linear("lm_head", _rms_norm(net, "norm", x), vocabulary)
    net.op("loss", cross_entropy, logits, labels)
    return net.build()


def _rms_norm(net: GraphBuilder, name: str, x: Value) -> Value:
    wide = net.op(f"{name}.to", aten._to_copy.default, x, dtype=torch.float32)
    square = net.op(f"{name}.pow", aten.pow.Tensor_Scalar, wide, 2)
    mean = net.op(f"{name}.mean", aten.mean.dim, square, [-1], True)
    scale = net.op(
        f"{name}.rsqrt", aten.rsqrt.default, net.op(f"{name}.add", aten.add.Tensor, mean, 1e-6)
    )
    y = net.op(f"{name}.mul", aten.mul.Tensor, wide, scale)
    return net.op(f"{name}.mul_1", aten.mul.Tensor, net.parameter(f"{name}.w", x.shape[-1]), y)


def _attention(
    net: GraphBuilder, name: str, x: Value, tables: list[Value], heads: int, kv_heads: int
) -> Value:
    batch, sequence, width = x.shape
    head = width // heads

    def projected(part: str, number: int) -> Value:
        y = net.linear(f"{name}.{part}_proj", x, number * head)
        y = net.op(f"{name}.{part}.view", aten.view.default, y, [batch, sequence, number, head])
        return net.op(f"{name}.{part}.transpose", aten.transpose.int, y, 1, 2)

    def rotated(part: str, y: Value) -> Value:
        cos, sin = (
            net.op(f"{name}.{part}.unsqueeze{i}", aten.unsqueeze.default, table, 1)
            for i, table in enumerate(tables)
        )
        first = net.op(f"{name}.{part}.slice1", aten.slice.Tensor, y, 3, 0, head // 2)
        second = net.op(f"{name}.{part}.slice2", aten.slice.Tensor, y, 3, head // 2, head)
        turned = net.op(
            f"{name}.{part}.cat",
            aten.cat.default,
            [net.op(f"{name}.{part}.neg", aten.neg.default, second), first],
            -1,
        )
        return net.op(
            f"{name}.{part}.add",
            aten.add.Tensor,
            net.op(f"{name}.{part}.mul1", aten.mul.Tensor, y, cos),
            net.op(f"{name}.{part}.mul2", aten.mul.Tensor, turned, sin),
        )

    q, k = rotated("q", projected("q", heads)), rotated("k", projected("k", kv_heads))
    v = projected("v", kv_heads)
    y = net.op(
        f"{name}.sdpa",
        aten.scaled_dot_product_attention.default,
        *(q, k, v, None, 0.0, True),
        enable_gqa=heads != kv_heads,
    )
    y = net.op(f"{name}.transpose", aten.transpose.int, y, 1, 2)
    y = net.op(f"{name}.view", aten.view.default, y, [batch, sequence, width])
    return net.linear(f"{name}.o_proj", y, width)
