"""The page of all operators that have sharding rules, each kind with an example."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.core.graph import custom_ops
from shardwright.core.graph.graph import OpTarget
from shardwright.core.rules import rule_of
from shardwright.core.rules.pointwise import pointwise
from shardwright.core.rules.register import example_op
from shardwright.core.rules.rule import RuleMaker, ShardingRule, find_rule_maker, registered_rules
from shardwright.core.torch_internals.operators import OpOverload, operator_name

aten = torch.ops.aten

INTRODUCTION = """\
# Operators

Operators that have a [sharding rule](rules.md), by the module of `shardwright.core.rules` that
registers them: an example of the rule, and the factors whose sharding leaves partial sums.
Operators of one row share their rule.

"""


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _indices(*shape: int) -> Tensor:
    return _tensor(*shape, dtype=torch.int64)


_HEADS = tuple(_tensor(2, 8, 6, 4) for _ in range(3))
_GROUPED = tuple(_tensor(*shape, dtype=torch.bfloat16) for shape in ((8, 16), (2, 16, 8)))
_IMAGES = _tensor(2, 4, 8, 8)
_ROUTED = (_tensor(2, 6, 4), _indices(2, 6, 2), _tensor(2, 6, 2))
_GATE = (
    ("aten.unbind.int", ("%0", -1), ()),
    ("getitem", ("%1", 0), ()),
)
_EXPERTS = (_tensor(8, 2, 6, 4), _tensor(8, 4, 6), None, None)

_EXAMPLES: tuple[tuple[OpTarget, tuple[object, ...]], ...] = (
    (aten.linear.default, (_tensor(2, 6, 4), _tensor(8, 4))),
    (aten.matmul.default, (_tensor(2, 8, 6, 4), _tensor(2, 8, 4, 6))),
    (aten.addmm.default, (_tensor(8), _tensor(6, 4), _tensor(4, 8))),
    (aten.einsum.default, ("bhid,bhjd->bhij", list(_HEADS[:2]))),
    (aten.inner.default, (_tensor(4, 6), _tensor(8, 6))),
    (aten.tensordot.default, (_tensor(2, 4, 6), _tensor(4, 6, 8), [1, 2], [0, 1])),
    (aten.outer.default, (_tensor(4), _tensor(6))),
    (aten._grouped_mm.default, (*_GROUPED, _tensor(2, dtype=torch.int32))),
    (aten.scaled_dot_product_attention.default, _HEADS),
    (custom_ops.windowed_attention, (*_HEADS, 3)),
    (
        custom_ops.masked_attention,
        (*_HEADS, (_indices(2, 1, 6, 1), _indices(2, 1, 1, 6)), "eq 0 1", True),
    ),
    (aten.embedding.default, (_tensor(8, 4), _indices(2, 6))),
    (custom_ops.embedding_bag, (_tensor(8, 4), _indices(2, 6))),
    (aten.cdist.default, (_tensor(2, 6, 4), _tensor(2, 8, 4))),
    (aten.linalg_solve.default, (_tensor(2, 6, 4, 4), _tensor(2, 6, 4, 3))),
    (aten.fft_rfft.default, (_tensor(2, 6, 8),)),
    (aten.grid_sampler.default, (_IMAGES, _tensor(2, 6, 6, 2), 0, 0, False)),
    (custom_ops.experts, (*_ROUTED, *_EXPERTS, _GATE)),
    (aten.conv2d.default, (_IMAGES, _tensor(6, 4, 3, 3))),
    (aten.layer_norm.default, (_tensor(2, 6, 4), [4], _tensor(4), _tensor(4))),
    (aten.group_norm.default, (_IMAGES, 2, _tensor(4), _tensor(4))),
    (aten.softmax.int, (_tensor(2, 6, 4), -1)),
    (aten.dropout.default, (_tensor(2, 6), 0.1, True)),
    (aten.conv_transpose2d.input, (_IMAGES, _tensor(4, 6, 3, 3), None, [2], [1], [1])),
    (aten.max_pool2d.default, (_IMAGES, [2, 2])),
    (aten.upsample_bilinear2d.vec, (_IMAGES, [12, 12], False, None)),
    (aten.upsample_nearest2d.vec, (_IMAGES, [16, 16], None)),
    (aten.unfold.default, (_tensor(2, 8), 1, 3, 1)),
    (aten.roll.default, (_tensor(2, 6), [1], [1])),
    (aten.im2col.default, (_IMAGES, [3, 3], [1, 1], [1, 1], [1, 1])),
    (aten.col2im.default, (_tensor(2, 36, 36), [6, 6], [3, 3], [1, 1], [1, 1], [1, 1])),
    (custom_ops.cross_entropy, (_tensor(2, 6, 8), _indices(2, 6))),
    (aten.mse_loss.default, (_tensor(2, 6), _tensor(2, 6))),
    (aten.clone.default, (_tensor(2, 6),)),
    (aten.prelu.default, (_tensor(2, 4, 6), _tensor(4))),
    (aten.view.default, (_tensor(2, 6, 8), [2, 6, 4, 2])),
    (aten.flatten.using_ints, (_tensor(2, 6, 8), 0, 1)),
    (aten.permute.default, (_tensor(2, 6, 8), [2, 0, 1])),
    (aten.expand.default, (_tensor(2, 1, 4), [2, 6, 4])),
    (aten.repeat.default, (_tensor(2, 6), [1, 2])),
    (aten.repeat_interleave.self_int, (_tensor(2, 4), 3, 1)),
    (aten.tril.default, (_tensor(2, 6, 6),)),
    (aten.full.default, ([4, 6], 0.0)),
    (aten.zeros_like.default, (_tensor(4, 6),)),
    (aten.arange.default, (4,)),
    (aten.sum.dim_IntList, (_tensor(2, 6, 4), [0, 2])),
    (aten.mean.dim, (_tensor(2, 6, 4), [1], True)),
    (aten.amax.default, (_tensor(2, 6, 4), [1])),
    (aten.topk.default, (_tensor(8, 6), 2)),
    (aten.kthvalue.default, (_tensor(8, 6), 2)),
    (aten.cumsum.default, (_tensor(2, 6), 1)),
    (aten.cat.default, ([_tensor(2, 6), _tensor(2, 4)], 1)),
    (aten.stack.default, ([_tensor(2, 6), _tensor(2, 6)], 1)),
    (aten.chunk.default, (_tensor(2, 6), 2, 1)),
    (aten.select.int, (_tensor(2, 6), 1, 0)),
    (aten.slice.Tensor, (_tensor(2, 6), 1, 0, 4)),
    (aten.constant_pad_nd.default, (_tensor(2, 6), [1, 1])),
    (aten.one_hot.default, (_indices(2, 6), 8)),
    (aten.index.Tensor, (_tensor(6, 4), [_indices(2, 3)])),
    (aten.index_put.default, (_tensor(6, 4), [_indices(2)], _tensor(2, 4))),
    (aten.gather.default, (_tensor(2, 6), 1, _indices(2, 3))),
    (aten.scatter_add.default, (_tensor(2, 6), 1, _indices(2, 6), _tensor(2, 6))),
    (aten.index_select.default, (_tensor(6, 4), 0, _indices(3))),
    (aten.index_add.default, (_tensor(6, 4), 0, _indices(3), _tensor(3, 4))),
)


def example(target: OpTarget, args: tuple[object, ...]) -> ShardingRule | None:
    """The rule of `target(*args)`, where tensors in `args` are on the meta device."""
    return rule_of(example_op(target, args))


def operators_page() -> str:
    """The page in Markdown."""
    return INTRODUCTION + rules_table() + "\n"


def rules_table() -> str:
    """A Markdown table: for each rule its operators, an example and the factors that it reduces."""
    operators: dict[RuleMaker, dict[str, None]] = {}
    for target, maker in registered_rules().items():
        operators.setdefault(maker, {})[_name(target)] = None
    examples = {find_rule_maker(target): example(target, args) for target, args in _EXAMPLES}
    lines = ["| operators | example | reduces |", "|---|---|---|"]
    module = ""
    # Tests that run in the same process register rules of their own.
    own = (maker for maker in operators if maker.__module__.startswith("shardwright."))
    for maker in sorted(own, key=lambda maker: maker.__module__):
        if maker.__module__ != module:
            module = maker.__module__
            lines.append(f"| **{module.rpartition('.')[2]}** | | |")
        rule = examples.get(maker)
        notation = f"`{rule}`" if rule else ""
        sums = " ".join(f"`{f}`" for f in rule.factors if f in rule.reduced) if rule else ""
        names = ", ".join(operators[maker])
        if maker is pointwise:
            names += " and all that ATen tags `pointwise`"
        lines.append(f"| {names} | {notation} | {sums} |")
    return "\n".join(lines)


def _name(target: object) -> str:
    """The name of an operator without its overload."""
    if isinstance(target, OpOverload):
        return operator_name(target)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
