"""Rooms import only upwards in the table of the architecture, files never in a circle; names are
unique.

The first rooms know no torch."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from benchmarks import bench_structure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
PAGE = ROOT / "docs" / "architecture.md"
MODULES = sorted(PACKAGE.rglob("*.py"))
WITHOUT_TORCH = ["errors", "text_files", "progress", "layout"]
OPTIONAL = {
    *("accelerate", "datasets", "jinja2", "peft", "scipy", "sklearn", "transformers", "trl"),
    "wandb",
}
WITH_OPTIONAL = "torch.utils.tensorboard."
"""A part of torch that needs a package of its own."""
"""Dependencies that are imported where they are needed, because they may be missing."""


def rooms(page: str) -> list[str]:
    """The rooms of the table, in its order."""
    return re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.M)


ORDER = rooms(PAGE.read_text(encoding="utf-8"))
HEIGHT = {room: height for height, room in enumerate(ORDER)}


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(module: Path, source: str) -> Iterator[tuple[ast.stmt, str]]:
    """Statement and full name of everything that `source`, the text of `module`, imports."""
    package = ["shardwright", *module.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                parts = [*start, *filter(None, [node.module]), alias.name]
                yield node, ".".join(parts)


def violations(module: Path, source: str) -> list[str]:
    room = room_of(module)
    problems = []
    for node, name in imports(module, source):
        place, parts = f"{module.name}:{node.lineno}", name.split(".")
        if parts[0] == "torch" and room in WITHOUT_TORCH:
            problems.append(f"{place} imports {name}, but {room} does without torch")
        optional = parts[0] in OPTIONAL or name.startswith(WITH_OPTIONAL)
        if node.col_offset and not optional:
            problems.append(f"{place} imports {name} inside a function or condition")
        if parts[0] != "shardwright":
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "__init__"
        if HEIGHT[target] > HEIGHT[room]:
            problems.append(f"{place} imports {name}, which is above {room}")
    return problems


def files_imported(sources: Mapping[Path, str]) -> dict[Path, set[Path]]:
    """Which files of the package each file imports. Of a package it is the `__init__.py`, and of a
    name in it the file that the name stands for, if there is one."""
    names = {
        ".".join(["shardwright", *path.relative_to(PACKAGE).with_suffix("").parts]): path
        for path in sources
    }
    names |= {n.removesuffix(".__init__"): p for n, p in names.items() if n.endswith(".__init__")}

    def targets(path: Path) -> Iterable[Path]:
        for _, name in imports(path, sources[path]):
            target = names.get(name) or names.get(name.rpartition(".")[0])
            if target is not None:
                yield target

    return {path: set(targets(path)) for path in sources}


def circle(sources: Mapping[Path, str]) -> list[str]:
    """The files of a circle of imports; none if there is no circle."""
    try:
        TopologicalSorter(files_imported(sources)).prepare()
    except CycleError as error:
        return [str(path.relative_to(PACKAGE)) for path in error.args[1]]
    return []


def test_the_table_names_every_room_once_and_no_other() -> None:
    assert sorted(ORDER) == sorted({room_of(module) for module in MODULES})


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_module_imports_only_rooms_above_its_own_in_the_table(module: Path) -> None:
    assert violations(module, module.read_text(encoding="utf-8")) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle({path: path.read_text(encoding="utf-8") for path in MODULES}) == []


def test_no_class_alias_or_public_function_has_the_name_of_another() -> None:
    (table,) = bench_structure.run()
    assert not [line for line in table.missed if "twice" in line]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph/graph.py", "from shardwright.rules import rule_of"),
        ("graph/graph.py", "import shardwright.plan"),
        ("graph/graph.py", "from shardwright import api"),
        ("graph/graph.py", "from ..lower.program import lower"),
        ("plan/plan.py", "def f():\n    from shardwright.graph.graph import Graph"),
        ("plan/plan.py", "from shardwright import capture_all"),
        ("layout/layout.py", "import torch.nn"),
        ("layout/redistribution.py", "from torch import Tensor"),
    ],
)
def test_an_import_upwards_or_hidden_or_of_torch_below_is_reported(
    module: str, source: str
) -> None:
    assert len(violations(PACKAGE / module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph/graph.py", "from shardwright.layout.layout import Layout\nimport torch"),
        ("rules/views.py", "from ..graph.graph import Op"),
        ("rules/views.py", "from . import rule"),
        ("models/lora.py", "def f():\n    from peft import LoraConfig"),
        ("cli.py", "import shardwright as sw"),
    ],
)
def test_an_import_downwards_or_of_what_may_be_missing_is_allowed(module: str, source: str) -> None:
    assert violations(PACKAGE / module, source) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from shardwright.rules.b import f", "from shardwright.rules.a import g"),
        ("from shardwright.rules import b", "from . import a"),
        ("from shardwright.rules.b import f", "def f():\n    from shardwright.rules.a import g"),
    ],
)
def test_a_circle_of_two_files_is_reported(first: str, second: str) -> None:
    sources = {PACKAGE / "rules" / "a.py": first, PACKAGE / "rules" / "b.py": second}
    assert set(circle(sources)) == {"rules/a.py", "rules/b.py"}


def test_a_file_that_imports_a_name_of_its_own_package_makes_a_circle() -> None:
    sources = {
        PACKAGE / "rules" / "__init__.py": "from shardwright.rules.a import rule_of",
        PACKAGE / "rules" / "a.py": "from shardwright.rules import rule_of",
    }
    assert set(circle(sources)) == {"rules/__init__.py", "rules/a.py"}


def test_tests_stand_where_the_files_stand_that_they_test() -> None:
    """`tests/room/test_file.py` or `test_file_aspect.py` tests `room/file.py`; what crosses rooms
    stands in `features`, what is about the repository at the top, and a tool of the tests beside
    its own test."""
    tests = ROOT / "tests"
    strays = []
    for test in sorted(tests.rglob("test_*.py")):
        folder = test.relative_to(tests).parent
        subject = test.stem.removeprefix("test_")
        homes = [PACKAGE / folder, tests / folder]
        stems = [file.stem for home in homes for file in home.glob("*.py")]
        named = any(subject == stem or subject.startswith(f"{stem}_") for stem in stems)
        if folder.parts and folder.parts[0] != "features" and not named:
            strays.append(str(test.relative_to(tests)))
    assert strays == []
