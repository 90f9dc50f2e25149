"""What users attach to modules and to calls of functions; it travels into the graph, unread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import fx, nn
from torch.fx import traceback

from shardwright.graph.source import source_of

_KEY = "shardwright"
"""Name of the module's attribute, and of the entry in what tracing notes of an operator."""


def attach(module: nn.Module, tag: Any) -> None:
    """Attaches `tag` to a module, in place of an earlier one; copies of the module keep it."""
    setattr(module, _KEY, tag)


def attached(module: nn.Module) -> dict[str, Any]:
    """The tags of a module and the modules in it, by path; a module with two paths stands twice."""
    return {
        path: vars(inner)[_KEY]
        for path, inner in module.named_modules(remove_duplicate=False)
        if _KEY in vars(inner)
    }


@contextmanager
def tagging(tag: Any) -> Iterator[None]:
    """While a model is captured, operators that are called in this context bear `tag`."""
    with traceback.annotate({_KEY: tag}):
        yield


def keeping_tags() -> AbstractContextManager[None]:
    """Tracing in this context keeps the tags of operators."""
    return traceback.preserve_node_meta()


def tag_of(node: fx.Node) -> Any:
    """The tag that a traced operator bears, or None."""
    return (node.meta.get("custom") or {}).get(_KEY)


def tagged_calls(graph: fx.Graph) -> tuple[tuple[Any, str], ...]:
    """Every tag in the graph once, with the user's line of its first operator."""
    found: dict[int, tuple[Any, str]] = {}
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is not None:
            found.setdefault(id(tag), (tag, source_of(node)))
    return tuple(found.values())
