"""Mixtures of experts that are written as a loop over the experts.

    for i, expert in enumerate(self.experts):
        rows, nth = torch.where(ids == i)
        out.index_add_(0, rows, weights[rows, nth, None] * expert(x[rows]))

After `pad_selected_rows` every expert computes all rows. If each mask selects the rows of one
expert, and the experts run the same operators with different parameters, one computation replaces
the loop: each row reads the parameters of its expert. Products become `routed_product`s with
stacked parameters, and `routed_products.py` merges these into one operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.constant_rows import find_first_integers
from shardwright.core.capture.equal_nodes import EqualNodes
from shardwright.core.capture.expert_template import LINEAR_LAYERS, ExpertTemplate
from shardwright.core.capture.fx_nodes import is_tensor, remove_dead
from shardwright.core.capture.naming import line_of
from shardwright.core.capture.padded_reads import restore_rows, select_rows
from shardwright.core.capture.routed_products import fold_routed_products
from shardwright.core.capture.row_layouts import NoTemplateError, find_experts_of_masks
from shardwright.errors import CaptureError

aten = torch.ops.aten

_ADDS = (aten.index_add.default, aten.index_put.default)


@dataclass
class ExpertRegion:
    """The operators of one expert in a loop over experts.

    Args:
        mask: mask of the expert's rows.
        nodes: operators on these rows, in the order of the graph.
        ends: operators that write the rows into a tensor, or add them to a tensor.
        is_separate: whether no operator combines these rows with rows of another mask.
    """

    mask: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    ends: list[fx.Node] = field(default_factory=list)
    is_separate: bool = True


def fold_expert_loops(graph: fx.Graph, hint: str) -> None:
    """Replace each loop over experts by one operator, in place.

    Args:
        graph: a canonical graph with marks of selected rows.
        hint: advice for loops that cannot be replaced; empty for models without experts.

    Raises:
        CaptureError: for a loop of a model with experts that cannot be replaced, as every expert
            would compute all tokens.
    """
    if not any(node.target is select_rows for node in graph.nodes):
        return
    equal = EqualNodes(graph)
    separate: list[ExpertRegion] = []
    for regions in find_loops(graph, equal):
        if len(regions) == 1:
            separate += regions
            continue
        line = line_of(regions[0].nodes[0])
        try:
            _fold_loop(graph, regions, equal)
        except NoTemplateError as error:
            remove_dead(graph)
            if hint and len(_list_linear_layers(regions)) > 1:
                raise _make_loop_error(line, error, hint) from None
    costly = _list_linear_layers(separate)
    if hint and len(costly) > 1:
        other = "this loop selects rows by masks other than `ids == expert`"
        raise _make_loop_error(line_of(costly[0]), other, hint)


def _make_loop_error(line: str, reason: object, hint: str) -> CaptureError:
    return CaptureError(
        f"{line}: {reason}, so every expert would compute all tokens\nlet"
        f" all experts run the same operators on the rows of their tokens only.{hint}"
    )


def _list_linear_layers(regions: Sequence[ExpertRegion]) -> list[fx.Node]:
    """Return the first linear layer of each region that has one."""
    layers = ([n for n in region.nodes if n.target in LINEAR_LAYERS] for region in regions)
    return [nodes[0] for nodes in layers if nodes]


def find_loops(graph: fx.Graph, equal: EqualNodes) -> list[list[ExpertRegion]]:
    """Return the regions of each loop over experts; masks of one loop compare the same integers."""
    regions: dict[fx.Node, ExpertRegion] = {}
    owners: dict[fx.Node, ExpertRegion] = {}
    for node in graph.nodes:
        inputs = {id(owners[each]): owners[each] for each in node.all_input_nodes if each in owners}
        if node.target is select_rows and not inputs:
            mask = find_mask_source(equal, node.args[1])
            inputs = {0: regions.setdefault(mask, ExpertRegion(mask))}
        if len(inputs) == 1:
            (region,) = inputs.values()
            if _writes_region_rows(node, region, owners, equal):
                region.ends.append(node)
            else:
                region.nodes.append(node)
                owners[node] = region
        for region in inputs.values() if len(inputs) > 1 else ():
            region.is_separate = False
    loops: dict[fx.Node, list[ExpertRegion]] = {}
    for mask, region in regions.items():
        loops.setdefault(equal.first(find_first_integers(mask)), []).append(region)
    return list(loops.values())


def find_mask_source(equal: EqualNodes, node: Any) -> fx.Node:
    """Return the tensor of which `node` is a chain of reshapes."""
    while node.target in (aten.reshape.default, restore_rows):
        node = node.args[0]
    return equal.first(node)


def _writes_region_rows(
    node: fx.Node, region: ExpertRegion, owners: dict[fx.Node, ExpertRegion], equal: EqualNodes
) -> bool:
    """Whether an operator writes or adds a region's rows to a tensor outside of the region."""
    if node.target is aten.where.self:
        condition, rows, base = node.args
        is_mask = is_tensor(condition) and find_mask_source(equal, condition) is region.mask
        return is_mask and rows in owners and base not in owners
    return node.target in _ADDS and node.args[0] not in owners


def _fold_loop(graph: fx.Graph, regions: list[ExpertRegion], equal: EqualNodes) -> None:
    root, layout, order = find_experts_of_masks([region.mask for region in regions])
    regions = [regions[each] for each in order]
    _check_equal_regions(regions)
    ends = [region.ends[0] for region in regions]
    position = {node: index for index, node in enumerate(graph.nodes)}
    chain = sorted(ends, key=position.__getitem__)
    last = chain[-1]
    template = ExpertTemplate([region.nodes for region in regions], root, layout, last, equal)
    new = _insert_loop_result(template, ends, chain, equal)
    if not template.products or not fold_routed_products({last: new}, template.products):
        raise NoTemplateError(
            "this loop has experts other than linear layers and elementwise operators between them"
        )
    remove_dead(graph)


def _check_equal_regions(regions: list[ExpertRegion]) -> None:
    if not all(region.is_separate for region in regions):
        raise NoTemplateError("this loop combines the rows of several experts")
    if any(len(region.ends) != 1 for region in regions):
        raise NoTemplateError(
            "this loop does not add or write the rows of each expert to one result"
        )
    targets = [[node.target for node in region.nodes] for region in regions]
    if any(each != targets[0] for each in targets):
        raise NoTemplateError("this loop runs different operators for different experts")


def _insert_loop_result(
    template: ExpertTemplate, ends: list[fx.Node], chain: list[fx.Node], equal: EqualNodes
) -> fx.Node:
    """Insert the result of a loop: the initial tensor with the rows of all experts added or
    written."""
    end, base = ends[0], get_base(chain[0])
    if any(each.target is not end.target for each in ends):
        raise NoTemplateError("this loop runs different operators for different experts")
    for earlier, later in pairwise(chain):
        if find_mask_source(equal, get_base(later)) is not equal.first(earlier):
            raise NoTemplateError(
                "this loop does not add or write the rows of each expert to one result"
            )
    if end.target is not aten.where.self:
        return template.add_rows(end, base)
    starts = {chain[0]: find_mask_source(equal, base)}
    starts |= {later: equal.first(earlier) for earlier, later in pairwise(chain)}
    value: Any = end.args[1]
    while value.target in (aten.reshape.default, restore_rows):
        value = value.args[0]
    added = _find_added_rows(template, value, [starts[each] for each in ends], equal)
    if added is not None:
        return template.add_at_mask(end, base, added)
    return template.write_at_mask(end, base, value)


def get_base(end: fx.Node) -> fx.Node:
    """Return the tensor into which a `where` or an indexed write puts rows."""
    base = end.args[2 if end.target is aten.where.self else 0]
    assert isinstance(base, fx.Node)
    return base


def _find_added_rows(
    template: ExpertTemplate, value: fx.Node, starts: list[fx.Node], equal: EqualNodes
) -> fx.Node | None:
    """Return the `rows` of `out[mask] += rows`; None if `value` is not a sum with the old rows.

    Args:
        template: computation of the rows of all experts.
        value: rows that the first expert writes.
        starts: for each expert, `out` before its write.
        equal: nodes that compute equal values.
    """
    if value.target is not aten.add.Tensor or value.kwargs:
        return None
    for read, added in (value.args, value.args[::-1]):
        if not isinstance(read, fx.Node) or read.target is not select_rows:
            continue
        sources = [find_mask_source(equal, each.args[0]) for each in template.counterparts(read)]
        if sources == starts and isinstance(added, fx.Node):
            return added
    return None
