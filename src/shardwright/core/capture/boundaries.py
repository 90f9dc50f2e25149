"""Decides, once a call is traced, whether its pin is for one operator or for its boundary.

A pinned function or module without submodules is traced with an alias of each tensor that it is
called with and returns. If it turns out to be one operator, apart from views and casts, the aliases
are removed and the operator keeps the pin. Otherwise they stay, and are pinned themselves.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from shardwright.core.capture.annotations import (
    CandidateBoundary,
    PinnedCall,
    retag,
    tags_of,
)
from shardwright.core.capture.fx_nodes import replace
from shardwright.core.capture.naming import MAIN
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.errors import StrategyError

aten = torch.ops.aten

_MOVING = (
    *(aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default),
    aten.broadcast_tensors.default,  # Its schema does not say that it returns views.
)


def settle_boundaries(graph: fx.Graph) -> None:
    """Removes or keeps the aliases at the boundary of pinned calls.

    Raises:
        StrategyError: if a pin does not fit the boundary of a call with several operators.
    """
    aliases: dict[PinnedCall, list[tuple[fx.Node, CandidateBoundary]]] = defaultdict(list)
    inside: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for tag in tags_of(node):
            if isinstance(tag, CandidateBoundary):
                aliases[tag.call].append((node, tag))
            inside[id(tag)].append(node)
    for call, candidates in aliases.items():
        own = {node for node, _ in candidates}
        nodes = [node for node in inside[id(call.mark)] if node not in own]
        is_one = _is_one_operator(nodes)
        if not is_one and call.problems:
            raise StrategyError(call.problems[0])
        for node in () if is_one and call.is_pin else inside[id(call.mark)]:
            retag(node, call.mark)
        for node, tag in candidates:
            if is_one:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                replace(node, source)
            else:
                retag(node, tag, tag.tag)


def _is_one_operator(nodes: Sequence[fx.Node]) -> bool:
    operators = [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem]
    computing = [node for node in operators if not _only_moves(node)]
    # Constants that it creates do not count, unless it does nothing else.
    computing = [node for node in computing if node.all_input_nodes] or computing
    main = [node for node in computing if _is_main(node)]
    return 1 in (len(main), len(computing)) or (not computing and len(operators) == 1)


def _is_main(node: fx.Node) -> bool:
    # Placeholders of mixtures of experts, whose gates are operators of their own until a rewrite.
    ours = isinstance(node.target, OpOverload) and node.target.namespace == "shardwright"
    return ours or node.target in MAIN


def _only_moves(node: fx.Node) -> bool:
    """Whether an operator only changes the form of a tensor."""
    if node.target in _MOVING or not isinstance(node.target, OpOverload):
        return True
    returns = schema_of(node.target).returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
