"""The structure of the source

Read from `src/` as it stands, nothing is imported. *Rooms* are the folders of a building, as
`core/layout`; a building without folders and a loose file at the root are a room each. An *arrow*
is a pair of rooms of which one imports the other; *code* is lines without docstrings, comments and
blanks, and functions count without their docstrings. *Comments* are for 100 lines of code; *bare*
are public classes and functions without a docstring. Goals: no circle of files, no function over 80
lines, no name of a class, type alias or public function twice.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median, quantiles

from benchmarks.size import Size
from benchmarks.table import Table

PACKAGE = Path(__file__).parents[1] / "src" / "shardwright"
LONG, LONGEST = 60, 80
"""Lines of a function: those that fit a screen, and the most that the goal allows."""

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FACES = {"__init__.py", "__main__.py"}
"""Files that are no room by themselves."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the package, read once."""

    path: Path
    room: str
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path, package: Path) -> SourceFile:
        text, parts = path.read_text(encoding="utf-8"), path.relative_to(package).parts
        room = "/".join(parts[:-1][:2]) or path.stem
        return cls(path, room, text, ast.parse(text))

    @cached_property
    def code(self) -> int:
        return _code_lines((self.path, self.text))

    @cached_property
    def comments(self) -> int:
        return sum(token.type == tokenize.COMMENT for token in _tokens(self.text))

    @cached_property
    def lengths(self) -> list[int]:
        """Of functions, in lines."""
        return list(_function_lengths(self.tree))

    @cached_property
    def bare(self) -> int:
        """Public classes and functions without a docstring."""
        return sum(
            not node.name.startswith("_") and ast.get_docstring(node) is None
            for node in self.tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        )


def run(size: Size = Size.DEFAULT, package: Path = PACKAGE) -> list[Table]:
    """The same at both sizes."""
    files = {path: SourceFile.read(path, package) for path in sorted(package.rglob("*.py"))}
    return [_whole(files, package), _rooms(list(files.values()))]


def _whole(files: Mapping[Path, SourceFile], package: Path) -> Table:
    trees = {path: file.tree for path, file in files.items()}
    imports = {path: set(_imports(path, trees, package)) for path in trees}
    lengths = [length for file in files.values() for length in file.lengths]
    rooms = {file.room for file in files.values() if file.path.name not in FACES}
    arrows = {
        (files[path].room, files[target].room)
        for path, targets in imports.items()
        for target in targets
    }
    names = Counter(name for tree in trees.values() for name in _public_names(tree))
    twice = sorted(name for name, count in names.items() if count > 1)
    circles = _has_circle(imports)
    lines = [file.text.count("\n") for file in files.values() if file.text]
    table = Table("What a reader finds", ("what", "number"))
    table.add("rooms", len(rooms))
    table.add("files", len(files))
    table.add("lines of code", f"{sum(file.code for file in files.values()):,}")
    table.add("median file, lines", round(median(lines)))
    table.add("arrows between rooms", sum(a != b and {a, b} <= rooms for a, b in arrows))
    table.add("a circle of files", "yes" if circles else "none")
    table.add("functions", f"{len(lengths):,}")
    table.add("median and 95th percentile of a function, lines", _spread(lengths))
    for most in (LONG, LONGEST):
        table.add(f"functions over {most} lines", sum(length > most for length in lengths))
    table.add("names that stand twice", len(twice))
    if circles:
        table.missed.append("files import each other in a circle")
    if max(lengths) > LONGEST:
        table.missed.append(f"the longest function has {max(lengths)} lines")
    if twice:
        table.missed.append(f"names that stand twice: {', '.join(twice)}")
    return table


def _rooms(files: Sequence[SourceFile]) -> Table:
    """A row for each building, followed by those of its rooms."""
    table = Table(
        "Buildings and rooms",
        ("room", "files", "code", f"functions over {LONG}", "comments", "bare"),
    )
    buildings: dict[str, list[SourceFile]] = {}
    for file in files:
        buildings.setdefault(file.room.partition("/")[0], []).append(file)
    for building, inside in buildings.items():
        _add(table, building, inside)
        rooms = sorted({file.room for file in inside} - {building})
        for room in rooms:
            _add(table, room, [file for file in inside if file.room == room])
    _add(table, "all", files)
    return table


def _add(table: Table, name: str, files: Sequence[SourceFile]) -> None:
    code = sum(file.code for file in files)
    comments = 100 * sum(file.comments for file in files) / max(code, 1)
    long = sum(length > LONG for file in files for length in file.lengths)
    bare = sum(file.bare for file in files)
    table.add(name, len(files), f"{code:,}", long, f"{comments:.1f}", bare)


def _spread(lengths: list[int]) -> str:
    return f"{median(lengths):.0f}, {quantiles(lengths, n=20)[-1]:.0f}"


def _imports(path: Path, trees: Mapping[Path, ast.Module], package: Path) -> Iterator[Path]:
    """The files of the package that a file imports."""
    for node in ast.walk(trees[path]):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            start = package.parent.joinpath(*name.split("."))
            for target in (start.with_suffix(".py"), start / "__init__.py"):
                if target in trees and target != path:
                    yield target


def _has_circle(imports: Mapping[Path, set[Path]]) -> bool:
    """Without the faces of packages: their files are found under their own names."""
    files = {p: t for p, t in imports.items() if p.name != "__init__.py"}
    try:
        TopologicalSorter(files).prepare()
    except CycleError:
        return True
    return False


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def _code_lines(entry: tuple[Path, str]) -> int:
    path, text = entry
    lines = {
        line
        for token in _tokens(text)
        if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text, str(path))):
        # A text that stands alone is a docstring, of a module, a function or a constant.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _function_lengths(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield (node.end_lineno or 0) - node.lineno + 1 - docstring


def _public_names(tree: ast.Module) -> Iterator[str]:
    """Of classes, type aliases and public functions at the top of a file."""
    for node in tree.body:
        is_public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if isinstance(node, ast.ClassDef) or is_public:
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name
