"""Replacement of materialized attention masks by masks that kernels compute.

During export, models of `transformers` materialize the mask of all pairs of positions. Fast kernels
do not support it, and for a long sequence it does not fit into memory. This module replaces

- a causal mask by the argument `is_causal`;
- a sliding-window mask by the operator `windowed_attention`;
- a large mask that compares a vector over queries with a vector over keys, such as document ids of
  packed sequences, or that hides padding, by `masked_attention`. The operator recomputes the mask
  from the vectors for each block of queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.canonicalize import insert_reshape
from shardwright.core.capture.fx_nodes import insert, is_tensor, node_arguments, node_shape
from shardwright.core.capture.fx_nodes import replace as replace_node
from shardwright.core.capture.mask_bands import ALL, AND, CAUSAL, SAME, Band, BandDetector
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention

aten = torch.ops.aten

LARGE = 1 << 24
"""Minimum number of elements of a mask that is recomputed block by block; smaller masks remain
tensors."""


def fold_causal_masks(graph: fx.Graph) -> None:
    """Rewrite attention in place; dead code elimination removes the masks that become unused."""
    detector = BandDetector()
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        arguments = node_arguments(node)
        mask = arguments.pop("attn_mask")
        inputs = tuple(arguments.pop(name) for name in ("query", "key", "value"))
        if not is_tensor(mask):
            continue
        band = detector.band(mask)
        # A mask that attention broadcasts over queries or keys is not one of pairs.
        of_pairs = node_shape(mask)[-2:] == tuple(node_shape(each)[-2] for each in inputs[:2])
        # Like `CAUSAL`, `is_causal` aligns the first query with the first key.
        if band == ALL or (band == CAUSAL and of_pairs):
            arguments["is_causal"] = band == CAUSAL
            replace_node(node, insert(node, node.target, inputs, arguments))
        # The blockwise operators have no dropout.
        elif of_pairs and arguments["dropout_p"] == 0:
            _use_blockwise_attention(
                node, inputs, _decompose_mask(mask, detector), arguments["scale"]
            )


@dataclass(frozen=True)
class _MaskCondition:
    """A condition of a mask: a comparison of query and key vectors, or `"all"` of a boolean vector.

    Args:
        name: name of the comparison operator (`"eq"`), or `"all"`.
        vectors: operands, each with a query or key dimension of size 1.
    """

    name: str
    vectors: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _DecomposedMask:
    """Attention mask: the conjunction of a band of positions and further conditions."""

    band: Band = ALL
    terms: tuple[_MaskCondition, ...] = ()

    def __and__(self, other: _DecomposedMask) -> _DecomposedMask:
        return _DecomposedMask(self.band & other.band, self.terms + other.terms)

    def reshaped(self, source: fx.Node, mask: fx.Node) -> _DecomposedMask | None:
        """Return the conditions of `mask`, a reshape of `source`; None if the mask has no such
        decomposition.

        The reshape keeps the last two dimensions.
        """
        before, after = node_shape(source)[:-2], node_shape(mask)[:-2]
        dims = [node_shape(each)[:-2] for term in self.terms for each in term.vectors]
        # A vector with all leading dimensions is reshaped like the mask; one with none stays.
        if any(each != before and prod(each) != 1 for each in dims):
            return None

        def new(vector: fx.Node) -> fx.Node:
            *alone, rows, columns = node_shape(vector)
            lead = () if prod(alone) == 1 else after
            return insert_reshape(vector, (*lead, rows, columns), mask)

        terms = [replace(term, vectors=tuple(map(new, term.vectors))) for term in self.terms]
        return _DecomposedMask(self.band, tuple(terms))


def _decompose_mask(mask: Any, detector: BandDetector) -> _DecomposedMask | None:
    """Decompose a boolean mask of queries and keys into a band and conditions; None if the mask
    contains other operators."""
    band = detector.band(mask)
    if band is not None:
        return _DecomposedMask(band)
    if mask.meta["val"].dtype != torch.bool or len(node_shape(mask)) < 2:
        return None
    # One value per key or per query, as of padding.
    if 1 in node_shape(mask)[-2:]:
        return _DecomposedMask(terms=(_MaskCondition("all", (mask,)),))
    if mask.target in AND:
        return _decompose_conjunction(mask, detector)
    if mask.target in SAME and node_shape(mask.args[0])[-2:] == node_shape(mask)[-2:]:
        conditions = _decompose_mask(mask.args[0], detector)
        if conditions is None or mask.target is not aten.reshape.default:
            return conditions
        return conditions.reshaped(mask.args[0], mask)
    if mask.target in _NAMES and all(_is_query_or_key_vector(each) for each in mask.args):
        return _DecomposedMask(terms=(_MaskCondition(_NAMES[mask.target], mask.args),))
    return None


def _decompose_conjunction(mask: fx.Node, detector: BandDetector) -> _DecomposedMask | None:
    conjunction = _DecomposedMask()
    for each in mask.args:
        conditions = _decompose_mask(each, detector)
        if conditions is None:
            return None
        # A band counts positions, which an operand that is broadcast does not have.
        if conditions.band != ALL and node_shape(each)[-2:] != node_shape(mask)[-2:]:  # type: ignore[arg-type]
            return None
        conjunction &= conditions
    return conjunction


def _is_query_or_key_vector(node: Any) -> bool:
    return is_tensor(node) and len(node_shape(node)) > 1 and 1 in node_shape(node)[-2:]


_NAMES = {getattr(aten, name).Tensor: name for name in ("eq", "ne", "ge", "gt", "le", "lt")}


def _use_blockwise_attention(
    node: fx.Node, inputs: tuple[fx.Node, ...], mask: _DecomposedMask | None, scale: float | None
) -> None:
    query, key, value = inputs[0], *map(_find_unrepeated_heads, inputs[1:])
    shapes = [node_shape(each) for each in (query, key, value)]
    if mask is None or {len(shape) for shape in shapes} != {4} or shapes[1][:3] != shapes[2][:3]:
        return
    batch, _, positions, _ = shapes[0]
    # Self-attention only, causal or in both directions.
    if mask.band.after not in (0, inf) or (batch, positions) != (shapes[1][0], shapes[1][2]):
        return
    causal = mask.band.after == 0
    # `before` excludes the query's own position, a window includes it.
    window = None if mask.band.before == inf else int(mask.band.before) + 1
    if causal and window and not mask.terms:
        node.target, node.args = windowed_attention, (query, key, value, window, scale)
    # Padding alone is expanded from one vector, which needs no memory for all pairs.
    elif positions**2 > LARGE and (causal or any(each.name != "all" for each in mask.terms)):
        vectors = list(dict.fromkeys(each for term in mask.terms for each in term.vectors))
        # Conditions as text for a torch operator: "eq 0 1" compares `vectors[0]` with `vectors[1]`.
        numbers = [[str(vectors.index(each)) for each in term.vectors] for term in mask.terms]
        terms = [" ".join((t.name, *read)) for t, read in zip(mask.terms, numbers, strict=True)]
        node.target = masked_attention
        options = (tuple(vectors), ", ".join(terms), causal, window, scale)
        node.args = (query, key, value, *options)
    else:
        return
    # Shape and dtype of the result are unchanged, so `node.meta["val"]` stays valid.
    node.kwargs = {}


def _find_unrepeated_heads(heads: fx.Node) -> fx.Node:
    """Return the keys or values before heads are repeated for grouped-query attention; `heads` if
    they are not repeated."""
    repeated: Any = heads
    chain = []
    # `repeat_kv` of `transformers`, from its result backward: [batch, heads, 1, …] is expanded by
    # groups and flattened.
    for target in (aten.reshape.default, aten.expand.default, aten.reshape.default):
        if not is_tensor(repeated) or repeated.target is not target:
            return heads
        chain.append(node_shape(repeated))
        repeated = repeated.args[0]
    batch, count, *inner_shape = shape = node_shape(repeated)
    groups = chain[0][1] // count
    expected = [(batch, count * groups, *inner_shape), (batch, count, groups, *inner_shape)]
    apart = (batch, count, 1, *inner_shape)
    return repeated if len(shape) == 4 and chain == [*expected, apart] else heads
