"""Evaluation of the indices and counts of rows in a traced graph.

Models count the rows of each expert in many ways: `bincount`, `histc`, a sum of one-hot vectors or
of comparisons. Whether a tensor is the end of each expert's rows is therefore tried: the operators
that compute it are run on random experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.fx_nodes import is_tensor, node_shape, tensor
from shardwright.core.torch_internals import pytree

aten = torch.ops.aten

TRIALS = 3
MOST_ELEMENTS = 1 << 28
"""Largest tensor that a trial makes; a one-hot vector for each row is the largest usual one."""

_CREATIONS = (
    *(aten.zeros.default, aten.ones.default, aten.full.default, aten.arange.default),
    *(aten.arange.start, aten.arange.start_step),
)
_LIKE = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)
"""Operators that read only the shape and dtype of their input."""


def row_numbers(node: fx.Node) -> Tensor | None:
    """Return the value of a vector that is computed from constants alone; None for others."""

    def unknown(_: fx.Node) -> Tensor:
        raise _UnknownValueError

    if len(node_shape(node)) != 1:
        return None
    try:
        value: Tensor = _evaluate([node], {}, unknown)[0]
    except _UnknownValueError:
        return None
    return value


def repeats_of_rows(numbers: Tensor | None, count: int) -> int | None:
    """Return how often each of `count` rows is read by consecutive numbers of rows; None if they
    are read in another way."""
    if numbers is None or not count or len(numbers) % count:
        return None
    repeats = len(numbers) // count
    expected = torch.arange(count).repeat_interleave(repeats)
    return repeats if torch.equal(numbers.to(torch.int64), expected) else None


def expert_ends_match(ends: fx.Node, positions: fx.Node, keys: fx.Node, experts: int) -> bool:
    """Whether a sort arranges rows by expert, and `ends` are the ends of each expert's rows.

    Args:
        ends: tensor that should be the end of each expert's rows, `[experts]`.
        positions: position before the sort of each sorted row, `[rows]`.
        keys: experts of the rows before the sort, `[rows]`.
        experts: number of experts.
    """
    if node_shape(ends) != (experts,):
        return False
    # The first integer tensor: counts may be computed from another view of it than the keys.
    root = keys
    while len(root.all_input_nodes) == 1 and is_tensor(root.all_input_nodes[0]):
        if tensor(root.all_input_nodes[0]).is_floating_point():
            break
        (root,) = root.all_input_nodes
    generator = torch.Generator().manual_seed(0)
    for _ in range(TRIALS):
        roots = {root: _draw_experts(root, experts, generator)}
        try:
            found, order, values = _evaluate(
                (ends, positions, keys), roots, lambda node: _draw_values(node, generator)
            )
        except (_UnknownValueError, RuntimeError, IndexError):
            # An operator that fails for values which the model never has.
            return False
        counts = values.to(torch.int64).bincount(minlength=experts)
        is_sorted = bool((values[order].diff() >= 0).all())
        if not is_sorted or not torch.equal(found.to(torch.int64), counts.cumsum(0)):
            return False
    return True


class _UnknownValueError(Exception):
    """The value of a node depends on tensors whose values are unknown."""


def _evaluate(
    nodes: Sequence[fx.Node],
    roots: Mapping[fx.Node, Tensor],
    unknown: Callable[[fx.Node], Tensor],
) -> list[Any]:
    """Run the operators that compute `nodes` from constants and from `roots`.

    Args:
        nodes: nodes of one graph.
        roots: values of nodes.
        unknown: function that returns a value for a node that depends on neither, or raises.
    """
    graph = list(nodes[0].graph.nodes)
    known = set(roots)
    for node in graph:
        reads_known = not known.isdisjoint(node.all_input_nodes)
        if node.op == "call_function" and (reads_known or node.target in (*_CREATIONS, *_LIKE)):
            known.add(node)
    needed = set(nodes)
    for node in reversed(graph):
        if node in needed and node in known and node not in roots and node.target not in _LIKE:
            needed.update(node.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    for node in graph:
        if node in needed and node in roots:
            values[node] = roots[node]
        elif node in needed:
            values[node] = _run_operator(node, values) if node in known else unknown(node)
    return [values[node] for node in nodes]


def _run_operator(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    results = [x for x in pytree.tree_leaves(node.meta["val"]) if isinstance(x, Tensor)]
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if is_random or any(prod(x.shape) > MOST_ELEMENTS for x in results):
        raise _UnknownValueError

    def value(each: fx.Node) -> Any:
        if node.target in _LIKE:
            return torch.empty(node_shape(each), dtype=tensor(each).dtype)
        return values[each]

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    target: Any = node.target
    with torch.no_grad():
        return target(*args, **kwargs)


def _draw_experts(root: fx.Node, experts: int, generator: torch.Generator) -> Tensor:
    """Draw experts of tokens: different ones for each token where `topk` chooses them."""
    sizes = node_shape(root)
    source = root.args[0] if root.args else None
    if isinstance(source, fx.Node) and source.target is aten.topk.default:
        scores = torch.rand(*sizes[:-1], experts, generator=generator)
        drawn = scores.topk(sizes[-1], dim=-1).indices
    else:
        drawn = torch.randint(experts, sizes, generator=generator)
    return drawn.to(tensor(root).dtype)


def _draw_values(node: fx.Node, generator: torch.Generator) -> Tensor:
    like = tensor(node)
    if like.dtype.is_floating_point:
        return torch.rand(like.shape, dtype=like.dtype, generator=generator)
    return torch.randint(2, like.shape, generator=generator).to(like.dtype)
