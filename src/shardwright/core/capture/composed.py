"""Decomposition of operators without sharding rules into ATen operators that have rules.

Composite operators of ATen consist of other operators by definition. Some others are decomposed by
functions of this module.

`torch._foreach_*` becomes one operator per tensor of the list, so that each tensor can have another
layout. The mean of `scatter_reduce` becomes a sum divided by a count: partial sums can be
all-reduced, partial means cannot. Without `include_self` a count shows which elements keep their
value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardwright.core.capture.canonicalize import has_rewrite
from shardwright.core.capture.fx_nodes import ORIGIN, is_tensor, node_arguments, tensor
from shardwright.core.rules import has_rule
from shardwright.core.rules.scattered import neutral_element
from shardwright.core.torch_internals.operators import (
    OpOverload,
    call_composite,
    is_composite,
    operator_name,
    schema_of,
)

aten = torch.ops.aten


def decompose(graph: fx.Graph) -> None:
    """Decompose operators of the graph in place, before functionalization."""
    for node in list(graph.nodes):
        function = _find_decomposition(node)
        if function is not None:
            results = _insert_decomposition(node, function)
            users = list(node.users)
            if is_tensor(node):
                node.replace_all_uses_with(results)
            # An operator with several results is read by `getitem` alone.
            for getitem in users if not is_tensor(node) else ():
                _replace_getitem(getitem, results)
            graph.erase_node(node)


def _replace_getitem(getitem: fx.Node, results: Any) -> None:
    """Replace a `getitem` node by one of `results`: a node, or a list that further nodes read."""
    assert getitem.target is operator.getitem
    result = results[getitem.args[1]]
    if isinstance(result, fx.Node):
        getitem.replace_all_uses_with(result)
    else:
        for user in list(getitem.users):
            _replace_getitem(user, result)
    getitem.graph.erase_node(getitem)


def _find_decomposition(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function that decomposes an operator; None for an operator that is not
    decomposed."""
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    name = operator_name(target)
    function = _FUNCTIONS.get(name.removesuffix("_"))
    if function is not None:
        if target is aten.scatter_reduce.two and _is_one_operator(**_reduction(node)):
            return None
        return partial(_write_result, function) if name.endswith("_") else function
    # Rewrites and rules exist for composite operators that need not be decomposed.
    composed = is_composite(target) and not (has_rule(target) or has_rewrite(target))
    return partial(call_composite, target) if composed or name.startswith("_foreach_") else None


def _write_result(function: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return x.copy_(function(x, *args, **kwargs))


def _reduction(node: fx.Node) -> dict[str, Any]:
    arguments = node_arguments(node)
    names = "reduce", "include_self"
    return {"dtype": tensor(arguments["self"]).dtype, **{name: arguments[name] for name in names}}


def _is_one_operator(dtype: torch.dtype, reduce: str, include_self: bool) -> bool:
    """Whether a `scatter_reduce` has a rule by which its rows can be sharded, or none at all."""
    # Means of integers are rounded down, and truth values have no sum.
    if dtype == torch.bool or (reduce == "mean" and not dtype.is_floating_point):
        return True
    return include_self and reduce != "mean"


def _scatter_reduce(
    base: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    if _is_one_operator(base.dtype, reduce, include_self):
        return base.scatter_reduce(dim, index, src, reduce, include_self=include_self)
    increments = torch.ones_like(index, dtype=base.dtype)
    # With `include_self`, the element of `base` itself is one of those averaged.
    count = (torch.ones_like if include_self else torch.zeros_like)(base)
    count = count.scatter_add(dim, index, increments)
    name = "sum" if reduce == "mean" else reduce
    start = base if include_self else torch.full_like(base, neutral_element(reduce, base.dtype))
    total = start.scatter_reduce(dim, index, src, name)
    if include_self:
        return total / count
    # Elements to which nothing is scattered keep their value.
    result = total / count.clamp(min=1) if reduce == "mean" else total
    return torch.where(count.eq(0), base, result)


def _index_reduce(
    base: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    sizes = [1] * source.ndim
    if source.ndim:
        sizes[dim] = -1
    rows = index.view(sizes).expand_as(source)
    return _scatter_reduce(base, dim, rows, source, reduce, include_self=include_self)


def _aminmax(
    x: torch.Tensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, ...]:
    dims = tuple(range(x.ndim)) if dim is None else (dim,)
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


def _dist(x: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    result: torch.Tensor = torch.linalg.vector_norm(x - other, p)
    return result


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scatter_reduce": _scatter_reduce,
    "index_reduce": _index_reduce,
    "aminmax": _aminmax,
    "dist": _dist,
}


def _insert_decomposition(node: fx.Node, function: Callable[..., Any]) -> Any:
    """Insert the operators that `function` calls before a node, and return the result nodes."""
    inputs = node.all_input_nodes

    def run(*tensors: torch.Tensor) -> Any:
        values = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        return function(*args, **kwargs)

    # Some operators decompose differently if no input requires a gradient. Autograd forbids writing
    # into leaves that do require one.
    fakes = [tensor(each).detach() for each in inputs]
    mutable = schema_of(node.target).is_mutable  # type: ignore[arg-type]
    for fake in fakes if not mutable else ():
        fake.requires_grad_(fake.is_floating_point() or fake.is_complex())
    mode: Any = fakes[0].fake_mode  # type: ignore[attr-defined]
    with mode, torch.enable_grad():
        region = make_fx(run)(*fakes).graph
    region.eliminate_dead_code()
    region_inputs = [each for each in region.nodes if each.op == "placeholder"]
    copies = dict(zip(region_inputs, inputs, strict=True))
    for each in region.nodes:
        if each.op == "output":
            return fx.map_arg(each.args[0], copies.__getitem__)
        if each.op == "call_function":
            with node.graph.inserting_before(node):
                copies[each] = node.graph.node_copy(each, copies.__getitem__)
            copies[each].meta.update({key: node.meta[key] for key in ORIGIN if key in node.meta})
    raise AssertionError(
        f"the graph that decomposes {node.target} has no output node\nreport this as a bug"
    )
