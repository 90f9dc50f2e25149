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

# Public names and their modules are read from the stub, as by type checkers. A name is imported on
# first use, because `import shardwright` must not import torch, which takes seconds.
_PUBLIC_NAMES = {
    alias.asname or alias.name: (node.module or "", alias.name)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Module and name in that module, by public name of this package."""

__all__ = sorted(_PUBLIC_NAMES)


# Called for names that are not in `globals()`, so once per name (PEP 562).
def __getattr__(name: str) -> Any:
    if name == "materialise":
        warnings.warn(
            "`sw.materialise` is deprecated\nuse `sw.materialize`", DeprecationWarning, stacklevel=2
        )
        name = "materialize"
    if name in _PUBLIC_NAMES:
        module, source_name = _PUBLIC_NAMES[name]
        value = getattr(import_module(module), source_name, None)
        if value is None:  # The name is a module, such as `rules`.
            value = import_module(f"{module}.{source_name}")
        globals()[name] = value
        return value
    # A subpackage, such as `shardwright.run`, that nothing has imported so far.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
