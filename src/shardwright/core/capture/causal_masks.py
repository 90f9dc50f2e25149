"""Masks of attention that follow from positions and other numbers of tokens are not held.

While they are exported, models of `transformers` make the mask of all pairs of positions, which
fast kernels do not read and which no device could hold for a long sequence. One that is proved to
be causal becomes `is_causal`, and that of a sliding window `windowed_attention`. A large one that
compares numbers of queries and of keys, as for packed documents, or hides padding, becomes these
numbers and what must hold of them: `masked_attention` makes it anew for each block of queries.
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
from shardwright.core.capture.mask_bands import ALL, AND, CAUSAL, SAME, Band, BandProofs
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention

aten = torch.ops.aten

LARGE = 1 << 24
"""Pairs of positions of a mask that is not held; small ones cost less than to make them anew."""


def fold_causal_masks(graph: fx.Graph) -> None:
    """Rewrites attention in place; leaves masks without readers for dead code removal."""
    proofs = BandProofs()
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        arguments = node_arguments(node)
        mask = arguments.pop("attn_mask")
        inputs = tuple(arguments.pop(name) for name in ("query", "key", "value"))
        if not is_tensor(mask):
            continue
        band = proofs.band(mask)
        of_pairs = node_shape(mask)[-2:] == tuple(node_shape(each)[-2] for each in inputs[:2])
        if band == ALL or (band == CAUSAL and of_pairs):
            arguments["is_causal"] = band == CAUSAL
            replace_node(node, insert(node, node.target, inputs, arguments))
        elif of_pairs and arguments["dropout_p"] == 0:
            _fold_blockwise(node, inputs, _parts(mask, proofs), arguments["scale"])


@dataclass(frozen=True)
class _Term:
    """A comparison of numbers of queries and of keys by its name, or `"all"` of some booleans."""

    name: str
    vectors: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Parts:
    """What a mask says: a band, and terms that must be true."""

    band: Band = ALL
    terms: tuple[_Term, ...] = ()

    def __and__(self, other: _Parts) -> _Parts:
        return _Parts(self.band & other.band, self.terms + other.terms)

    def reshaped(self, source: fx.Node, mask: fx.Node) -> _Parts | None:
        """Of a mask of the same pairs with other dimensions before them."""
        before, after = node_shape(source)[:-2], node_shape(mask)[:-2]
        dims = [node_shape(each)[:-2] for term in self.terms for each in term.vectors]
        if any(each != before and prod(each) != 1 for each in dims):
            return None

        def new(vector: fx.Node) -> fx.Node:
            *alone, rows, columns = node_shape(vector)
            lead = () if prod(alone) == 1 else after
            return insert_reshape(vector, (*lead, rows, columns), mask)

        terms = [replace(term, vectors=tuple(map(new, term.vectors))) for term in self.terms]
        return _Parts(self.band, tuple(terms))


def _parts(mask: Any, proofs: BandProofs) -> _Parts | None:
    """Of a boolean mask of pairs; None if it says more."""
    band = proofs.band(mask)
    if band is not None:
        return _Parts(band)
    if mask.meta["val"].dtype != torch.bool or len(node_shape(mask)) < 2:
        return None
    if 1 in node_shape(mask)[-2:]:
        return _Parts(terms=(_Term("all", (mask,)),))
    if mask.target in AND:
        return _both(mask, proofs)
    if mask.target in SAME and node_shape(mask.args[0])[-2:] == node_shape(mask)[-2:]:
        found = _parts(mask.args[0], proofs)
        if found is None or mask.target is not aten.reshape.default:
            return found
        return found.reshaped(mask.args[0], mask)
    if mask.target in _NAMES and all(_is_vector(each) for each in mask.args):
        return _Parts(terms=(_Term(_NAMES[mask.target], mask.args),))
    return None


def _both(mask: fx.Node, proofs: BandProofs) -> _Parts | None:
    found = _Parts()
    for each in mask.args:
        parts = _parts(each, proofs)
        if parts is None:
            return None
        if parts.band != ALL and node_shape(each)[-2:] != node_shape(mask)[-2:]:  # type: ignore[arg-type]
            return None
        found &= parts
    return found


def _is_vector(node: Any) -> bool:
    return is_tensor(node) and len(node_shape(node)) > 1 and 1 in node_shape(node)[-2:]


_NAMES = {getattr(aten, name).Tensor: name for name in ("eq", "ne", "ge", "gt", "le", "lt")}


def _fold_blockwise(
    node: fx.Node, inputs: tuple[fx.Node, ...], parts: _Parts | None, scale: float | None
) -> None:
    query, key, value = inputs[0], *map(_before_repetition, inputs[1:])
    shapes = [node_shape(each) for each in (query, key, value)]
    if parts is None or {len(shape) for shape in shapes} != {4} or shapes[1][:3] != shapes[2][:3]:
        return
    batch, _, positions, _ = shapes[0]
    if parts.band.after not in (0, inf) or (batch, positions) != (shapes[1][0], shapes[1][2]):
        return
    causal = parts.band.after == 0
    window = None if parts.band.before == inf else int(parts.band.before) + 1
    if causal and window and not parts.terms:
        node.target, node.args = windowed_attention, (query, key, value, window, scale)
    elif positions**2 > LARGE and (causal or any(each.name != "all" for each in parts.terms)):
        vectors = list(dict.fromkeys(each for term in parts.terms for each in term.vectors))
        numbers = [[str(vectors.index(each)) for each in term.vectors] for term in parts.terms]
        said = [" ".join((t.name, *read)) for t, read in zip(parts.terms, numbers, strict=True)]
        node.target = masked_attention
        options = (tuple(vectors), ", ".join(said), causal, window, scale)
        node.args = (query, key, value, *options)
    else:
        return
    # Its result is like what it was: nothing is computed to know that.
    node.kwargs = {}


def _before_repetition(heads: fx.Node) -> fx.Node:
    """The keys of which each head was repeated for a group of queries; else these themselves."""
    repeated: Any = heads
    chain = []
    for target in (aten.reshape.default, aten.expand.default, aten.reshape.default):
        if not is_tensor(repeated) or repeated.target is not target:
            return heads
        chain.append(node_shape(repeated))
        repeated = repeated.args[0]
    batch, count, *rest = shape = node_shape(repeated)
    groups = chain[0][1] // count
    expected = [(batch, count * groups, *rest), (batch, count, groups, *rest)]
    apart = (batch, count, 1, *rest)
    return repeated if len(shape) == 4 and chain == [*expected, apart] else heads
