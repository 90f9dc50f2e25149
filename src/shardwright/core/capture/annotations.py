"""Annotations ("tags") of modules and function calls, which capture carries into the graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx import traceback

from shardwright.core.capture.naming import source_of

_KEY = "shardwright"
"""Name of the attribute of modules, and prefix of the keys in a node's custom metadata."""


@dataclass(frozen=True, eq=False)
class RecomputeMark:
    """A request to recompute one module or function.

    Args:
        communication: whether collectives between layouts are run again too.
        kinds: names of the operators to recompute (`softmax`); None for all.
        checkpoint: whether it stands for a call of `torch.utils.checkpoint` in the model.
    """

    communication: bool = True
    kinds: tuple[str, ...] | None = None
    checkpoint: bool = False


@dataclass(frozen=True)
class ModulePlace:
    """Where a module is in a model.

    Args:
        root: the model that is captured.
        path: of the module in it.
        kind: the name of its class.
    """

    root: nn.Module
    path: str
    kind: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'} ({self.kind})"


class ModuleTag:
    """A tag of a module that changes how the module is traced."""

    def trace(self, module: nn.Module, place: ModulePlace) -> None:
        """Changes a copy of the tagged module, which is about to be traced."""


class BoundaryTag:
    """A tag of a call of `aten.alias`, which keeps it: its tensor enters or leaves a module, and
    the user says how it lies there."""


@dataclass(frozen=True, eq=False)
class PinnedCall:
    """A call whose operator is pinned, or its arguments and results if it has several operators.

    Args:
        mark: the tag of its operators.
        problems: errors of the pin that count if there are several operators.
        is_pin: whether the tag is the pin itself, which a single operator keeps.
    """

    mark: Any
    problems: list[str]
    is_pin: bool


@dataclass(frozen=True, eq=False)
class CandidateBoundary(BoundaryTag):
    """A tag of an alias of an argument or result of such a call.

    Args:
        tag: what the alias is tagged with if it stays.
    """

    call: PinnedCall
    tag: BoundaryTag


def attach(module: nn.Module, tag: Any) -> None:
    """Attaches `tag` to a module and its future copies, replacing a tag of the same type."""
    setattr(module, _KEY, {**vars(module).get(_KEY, {}), type(tag).__name__: tag})


def module_tags(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The tags of a module and its submodules, by path; a module with two paths is listed twice."""
    return {
        path: tuple(vars(inner)[_KEY].values())
        for path, inner in module.named_modules(remove_duplicate=False)
        if _KEY in vars(inner)
    }


def trace_tags(twin: nn.Module, root: nn.Module) -> None:
    """Prepares `twin`, a copy of the model `root`, for the trace as the tags of its modules ask."""
    for path, module in twin.named_modules():
        for tag in vars(module).get(_KEY, {}).values():
            if isinstance(tag, ModuleTag):
                tag.trace(module, ModulePlace(root, path, type(module).__name__))


@contextmanager
def tagging(tag: Any) -> Iterator[None]:
    """Operators that are called in this context during capture get `tag`, which replaces a tag of
    the same type from an outer context."""
    with traceback.annotate({f"{_KEY}.{type(tag).__name__}": tag}):
        yield


def tagging_checkpoint() -> AbstractContextManager[None]:
    """A context that tags the operators of one call of `torch.utils.checkpoint`."""
    return tagging(RecomputeMark(checkpoint=True))


def checkpoint_annotation() -> dict[str, Any]:
    """The metadata of the operators of one call of `torch.utils.checkpoint`."""
    return {f"{_KEY}.{RecomputeMark.__name__}": RecomputeMark(checkpoint=True)}


def preserve_tags() -> AbstractContextManager[None]:
    """A context in which tracing preserves the tags of operators."""
    return traceback.preserve_node_meta()


def tags_of(node: fx.Node) -> tuple[Any, ...]:
    """The tags of a traced operator."""
    annotations = node.meta.get("custom") or {}
    return tuple(tag for key, tag in annotations.items() if key.startswith(f"{_KEY}."))


def retag(node: fx.Node, old: Any, new: Any = None) -> None:
    """Replaces the tag `old` of a traced operator, or removes it."""
    custom = {key: tag for key, tag in node.meta.get("custom", {}).items() if tag is not old}
    if new is not None:
        custom[f"{_KEY}.{type(new).__name__}"] = new
    node.meta["custom"] = custom


def call_tags(graph: fx.Graph) -> tuple[tuple[Any, str], ...]:
    """Every tag in the graph once, with the source line of its first operator."""
    calls: dict[int, tuple[Any, str]] = {}
    for node in graph.nodes:
        for tag in tags_of(node):
            calls.setdefault(id(tag), (tag, source_of(node)))
    return tuple(calls.values())
