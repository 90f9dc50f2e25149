"""From a module and the arguments of one call to a `Graph` in canonical form."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from shardwright.capture.annotations import call_tags, keeping_tags, module_tags
from shardwright.capture.build_graph import Call, build_graph
from shardwright.capture.canonicalize import canonicalize
from shardwright.capture.fake_copy import LossesInSinglePrecision, fake_copy, isolated
from shardwright.capture.functionalize import functionalize
from shardwright.capture.inline_regions import inline
from shardwright.capture.naming import line_of, line_of_error
from shardwright.capture.signature import (
    Signature,
    add_updates,
    drop_needless_detach,
    gradient_sources,
    join_tied,
)
from shardwright.capture.unflatten import move_flattening_down
from shardwright.errors import CaptureError
from shardwright.graph.graph import Graph
from shardwright.torch_internals import pytree


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Graph:
    """Captures what `module(*args, **kwargs)` computes, for the shapes of these arguments.

    The module is neither run nor changed, and no memory is used for its weights: parameters and
    arguments may be real tensors or on the meta device. `module.training` is respected.

    Args:
        compute_dtype: in which parameters and inputs in single precision are read. Buffers, and the
            parameters of modules that own floating buffers, stay as they are; losses are computed
            in single precision.

    Raises:
        CaptureError: where the forward pass depends on the values of tensors, or uses what
            `torch.export` cannot capture; it names the user's line.
    """
    started = time.perf_counter()
    with isolated():
        graph = _capture(module, args, dict(kwargs or {}), compute_dtype)
    return replace(graph, capture_seconds=time.perf_counter() - started)


def _capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compute_dtype: torch.dtype | None,
) -> Graph:
    exported = _export(module, args, kwargs, compute_dtype)
    signature = Signature.of(exported)
    inline(exported.graph_module)
    calls = call_tags(exported.graph)
    check_static(exported.graph)
    tied = join_tied(module, exported.graph, signature)
    graph, changed = functionalize(exported.graph)
    add_updates(graph, changed)
    canonicalize(graph)
    sources = gradient_sources(module, pytree.tree_leaves((args, kwargs)), signature, graph)
    drop_needless_detach(graph, sources)
    remove_dead(graph)
    move_flattening_down(graph)
    remove_dead(graph)
    call = Call(module, args, kwargs)
    made = build_graph(call, graph, signature, sources)
    read = {value.name for value in (*made.parameters, *made.buffers)}
    tied = {name: first for name, first in tied.items() if first in read}
    return replace(
        made,
        tied=tied,
        module_tags=module_tags(module),
        call_tags=calls,
        compute_dtype=compute_dtype,
    )


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compute_dtype: torch.dtype | None,
) -> torch.export.ExportedProgram:
    twin, fake_args, fake_kwargs = fake_copy(module, args, kwargs, compute_dtype)
    losses = LossesInSinglePrecision() if compute_dtype is not None else nullcontext()
    try:
        with keeping_tags(), losses:
            return torch.export.export(twin, fake_args, fake_kwargs, strict=False)
    except CaptureError as error:
        raise CaptureError(f"{line_of_error(error)}: {error}") from error
    except Exception as error:
        raise CaptureError(_explain(error)) from error


def _explain(error: Exception) -> str:
    """One message for what `torch.export` could not do."""
    where = line_of_error(error)
    text = str(error).strip()
    if "data-dependent" in text or "DataDependent" in type(error).__name__:
        return (
            f"{where}: this needs the value of a tensor, which is not known while a model is "
            f"captured. Use `torch.where` on tensors instead, or make it a Python constant."
        )
    first = text.splitlines()[0] if text else ""
    return f"{where}: cannot be captured: {type(error).__name__}: {first}"


def check_static(graph: fx.Graph) -> None:
    """Refuses numbers and shapes that depend on the values of tensors."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, symbols):
                raise CaptureError(
                    f"{line_of(node)}: this makes a Python number of a tensor's value, which is "
                    f"not known while a model is captured. Keep it a tensor (leave out "
                    f"`.item()`), or make it a Python constant."
                )
            if isinstance(value, torch.Tensor) and any(
                isinstance(size, torch.SymInt) for size in value.shape
            ):
                raise CaptureError(
                    f"{line_of(node)}: the shape of the result depends on the values of a tensor, "
                    f"which are not known while a model is captured. Use `torch.where` or a "
                    f"multiplication by the mask, which keep the shape."
                )


def remove_dead(graph: fx.Graph) -> None:
    """Removes the operators that reach neither an output nor an update."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
