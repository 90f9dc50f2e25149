"""Annotations ("tags") of modules and function calls, which captured operators inherit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx import traceback

from shardwright.core.capture.naming import source_of

_KEY = "shardwright"
"""Name of the module attribute with its tags, and prefix of tag keys in `custom` node metadata."""


@dataclass(frozen=True, eq=False)
class RecomputeRequest:
    """A request to recompute one module or function.

    Args:
        communication: whether redistribution collectives are recomputed too.
        op_types: names of the operators to recompute, such as `softmax`; None for all.
        checkpoint: whether the request comes from a call of `torch.utils.checkpoint` in the model.
    """

    communication: bool = True
    op_types: tuple[str, ...] | None = None
    checkpoint: bool = False


@dataclass(frozen=True)
class ModuleLocation:
    """Location of a module in a captured model.

    Args:
        root: the captured model.
        path: path of the module in `root`, such as `layers.0.mlp`.
        class_name: class name of the module.
    """

    root: nn.Module
    path: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'} ({self.class_name})"


class ModuleTag:
    """Base class of module tags that change how the module is traced."""

    def trace(self, module: nn.Module, location: ModuleLocation) -> None:
        """Modify a copy of the tagged module before tracing.

        Args:
            module: the copy.
            location: location of the tagged module in the captured model.
        """


class BoundaryTag:
    """Base class of tags of `aten.alias` calls on tensors that enter or leave a module.

    The tag has the layout that the user requests for the tensor; `canonicalize` does not remove a
    tagged alias.
    """


@dataclass(frozen=True, eq=False)
class PinnedCall:
    """A pinned call of a function or module. If the call has a single operator, the pin applies to
    the operator, otherwise to arguments and results.

    Args:
        tag: the tag of the operators of the call.
        problems: error messages about the pins of arguments and results; raised only if the call
            has several operators.
        is_pin: whether `tag` already pins the operators of the call.
    """

    tag: Any
    problems: list[str]
    is_pin: bool


@dataclass(frozen=True, eq=False)
class CandidateBoundary(BoundaryTag):
    """Tag of an alias of an argument or result of a pinned call.

    Args:
        call: the pinned call.
        tag: the final tag of the alias if the call has several operators.
        argument: the argument of the call that is aliased, if the pin names arguments.
        entry_rank: the number of dimensions that the entry of the pin has; None if it names axes.
    """

    call: PinnedCall
    tag: BoundaryTag
    argument: str | None = None
    entry_rank: int | None = None


@dataclass(frozen=True, eq=False)
class OperatorArguments:
    """Tag of the only operator of a pinned call.

    Args:
        names: for each tensor that the operator reads, the argument of the call that is this
            tensor, unchanged or cast; None if no argument is.
    """

    names: tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class SoleOperator(BoundaryTag):
    """Tag of the only operator of a pinned call, which rewrites must neither remove nor merge.

    Args:
        is_view: whether the operator only views its input, so that rewrites would merge it with
            other views.
    """

    is_view: bool


def attach(module: nn.Module, tag: Any) -> None:
    """Attach `tag` to a module, replacing a tag of the same type; copies of the module have the tag
    too."""
    # A new dictionary: a shallow copy of the module shares the old one.
    setattr(module, _KEY, {**vars(module).get(_KEY, {}), type(tag).__name__: tag})


def module_tags(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the tags of all submodules by path; a shared module appears at each of its paths."""
    return {
        path: tuple(vars(inner)[_KEY].values())
        for path, inner in module.named_modules(remove_duplicate=False)
        if _KEY in vars(inner)
    }


def trace_tags(twin: nn.Module, root: nn.Module) -> None:
    """Apply the `ModuleTag`s of the model `root` to `twin`, the copy of the model that will be
    traced."""
    # Each shared module once, at its first path, since `trace` wraps `forward`.
    for path, module in twin.named_modules():
        for tag in vars(module).get(_KEY, {}).values():
            if isinstance(tag, ModuleTag):
                tag.trace(module, ModuleLocation(root, path, type(module).__name__))


@contextmanager
def tagging(tag: Any) -> Iterator[None]:
    """Return a context that tags the operators which are captured in the context.

    The tag replaces a tag of the same type from an outer context.
    """
    # One key per class of tag: `annotate` restores the outer value of the key on exit.
    with traceback.annotate({f"{_KEY}.{type(tag).__name__}": tag}):
        yield


def tagging_checkpoint() -> AbstractContextManager[None]:
    """Return a context that tags the operators of one call of `torch.utils.checkpoint`."""
    return tagging(RecomputeRequest(checkpoint=True))


def checkpoint_annotation() -> dict[str, Any]:
    """Return the `custom` metadata of nodes in one call of `torch.utils.checkpoint`, which tags
    their operators."""
    return {f"{_KEY}.{RecomputeRequest.__name__}": RecomputeRequest(checkpoint=True)}


def preserve_tags() -> AbstractContextManager[None]:
    """Return a context in which tracing preserves the tags of operators."""
    return traceback.preserve_node_meta()


def tags_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the tags of a traced operator."""
    # User code may annotate nodes too, under keys of its own.
    annotations = node.meta.get("custom") or {}
    return tuple(tag for key, tag in annotations.items() if key.startswith(f"{_KEY}."))


def add_tag(node: fx.Node, tag: Any) -> None:
    """Tag a traced operator."""
    # A new dictionary: `fx.Graph.node_copy` and `fx_nodes.call` share `custom` between nodes.
    node.meta["custom"] = {**node.meta.get("custom", {}), f"{_KEY}.{type(tag).__name__}": tag}


def retag(node: fx.Node, old: Any, new: Any = None) -> None:
    """Replace the tag `old` of a traced operator by `new`, or remove the tag if `new` is None."""
    custom = {key: tag for key, tag in node.meta.get("custom", {}).items() if tag is not old}
    if new is not None:
        custom[f"{_KEY}.{type(new).__name__}"] = new
    node.meta["custom"] = custom


def call_tags(graph: fx.Graph) -> tuple[tuple[Any, str], ...]:
    """Return each tag in the graph once, with the source line of its first operator."""
    # By identity: each call has a tag object of its own.
    calls: dict[int, tuple[Any, str]] = {}
    for node in graph.nodes:
        for tag in tags_of(node):
            calls.setdefault(id(tag), (tag, source_of(node)))
    return tuple(calls.values())
