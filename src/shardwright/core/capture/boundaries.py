"""Assignment of the pin of a traced call to its only operator, or to its arguments and results.

A pinned function or module without submodules is traced with an alias of each argument and result
tensor. If the trace contains a single operator, apart from views and casts, that operator keeps the
pin and the aliases are removed. Otherwise the aliases are pinned.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import fx

from shardwright.core.capture.annotations import (
    CandidateBoundary,
    OperatorArguments,
    PinnedCall,
    SoleOperator,
    add_tag,
    retag,
    tags_of,
)
from shardwright.core.capture.composed import decompose
from shardwright.core.capture.fx_nodes import is_tensor, node_shape, replace, tensor
from shardwright.core.capture.naming import MAIN
from shardwright.core.capture.scalar_indices import keep_scalar_indices
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.errors import StrategyError

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default)

_MOVING = (
    *_CASTS,
    aten.broadcast_tensors.default,  # Its schema does not say that it returns views.
)


_BIASED_PRODUCTS = (aten.addmm.default, aten.baddbmm.default, aten.addmv.default)

_SPLIT_PRODUCTS = (aten.addmm.default, aten.addmv.default, aten.linear.default)
"""Operators that capture splits into a product and the addition of a bias."""


def settle_boundaries(graph: fx.Graph) -> None:
    """Remove the aliases of pinned calls with a single operator, and pin the aliases of other
    calls.

    Raises:
        StrategyError: if a call has several operators, and its pin does not match its arguments and
            results.
    """
    if any(isinstance(tag, CandidateBoundary) for node in graph.nodes for tag in tags_of(node)):
        # What is one operator in a trace, such as a triplet loss, may be several in the graph.
        decompose(graph)
        keep_scalar_indices(graph)
    aliases: dict[PinnedCall, list[tuple[fx.Node, CandidateBoundary]]] = defaultdict(list)
    # Nodes by the `id()` of their tag, one tag object per call.
    inside: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for tag in tags_of(node):
            if isinstance(tag, CandidateBoundary):
                aliases[tag.call].append((node, tag))
            inside[id(tag)].append(node)
    for call, candidates in aliases.items():
        alias_nodes = {node for node, _ in candidates}
        nodes = [node for node in inside[id(call.tag)] if node not in alias_nodes]
        single = _find_single_operator(nodes)
        if single is not None and _reads_other_tensors(single, candidates, nodes):
            single = None
        is_one = single is not None
        # A single operator takes the pin itself, whether or not it fits arguments and results.
        if single is None and call.problems:
            raise StrategyError(call.problems[0])
        arguments = {node: tag.argument for node, tag in candidates if tag.argument is not None}
        if single is not None:
            add_tag(single, SoleOperator(_only_moves_or_casts(single)))
        if single is not None and arguments:
            add_tag(single, OperatorArguments(_match_arguments(single, arguments)))
        # The tag stays only on a single operator that it pins: several would each be pinned.
        for node in () if is_one and call.is_pin else inside[id(call.tag)]:
            retag(node, call.tag)
        for node, tag in candidates:
            if is_one:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                replace(node, source)
            else:
                retag(node, tag, tag.tag)


def _find_single_operator(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the only operator among the nodes of a call; None if there are several, or none."""
    operators = [node for node in nodes if node.op == "call_function" and _has_result(node)]
    computing = [node for node in operators if not _only_moves_or_casts(node)]
    # Operators without inputs create constants, and count only if the call has no others.
    computing = [node for node in computing if node.all_input_nodes] or computing
    # A bias addition or an activation beside one matrix product leaves it the operator of the call.
    main = [node for node in computing if _is_main_operator(node)]
    for candidates in (main, computing) if computing else (operators,):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _reads_other_tensors(
    single: fx.Node,
    candidates: Sequence[tuple[fx.Node, CandidateBoundary]],
    nodes: Sequence[fx.Node],
) -> bool:
    """Whether the entries of a pin apply to the arguments of the call, and not to the tensors that
    its operator reads: views of other ranks or with permuted dimensions, constants created in the
    call, or the factors of a product without its bias."""
    arguments = [node for node, _ in candidates if node.args[0] not in nodes]
    if single.target in _SPLIT_PRODUCTS and len(arguments) > 2:
        return True
    # Capture folds biases and causal masks, which products and attention read beside arguments.
    reads_constants = _is_main_operator(single) or single.target in _BIASED_PRODUCTS
    ranks = {node: tag.entry_rank for node, tag in candidates}
    for read in single.all_input_nodes:
        source = read
        while source in nodes and _only_moves_or_casts(source) and source.all_input_nodes:
            source = source.all_input_nodes[0]
        if source in nodes and not reads_constants:
            return True
        if source not in ranks or not is_tensor(read):
            continue
        if _has_permuted_dims(read, source):
            return True
        if _is_flattened(read, source):
            continue
        if len(node_shape(read)) != ranks[source] == len(node_shape(source)):
            return True
    return False


def _has_permuted_dims(view: fx.Node, source: fx.Node) -> bool:
    """Whether a view of `source` has its dimensions, of which none is added, in another order."""
    if view is source or len(node_shape(view)) != len(node_shape(source)):
        return False
    # Strides have the order of dimensions in memory, whichever operators have made the view.
    pairs = zip(tensor(view).stride(), tensor(source).stride(), node_shape(source), strict=True)
    strides = [(new, old) for new, old, size in pairs if size > 1]
    return sorted(strides) != sorted(strides, key=lambda pair: pair[::-1])


def _is_flattened(node: fx.Node, source: fx.Node) -> bool:
    """Whether a view only merges leading dimensions, which `move_flattening_down` restores."""
    sizes, flat = node_shape(source), node_shape(node)
    num_merged = len(sizes) - len(flat) + 1
    return bool(flat) and flat == (prod(sizes[:num_merged]), *sizes[num_merged:])


def _match_arguments(node: fx.Node, arguments: Mapping[fx.Node, str]) -> tuple[str | None, ...]:
    """Return which argument of the pinned call each input of an operator is, by name; None for
    other inputs.

    Args:
        node: the operator.
        arguments: the name of each argument of the pinned call, by its alias.
    """
    names: list[str | None] = []
    for source in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(source, fx.Node):
            # Through casts, since the pin is of the argument that the user passed.
            while source not in arguments and source.target in _CASTS:
                source = source.all_input_nodes[0]
            names.append(arguments.get(source))
    return tuple(names)


def _has_result(node: fx.Node) -> bool:
    """Whether a node computes a tensor; elements of tuples and assertions about dtypes do not."""
    is_assertion = isinstance(node.target, OpOverload) and not schema_of(node.target).returns
    return node.target is not operator.getitem and not is_assertion


def _is_main_operator(node: fx.Node) -> bool:
    # The operators of the gate of `shardwright::experts` are separate nodes until `canonicalize`.
    ours = isinstance(node.target, OpOverload) and node.target.namespace == "shardwright"
    return ours or node.target in MAIN


def _only_moves_or_casts(node: fx.Node) -> bool:
    """Whether an operator only views, copies, casts or broadcasts tensors."""
    if node.target in _MOVING or not isinstance(node.target, OpOverload):
        return True
    returns = schema_of(node.target).returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
