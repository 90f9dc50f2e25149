"""Shardwright decides how every operator of an ordinary PyTorch model is sharded over N devices,
and trains it there.

>>> import shardwright as sw
>>> layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
"""

import ast
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The names and their modules are in the stub, which type checkers read. A name is imported at its
# first use: `import shardwright` must not import torch, which takes seconds.
_SOURCES = {
    alias.asname or alias.name: (node.module or "", alias.name)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""For each public name, its module and its name there."""

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name == "materialise":
        warnings.warn("sw.materialise is now sw.materialize", DeprecationWarning, stacklevel=2)
        name = "materialize"
    if name in _SOURCES:
        module, source = _SOURCES[name]
        value = getattr(import_module(module), source, None)
        if value is None:  # The name is a module, such as `rules`.
            value = import_module(f"{module}.{source}")
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
