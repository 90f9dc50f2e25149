"""The structure of the source

Read from `src/` as it stands, nothing is imported. *Places* are the folders and loose files at the
root of the package, without `__init__` and `__main__`; an *arrow* is a pair of places of which one
imports the other; *code* is lines without docstrings, comments and blanks, and functions count
without their docstrings. Goals: no circle of files, no function over 80 lines, no name of a class,
type alias or public function twice.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median, quantiles

from benchmarks.table import Table

PACKAGE = Path(__file__).parents[1] / "src" / "shardwright"
LONGEST = 80
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def run(package: Path = PACKAGE) -> list[Table]:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    imports = {path: set(_imports(path, trees, package)) for path in trees}
    lengths = [length for tree in trees.values() for length in _function_lengths(tree)]
    arrows = {
        (_place(path, package), _place(target, package))
        for path, targets in imports.items()
        for target in targets
        if "__init__" not in (_place(path, package), _place(target, package))
    }
    names = Counter(name for tree in trees.values() for name in _public_names(tree))
    twice = sorted(name for name, count in names.items() if count > 1)
    places = {_place(path, package) for path in trees} - {"__init__", "__main__"}
    circles = _has_circle(imports)
    table = Table("What a reader finds", ("what", "number"))
    table.add("places", len(places))
    table.add("files", len(trees))
    table.add("lines of code", f"{sum(map(_code_lines, texts.items())):,}")
    table.add("median file, lines", round(median(t.count("\n") for t in texts.values() if t)))
    table.add("arrows between places", sum(a != b for a, b in arrows))
    table.add("a circle of files", "yes" if circles else "none")
    table.add("functions", f"{len(lengths):,}")
    table.add("median and 95th percentile of a function, lines", _spread(lengths))
    table.add(f"functions over {LONGEST} lines", sum(length > LONGEST for length in lengths))
    table.add("names that stand twice", len(twice))
    if circles:
        table.missed.append("files import each other in a circle")
    if max(lengths) > LONGEST:
        table.missed.append(f"the longest function has {max(lengths)} lines")
    if twice:
        table.missed.append(f"names that stand twice: {', '.join(twice)}")
    return [table]


def _spread(lengths: list[int]) -> str:
    return f"{median(lengths):.0f}, {quantiles(lengths, n=20)[-1]:.0f}"


def _place(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


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


def _code_lines(entry: tuple[Path, str]) -> int:
    path, text = entry
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = {
        line
        for token in tokens
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
