"""Format a captured graph as reproducible text, without timings, addresses and source lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardwright.core.graph.graph import Graph, Op, Value, target_name


def graph_text(graph: Graph) -> str:
    """Format the inputs, parameters, buffers, operators and results of a graph."""
    lines = [
        *_format_section("inputs", map(_format_leaf, graph.inputs)),
        *_format_section("parameters", map(typed, graph.parameters)),
        *_format_section("buffers", map(typed, graph.buffers)),
        *_format_section("constants", map(typed, graph.constants)),
        *_format_section(
            "other names", (f"{alias} = {name}" for alias, name in graph.tied.items())
        ),
        *_format_section("operators", map(_format_operator, graph.ops)),
        *_format_section("returns", (_format_result(graph, leaf) for leaf in graph.outputs)),
        *_format_section(
            "new values of buffers", (f"{b.name} = {v.name}" for b, v in graph.updates)
        ),
    ]
    return "\n".join(lines) + "\n"


def typed(value: Value) -> str:
    """Format a value as in `layer.weight float32 [8, 16]`; frozen parameters get the suffix
    `without gradient`."""
    frozen = (
        " without gradient" if value.origin.value == "parameter" and not value.requires_grad else ""
    )
    return f"{value.name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}{frozen}"


def _format_section(title: str, lines: Iterable[str]) -> Iterator[str]:
    # A list, to omit the title of a section without lines.
    inner = [f"  {line}" for line in lines]
    if inner:
        yield title
        yield from inner


def _format_leaf(leaf: Any) -> str:
    return typed(leaf) if isinstance(leaf, Value) else repr(leaf)


def _format_operator(op: Op) -> str:
    arguments = [_format_argument(a) for a in op.args]
    arguments += [f"{key}={_format_argument(a)}" for key, a in op.kwargs.items()]
    target = target_name(op.target).removesuffix(".default")
    outputs = ", ".join(
        f"{str(v.dtype).removeprefix('torch.')} {list(v.shape)}" for v in op.outputs
    )
    return f"{op.name}: {target}({', '.join(arguments)}) -> {outputs}"


def _format_argument(argument: Any) -> str:
    if isinstance(argument, Value):
        return argument.name
    if isinstance(argument, list | tuple):
        inner = ", ".join(_format_argument(a) for a in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
    return repr(argument)


def _format_result(graph: Graph, leaf: Any) -> str:
    if not isinstance(leaf, Value):
        return repr(leaf)
    return f"{leaf.name} (loss)" if leaf is graph.loss else leaf.name
