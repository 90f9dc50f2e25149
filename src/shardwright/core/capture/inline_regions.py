"""Inlining of the sub-graphs that `torch.export` creates for no-grad and autocast regions."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.autocast import CPU
from shardwright.core.capture.fx_nodes import evaluate, insert, is_tensor, tensor
from shardwright.core.capture.naming import line_of
from shardwright.core.capture.signature import is_floating_point
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import HigherOrderOperator, OpOverload, schema_of
from shardwright.errors import CaptureError

aten = torch.ops.aten
CONTROL_FLOW_REMEDY = (
    "compute both branches and select by `torch.where`, loop in Python a known number of times, and"
    " call `torch.vmap` in place of `map`"
)

_SET_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def inline_regions(module: fx.GraphModule) -> None:
    """Inline the no-grad and autocast regions of a graph, in place and outermost first.

    Nodes of a no-grad region get the metadata `no_grad`, and its results are detached with
    `aten.detach`. Casts of an autocast region are inserted as operators.

    Raises:
        CaptureError: if the graph calls control flow or another operator with a sub-graph.
    """
    _inline_subgraphs(module.graph, module)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)


def _inline_subgraphs(graph: fx.Graph, owner: fx.GraphModule) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            continue
        name = str(node.target)
        if name == _SET_GRAD:
            enabled, region, *args = node.args
            _splice_region(node, _find_subgraph(owner, region), args, not enabled, None)
        elif name == _AUTOCAST:
            device, dtype, enabled, _, region, *args = node.args
            # Autocast of another device has no effect on the CPU.
            acts = enabled and device == CPU
            _splice_region(node, _find_subgraph(owner, region), args, None, dtype if acts else None)
        else:
            raise CaptureError(
                f"{line_of(node)}: cannot capture `{name}`, an operator that calls functions, such "
                "as `torch.cond`\n"
                f"{CONTROL_FLOW_REMEDY}"
            )


def _find_subgraph(owner: fx.GraphModule, node: Any) -> fx.GraphModule:
    region = owner.get_submodule(str(node.target))
    assert isinstance(region, fx.GraphModule)
    return region


def _splice_region(
    call: fx.Node,
    region: fx.GraphModule,
    args: list[Any],
    no_grad: bool | None,
    autocast: torch.dtype | None,
) -> None:
    """Replace the node that calls a region with a copy of the nodes of the region."""
    if no_grad is not None:
        for node in region.graph.nodes:
            node.meta["no_grad"] = no_grad
    # An autocast region inside of a no-grad region; `enable_grad` inside of it has set False.
    elif call.meta.get("no_grad"):
        for node in region.graph.nodes:
            node.meta.setdefault("no_grad", True)
    # After the metadata is set, as nested regions inherit `no_grad` from the node that calls them.
    _inline_subgraphs(region.graph, region)
    copies: dict[fx.Node, Any] = dict(
        zip((n for n in region.graph.nodes if n.op == "placeholder"), args, strict=True)
    )
    results: Any = ()
    with call.graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op == "output":
                results = fx.map_arg(node.args[0], lambda n: copies[n])
            elif node.op == "call_function":
                copy = call.graph.node_copy(node, lambda n: copies[n])
                copies[node] = copy
                if autocast is not None:
                    _cast_arguments(copy, autocast)
    if no_grad:
        results = fx.map_arg(results, lambda n: _detach_region_output(n, call, args))
    for getitem in list(call.users):
        assert getitem.target is operator.getitem
        getitem.replace_all_uses_with(results[getitem.args[1]])
        call.graph.erase_node(getitem)
    call.graph.erase_node(call)


def _detach_region_output(node: fx.Node, call: fx.Node, args: list[Any]) -> fx.Node:
    if not is_tensor(node) or not is_floating_point(node):
        return node
    changed = node
    while _is_in_place(changed):
        changed = changed.args[0]  # type: ignore[assignment]
    if changed in args:
        # An argument that the region returns, or changes in place, keeps its autograd history.
        return node
    return insert(call, aten.detach.default, (node,), like=node)


def _is_in_place(node: fx.Node) -> bool:
    """Whether an operator changes its first argument in place."""
    if not isinstance(node.target, OpOverload) or not node.args:
        return False
    first = schema_of(node.target).arguments[0].alias_info
    return first is not None and first.is_write and is_tensor(node.args[0])


def _cast_arguments(node: fx.Node, dtype: torch.dtype) -> None:
    """Insert the casts of autocast, inferred from the result dtypes that the trace recorded."""
    recorded = _list_dtypes(node.meta.get("val"))
    arguments = [arg for arg in node.all_input_nodes if is_tensor(arg)]
    # Without input or tensor result there is nothing to cast.
    if not recorded or not arguments or node.target is operator.getitem:
        return
    has_both = {dtype, torch.float32} <= {tensor(arg).dtype for arg in arguments}
    name = str(node.target).split(".")[1] if isinstance(node.target, OpOverload) else ""
    # Fake tensors let products mix dtypes, which kernels do not: that no cast gives the recorded
    # dtypes proves nothing for them. Normalizations do mix dtypes, for their statistics.
    mixed = torch.float32 in {tensor(arg).dtype for arg in arguments} and dtype in recorded
    may_need_no_cast = not mixed or _is_in_place(node) or "norm" in name
    # The first cast that gives the recorded dtypes: none, to the lower precision, to float32.
    for cast_to in (None, dtype, torch.float32) if may_need_no_cast else (dtype,):

        def cast(arg: fx.Node, to: torch.dtype | None = cast_to) -> fx.Node:
            if to is None or not is_tensor(arg) or not tensor(arg).is_floating_point():
                return arg
            return insert(node, aten.to.dtype, (arg, to)) if tensor(arg).dtype != to else arg

        if cast_to is None:
            if _infer_result_dtypes(node.target, node.args, node.kwargs) == recorded:
                if has_both and name in _CELLS_WITH_INNER_CASTS:
                    break
                return
            continue
        args = fx.map_arg(node.args, cast)
        if _infer_result_dtypes(node.target, args, node.kwargs) == recorded:
            node.args = args
            return
    raise CaptureError(
        f"{line_of(node)}: cannot capture `{node.target}` under autocast\n"
        "call it on tensors of one dtype, in `torch.autocast(…, enabled=False)`"
    )


_CELLS_WITH_INNER_CASTS = ("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell")
"""Operators that cast between their own steps, so that autocast does not cast their arguments."""


def _infer_result_dtypes(target: Any, args: Any, kwargs: Any) -> list[torch.dtype]:
    try:
        return _list_dtypes(evaluate(target, args, kwargs))
    # The operator does not take these dtypes together.
    except RuntimeError:
        return []


def _list_dtypes(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
