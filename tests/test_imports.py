"""Imports follow the two tables of the architecture, files never import in a circle, names are
unique, and tests stand where the files stand that they test."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from benchmarks import bench_structure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
GROUND = ("errors", "plain_data", "text_files", "progress")
WITHOUT_TORCH = (*GROUND, "core/layout")
OPTIONAL = {
    *("accelerate", "datasets", "jinja2", "lightning", "peft", "scipy", "sklearn"),
    *("transformers", "trl", "wandb"),
}
"""Dependencies that are imported where they are needed, because they may be missing."""
WITH_OPTIONAL = "torch.utils.tensorboard."
"""A part of torch that needs a package of its own."""

SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """The cells of each row of the table whose first column has that heading."""
    _, _, table = page.partition(f"| {heading} |")
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def buildings(page: str) -> dict[str, set[str]]:
    """The buildings that each building may import, itself among them."""
    return {
        name.strip("`"): {name.strip("`"), *re.findall(r"`(\w+)`", imported)}
        for name, imported, _ in rows(page, "building")
    }


def rooms(page: str) -> list[str]:
    """The rooms, such as `core/layout`, in the order of their table."""
    return [name.strip("`") for name, *_ in rows(page, "room")]


BUILDINGS, ORDER = buildings(PAGE), rooms(PAGE)


def room_of(module: str) -> str:
    """The room of a path or dotted name below the package; of a building's own `__init__` the
    building."""
    parts = module.split("/")
    first = parts[0].removesuffix(".py")
    inside = len(parts) > 1 and f"{first}/{parts[1]}" in ORDER
    return f"{first}/{parts[1]}" if inside else first


def imports(module: str, source: str) -> Iterator[tuple[ast.stmt, str]]:
    """Statement and full name of everything that `source`, the text of `module`, imports."""
    package = ["shardwright", *module.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                parts = [*start, *filter(None, [node.module]), alias.name]
                yield node, ".".join(parts)


def is_above(target: str, room: str) -> bool:
    """Whether `room` must not import from the room `target`."""
    if target in GROUND or target == room:
        return room in GROUND and GROUND.index(target) > GROUND.index(room)
    building, other = room.split("/")[0], target.split("/")[0]
    if building == "__main__":
        return False
    if other != building:
        return other not in BUILDINGS.get(building, set())
    # The `__init__` of a building, whose room is the building, gathers from all of its rooms.
    return "/" in room and ("/" not in target or ORDER.index(target) > ORDER.index(room))


def violations(module: str, source: str) -> list[str]:
    room = room_of(module)
    problems = []
    for node, name in imports(module, source):
        where, parts = f"{module}:{node.lineno}", name.split(".")
        if parts[0] == "torch" and room in WITHOUT_TORCH:
            problems.append(f"{where} imports {name}, but {room} does without torch")
        optional = parts[0] in OPTIONAL or name.startswith(WITH_OPTIONAL)
        if node.col_offset and not optional:
            problems.append(f"{where} imports {name} inside a function or condition")
        if parts[0] != "shardwright":
            continue
        # The public names are those of the core; the command line alone also asks for the version.
        public = len(parts) == 1 or parts[1] not in (*GROUND, *BUILDINGS)
        if public and room != "cli":
            problems.append(f"{where} imports {name} from the public names")
        elif not public and is_above(room_of("/".join(parts[1:])), room):
            problems.append(f"{where} imports {name}, which is above {room}")
    return problems


def files_imported(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which files of the package each file imports. Of a package it is the `__init__.py`, and of a
    name in it the file that the name stands for, if there is one."""
    names = {f"shardwright.{path.removesuffix('.py').replace('/', '.')}": path for path in sources}
    names |= {n.removesuffix(".__init__"): p for n, p in names.items() if n.endswith(".__init__")}

    def targets(path: str) -> Iterable[str]:
        for _, name in imports(path, sources[path]):
            target = names.get(name) or names.get(name.rpartition(".")[0])
            if target is not None:
                yield target

    return {path: set(targets(path)) for path in sources}


def circle(sources: Mapping[str, str]) -> list[str]:
    """The files of a circle of imports; none if there is no circle."""
    try:
        TopologicalSorter(files_imported(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


MODULES = {path.relative_to(PACKAGE).as_posix(): text for path, text in SOURCES.items()}


def test_the_tables_name_every_building_and_every_room_once_and_no_other() -> None:
    folders = {path.parent for path in SOURCES} - {PACKAGE}
    places = {folder.relative_to(PACKAGE).parts for folder in folders}
    tops = {parts[0] for parts in places}
    with_rooms = {parts[0] for parts in places if len(parts) > 1}
    assert sorted(BUILDINGS) == sorted(tops)
    inside = {"/".join(parts[:2]) for parts in places if len(parts) > 1}
    assert sorted(ORDER) == sorted(inside | (tops - with_rooms))


def test_modules_import_only_what_the_tables_allow() -> None:
    assert [each for name, text in MODULES.items() for each in violations(name, text)] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(MODULES) == []


def test_no_class_alias_or_public_function_has_the_name_of_another() -> None:
    table, _ = bench_structure.run()
    assert not [line for line in table.missed if "twice" in line]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core/graph/graph.py", "from shardwright.core.rules import rule_of"),
        ("core/graph/graph.py", "import shardwright.core.plan"),
        ("core/graph/graph.py", "from shardwright.core import api"),
        ("core/graph/graph.py", "from ..lower.program import lower"),
        ("core/plan/plan.py", "from shardwright.tools.report import page_html"),
        ("core/plan/plan.py", "def f():\n    from shardwright.core.graph.graph import Graph"),
        ("core/plan/plan.py", "from shardwright import capture_all"),
        ("core/layout/layout.py", "import torch.nn"),
        ("core/layout/redistribution.py", "from torch import Tensor"),
        ("integrations/transformers.py", "from shardwright.run.loop.loop import train"),
        ("run/config/run.py", "from shardwright.mindformers import LanguageRun"),
        ("models/build.py", "from shardwright.run import Batches"),
    ],
)
def test_an_import_upwards_or_hidden_or_of_torch_below_is_reported(
    module: str, source: str
) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core/graph/graph.py", "from shardwright.core.layout.layout import Layout\nimport torch"),
        ("core/rules/views.py", "from ..graph.graph import Op"),
        ("core/rules/views.py", "from . import rule"),
        ("models/lora.py", "def f():\n    from peft import LoraConfig"),
        ("run/__init__.py", "from shardwright.run.loop.loop import train"),
        ("mindformers/run.py", "from shardwright.run.config.run import Run"),
        ("cli/app.py", "import shardwright as sw"),
    ],
)
def test_an_import_downwards_or_of_what_may_be_missing_is_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from shardwright.core.rules.b import f", "from shardwright.core.rules.a import g"),
        ("from shardwright.core.rules import b", "from . import a"),
        ("from ..rules.b import f", "def f():\n    from shardwright.core.rules.a import g"),
    ],
)
def test_a_circle_of_two_files_is_reported(first: str, second: str) -> None:
    sources = {"core/rules/a.py": first, "core/rules/b.py": second}
    assert set(circle(sources)) == {"core/rules/a.py", "core/rules/b.py"}


def test_a_file_that_imports_a_name_of_its_own_package_makes_a_circle() -> None:
    sources = {
        "core/rules/__init__.py": "from shardwright.core.rules.a import rule_of",
        "core/rules/a.py": "from shardwright.core.rules import rule_of",
    }
    assert set(circle(sources)) == set(sources)


def test_tests_stand_where_the_files_stand_that_they_test() -> None:
    """`tests/core/room/test_file.py` or `test_file_aspect.py` tests `core/room/file.py`; what
    crosses rooms stands in `features`, what is about the repository at the top, and a tool of the
    tests beside its own test."""
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
