"""The rooms of the package import only downwards, and the innermost ones know no torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "shardwright"

# From the bottom to the top: a room may import those of its own line and of the lines above it.
ORDER = [
    ["errors", "progress"],
    ["deferred"],
    ["axes", "picture", "route"],
    ["layout", "conversion"],
    ["graph"],
    ["rules"],
    ["strategy"],
    ["decided", "pipelining"],
    ["transfer", "segments"],
    ["buckets"],
    ["pins", "recompute", "strategy_files", "communication"],
    ["parts"],
    ["lower"],
    ["cost"],
    ["plan"],
    ["search"],
    ["api"],
    ["report", "saved_graphs"],
    ["train"],
    ["models"],
    ["config"],
    ["compare", "tune"],
    ["__init__"],
    ["cli"],
    ["__main__"],
]
HEIGHT = {room: height for height, line in enumerate(ORDER) for room in line}
WITHOUT_TORCH = ["errors", "progress", "axes", "picture", "route", "layout", "conversion"]

MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(module: Path, source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that `source`, the text of `module`, imports."""
    package = ["shardwright", *module.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                parts = [*start, *filter(None, [node.module]), alias.name]
                yield node.lineno, ".".join(parts)


def violations(module: Path, source: str) -> list[str]:
    room = room_of(module)
    found = []
    for line, name in imported(module, source):
        parts = name.split(".")
        if parts[0] == "torch" and room in WITHOUT_TORCH:
            found.append(f"{module.name}:{line} imports {name}, but {room} does without torch")
        if parts[0] != "shardwright":
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "__init__"
        if HEIGHT[target] > HEIGHT[room]:
            found.append(f"{module.name}:{line} imports {name}, which is above {room}")
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_module_imports_only_rooms_below_its_own(module: Path) -> None:
    assert room_of(module) in HEIGHT, f"{room_of(module)} has no place in ORDER"
    assert violations(module, module.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph/graph.py", "from shardwright.rules import rule_of"),
        ("graph/graph.py", "import shardwright.plan"),
        ("graph/graph.py", "from shardwright import api"),
        ("graph/graph.py", "from ..lower.program import lower"),
        ("graph/graph.py", "def f():\n    from shardwright.cli import main"),
        ("plan/plan.py", "from shardwright import capture"),
        ("layout.py", "import torch.nn"),
        ("conversion.py", "from torch import Tensor"),
    ],
)
def test_an_import_upwards_or_of_torch_below_is_found(module: str, source: str) -> None:
    assert len(violations(PACKAGE / module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph/graph.py", "from shardwright.layout import Layout\nimport torch"),
        ("rules/views.py", "from ..graph.graph import Op"),
        ("rules/views.py", "from . import rule"),
        ("cli.py", "import shardwright as sw"),
    ],
)
def test_an_import_downwards_is_allowed(module: str, source: str) -> None:
    assert violations(PACKAGE / module, source) == []
