"""Mixtures of experts: tokens, experts, and the inner dimension of each expert can be sharded.

Expert parallelism needs no all-to-all: the devices along the expert axes read the same tokens, and
the output over the local experts is a partial sum. No token is dropped, however unbalanced the
routing. The hidden dimension is not sharded: the gate needs the complete sum over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    argument_binder,
    call_arguments,
    factor_names,
    input_factors,
    sharding_rule,
)
from shardwright.core.rules.rule import Dims, LocalSharding, MainFactors, ShardingRule, rule_for


@rule_for(experts)
def experts_rule(op: Op) -> ShardingRule:
    """Mixture of experts, `b s _, b s _, b s _, e _ i _, e _ i -> b s _`: tokens, experts `e` and
    the inner dimension `i` can be sharded.

    Sharding `e` or `i` makes the output a partial sum.
    """
    arguments = call_arguments(op)
    tokens = factor_names(op.output, exclude="ei")[:-1]
    # A dimension of size 2, for gate and up projection, precedes or (interleaved) follows the inner
    # dimension. It stays replicated, as a device needs both projections of its inner features.
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
        input_factors(op, dims),
        ((*tokens, None),),
        reduced="e i",
        kernel=_build_experts_kernel,
        # Input 3, `gate_up`, is the larger of the two weights.
        main=MainFactors({**dict.fromkeys(map(str, tokens), "I"), "e": "E", "i": "K"}, weight=3),
    )


def _build_experts_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    total = call_arguments(op)["gate_up"].shape[0]
    num_local = total // local.shard_counts.get("e", 1)
    inner_shards = local.shard_counts.get("i", 1)
    first = local.index("e") * num_local if num_local < total else 0
    bind = argument_binder(op)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        if arguments["down_bias"] is not None:
            # The devices that share an expert sum their outputs, so the bias must be split.
            arguments["down_bias"] = arguments["down_bias"] / inner_shards
        return experts(**{**arguments, "first": first, "total": total})

    return run
