"""What users attach to modules and to calls of functions; it travels into the graph, unread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import fx, nn
from torch.fx import traceback

from shardwright.capture.naming import source_of

_KEY = "shardwright"
"""Name of the module's attribute, and of the entries in what tracing notes of an operator."""


def attach(module: nn.Module, tag: Any) -> None:
    """Attaches `tag` to a module, in place of an earlier one of its type; copies of the module keep
    it."""
    setattr(module, _KEY, {**vars(module).get(_KEY, {}), type(tag).__name__: tag})


def module_tags(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The tags of a module and the modules in it, by path; a module with two paths stands twice."""
    return {
        path: tuple(vars(inner)[_KEY].values())
        for path, inner in module.named_modules(remove_duplicate=False)
        if _KEY in vars(inner)
    }


@contextmanager
def tagging(tag: Any) -> Iterator[None]:
    """While a model is captured, operators that are called in this context bear `tag`, in place of
    one of its type from an outer context."""
    with traceback.annotate({f"{_KEY}.{type(tag).__name__}": tag}):
        yield


def keeping_tags() -> AbstractContextManager[None]:
    """Tracing in this context keeps the tags of operators."""
    return traceback.preserve_node_meta()


def tags_of(node: fx.Node) -> tuple[Any, ...]:
    """The tags that a traced operator bears."""
    noted = node.meta.get("custom") or {}
    return tuple(tag for key, tag in noted.items() if key.startswith(f"{_KEY}."))


def call_tags(graph: fx.Graph) -> tuple[tuple[Any, str], ...]:
    """Every tag in the graph once, with the user's line of its first operator."""
    found: dict[int, tuple[Any, str]] = {}
    for node in graph.nodes:
        for tag in tags_of(node):
            found.setdefault(id(tag), (tag, source_of(node)))
    return tuple(found.values())
