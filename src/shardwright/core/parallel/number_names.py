"""Names of Python numbers that change between calls, from the sources by which TorchDynamo denotes
them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from shardwright.core.capture.global_variables import GLOBALS
from shardwright.core.parallel.python_state import attribute_name
from shardwright.core.torch_internals.dynamo_guards import evaluate_dynamo_source

_NAMESPACES = ("__dict__", "_modules")
"""Attributes of a module under which Dynamo finds its other attributes."""


def names_of_sources(
    sources: Iterable[str], scope: Mapping[str, Any], module: nn.Module
) -> frozenset[str]:
    """Return the names of numbers, as in `PlannedCall.numbers` and `PythonState.numbers`.

    Args:
        sources: Dynamo sources such as `L['self']._modules['inner'].scale`, named
            `self.inner.scale`.
        scope: the local and global variables that sources begin with, as of `Guards.names`.
        module: the model.
    """
    names: dict[int, str] = {
        id(child): attribute_name(*path.rpartition(".")[::2]) if path else "self"
        for path, child in module.named_modules()
    }
    trees = (ast.parse(source, mode="eval").body for source in sources)
    return frozenset(_name(tree, scope, names) for tree in trees)


def _name(tree: ast.expr, scope: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """Return the name of the object that `tree` denotes; its source if it has no other name."""
    source = ast.unparse(tree)
    value = evaluate_dynamo_source(source, scope)
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, ModuleType):
        return f"{GLOBALS}{value.__name__}"
    match tree:
        case ast.Subscript(ast.Name("L"), ast.Constant(str(argument))):
            return argument
        case ast.Subscript(ast.Name("G"), ast.Constant(str(variable))):
            return attribute_name(f"{GLOBALS}{scope['G']['__name__']}", variable)
        case ast.Attribute(owner, attribute) if attribute in _NAMESPACES:
            return _name(owner, scope, names)
        case ast.Attribute(owner, attribute):
            return f"{_name(owner, scope, names)}.{attribute}"
        case ast.Subscript(ast.Attribute(owner, "__dict__"), ast.Constant(str(attribute))):
            return f"{_name(owner, scope, names)}.{attribute}"
        case ast.Subscript(owner, ast.Constant(key)):
            return f"{_name(owner, scope, names)}[{key!r}]"
    return source
