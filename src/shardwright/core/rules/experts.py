"""Mixtures of experts: tokens, experts, and the inner dimension of each expert can be cut.

Devices that cut the experts read the same tokens, and each adds what its own experts make of them:
a partial sum, in which no token is dropped, however unevenly they choose. The hidden dimension is
not cut: the gate needs the whole sum over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import binder, call_arguments, input_dims, names, sharding_rule
from shardwright.core.rules.rule import Dims, Local, Main, ShardingRule, rule_for


@rule_for(experts)
def experts_rule(op: Op) -> ShardingRule:
    arguments = call_arguments(op)
    tokens = names(op.output, exclude="ei")[:-1]
    projected: Dims = ("i", None) if arguments["interleaved"] else (None, "i")
    dims: dict[str, Dims] = {
        "x": (*tokens, None),
        "ids": (*tokens, None),
        "weights": (*tokens, None),
        "gate_up": ("e", *projected, None),
        "down": ("e", None, "i"),
        "gate_up_bias": ("e", *projected),
        "down_bias": ("e", None),
    }
    return sharding_rule(
        op,
        input_dims(op, dims),
        ((*tokens, None),),
        reduced="e i",
        kernel=_kernel,
        main=Main({**dict.fromkeys(map(str, tokens), "I"), "e": "E", "i": "K"}, weight=3),
    )


def _kernel(op: Op, local: Local) -> Callable[..., Any]:
    total = call_arguments(op)["gate_up"].shape[0]
    here = total // local.shard_counts.get("e", 1)
    inner_shards = local.shard_counts.get("i", 1)
    bind = binder(op)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        if arguments["down_bias"] is not None:
            # Each of the devices that share an expert adds its part.
            arguments["down_bias"] = arguments["down_bias"] / inner_shards
        first = local.index("e") * here if here < total else 0
        return experts(**{**arguments, "first": first, "total": total})

    return run
