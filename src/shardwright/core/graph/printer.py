"""Format a captured graph as reproducible text, without timings, addresses and source lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardwright.core.graph.graph import Graph, Op, Value, target_name


def graph_text(graph: Graph) -> str:
    """Format the inputs, parameters, buffers, operators and results of a graph."""
    lines = [
        *_section_lines("inputs", map(_leaf_text, graph.inputs)),
        *_section_lines("parameters", map(typed, graph.parameters)),
        *_section_lines("buffers", map(typed, graph.buffers)),
        *_section_lines("constants", map(typed, graph.constants)),
        *_section_lines("other names", (f"{alias} = {name}" for alias, name in graph.tied.items())),
        *_section_lines("operators", map(_operator_text, graph.ops)),
        *_section_lines("returns", (_result_text(graph, leaf) for leaf in graph.outputs)),
        *_section_lines(
            "new values of buffers", (f"{b.name} = {v.name}" for b, v in graph.updates)
        ),
    ]
    return "\n".join(lines) + "\n"


def typed(value: Value) -> str:
    """Format the name, dtype and shape of a value, as in `layer.weight float32 [8, 16]`; frozen
    parameters get the suffix `without gradient`."""
    frozen = (
        " without gradient" if value.origin.value == "parameter" and not value.requires_grad else ""
    )
    return f"{value.name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}{frozen}"


def _section_lines(title: str, lines: Iterable[str]) -> Iterator[str]:
    inner = [f"  {line}" for line in lines]
    if inner:
        yield title
        yield from inner


def _leaf_text(leaf: Any) -> str:
    return typed(leaf) if isinstance(leaf, Value) else repr(leaf)


def _operator_text(op: Op) -> str:
    arguments = [_argument_text(a) for a in op.args]
    arguments += [f"{key}={_argument_text(a)}" for key, a in op.kwargs.items()]
    target = target_name(op.target).removesuffix(".default")
    outputs = ", ".join(
        f"{str(v.dtype).removeprefix('torch.')} {list(v.shape)}" for v in op.outputs
    )
    return f"{op.name}: {target}({', '.join(arguments)}) -> {outputs}"


def _argument_text(argument: Any) -> str:
    if isinstance(argument, Value):
        return argument.name
    if isinstance(argument, list | tuple):
        inner = ", ".join(_argument_text(a) for a in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
    return repr(argument)


def _result_text(graph: Graph, leaf: Any) -> str:
    if not isinstance(leaf, Value):
        return repr(leaf)
    return f"{leaf.name} (loss)" if leaf is graph.loss else leaf.name
