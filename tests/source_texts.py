"""Docstrings, messages and private names of the package, with where each is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class SourceText:
    """A text in a source file.

    Args:
        room: the folder or module below the package, such as `core/layout` or `errors`.
        line: the number of its first line.
    """

    room: str
    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}\n{self.text}"


def docstrings() -> Iterator[SourceText]:
    """Docstrings of modules, classes, functions and, below an assignment, of constants."""
    for file, tree in modules():
        for node in ast.walk(tree):
            # A statement that is only a string is a docstring.
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield _source_text(file, node.lineno, text)


def messages() -> Iterator[SourceText]:
    """The texts of exceptions and warnings, with `{}` for what is filled in."""
    for file, tree in modules():
        for node in ast.walk(tree):
            match node:
                case ast.Raise(exc=ast.Call(args=arguments)):
                    # As in `keys.error("type", "the key is missing")`.
                    text = ": ".join(filter(None, map(literal, arguments)))
                case ast.Call(func=ast.Attribute(attr="warn"), args=[first, *_]):
                    text = literal(first)
                case _:
                    continue
            if re.search("[a-z]", text):
                yield _source_text(file, node.lineno, text)


def private_names() -> Iterator[SourceText]:
    """Names of private functions, methods and classes, each with its first line."""
    for file, tree in modules():
        lines = file.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree):
            if isinstance(node, Definition) and re.match("_[^_]", node.name):
                yield _source_text(file, node.lineno, lines[node.lineno - 1].strip())


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """The files of the package, each with its syntax tree."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file, ast.parse(file.read_text(encoding="utf-8"))


def room_of(file: Path) -> str:
    """The folder or module of a file, as in `SourceText.room`."""
    *folders, name = file.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(folders[:2]) or name


def _source_text(file: Path, line: int, text: str) -> SourceText:
    return SourceText(room_of(file), file, line, text)


def literal(node: ast.expr) -> str:
    """The text of a string, an f-string or a sum of these; empty for another expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(literal(part) or "{}" for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return literal(left) + literal(right)
    return ""
