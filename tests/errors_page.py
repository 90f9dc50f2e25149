"""The page of all exceptions with their messages, read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from source_texts import PACKAGE, literal, modules, room_of

INTRODUCTION = """\
# Errors

The exceptions of `shardwright.errors` and the messages with which they are raised, by the folder of
`src/shardwright` that raises them; `{}` stands for a value. The left column is the first line of a
message, the right one what to do about it, where there is more to say.
"""

CHOSEN_BY_CALLER = ("error_type",)
"""Parameters that hold an exception class, as in `read_text(path, error_type)`: the messages are
listed with the base class."""

Row = tuple[str, str, str]
"""A room, the first line of a message, and its remedy."""


def errors_page() -> str:
    """The page in Markdown: a section for each class, in the order of `errors.py`."""
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    rows: dict[str, set[Row]] = {node.name: set() for node in classes}
    base = classes[0].name
    # Callers see subclasses that are defined elsewhere as their base.
    base_of = dict.fromkeys(CHOSEN_BY_CALLER, base) | {
        node.name: _name(parent)
        for _, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        for parent in node.bases
        if _name(parent) in rows and node.name not in rows
    }
    for file, module in modules():
        for name, text in _raised(module, {*rows, *base_of}):
            problem, _, remedy = text.strip().partition("\n")
            if re.search(r"\w", problem):
                raised = base_of.get(name, name)
                rows[raised].add((room_of(file), problem, remedy))
    sections = ("\n".join(_section(node, sorted(rows[node.name]))) for node in classes)
    return INTRODUCTION + "".join(f"\n{section}\n" for section in sections)


def _raised(module: ast.Module, classes: set[str]) -> Iterator[tuple[str, str]]:
    """The class of each exception that a module makes, with each text of its message."""
    texts = _Texts(module)
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id="needs_extra"), args=[extra, purpose, error_type]):
                remedy = f"pip install 'shardwright[{literal(extra)}]'"
                yield _name(error_type), f"{literal(purpose)} ({{}})\n{remedy}"
            case ast.Call(args=[first, *_]) if _name(node.func) in classes:
                yield from ((_name(node.func), text) for text in texts.of(first))


class _Texts:
    """The string literals behind an expression of a module.

    A name stands for all strings assigned to it, a call for all strings that a function of this
    name in the module returns.
    """

    def __init__(self, module: ast.Module) -> None:
        self.module = module

    def of(self, node: ast.expr, depth: int = 2) -> list[str]:
        """The texts, with `{}` for what is filled in; none without words."""
        if re.search(r"\w", text := literal(node)):
            return [text]
        sources: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            sources = [node.body, node.orelse]
        elif isinstance(node, ast.Name):
            sources = self._assigned.get(node.id, [])
        elif isinstance(node, ast.Call):
            sources = self._returned.get(_name(node.func), [])
        return [text for source in sources if depth for text in self.of(source, depth - 1)]

    @cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.module):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    values.setdefault(name, []).append(value)
        return values

    @cached_property
    def _returned(self) -> dict[str, list[ast.expr]]:
        values: dict[str, list[ast.expr]] = {}
        for function in ast.walk(self.module):
            if isinstance(function, ast.FunctionDef):
                returns = (node for node in ast.walk(function) if isinstance(node, ast.Return))
                values[function.name] = [node.value for node in returns if node.value is not None]
        return values


def _name(function: ast.expr) -> str:
    """`f` for the callables `f` and `module.f`."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _section(node: ast.ClassDef, rows: list[Row]) -> Iterator[str]:
    bases = [base for each in node.bases if (base := _name(each)) not in ("Exception", "object")]
    yield f"## {node.name}\n"
    yield _paragraphs(ast.get_docstring(node) or "") + "\n"
    if bases:
        yield f"A subclass of {' and '.join(f'`{base}`' for base in bases)}.\n"
    if not rows:
        return
    yield "| message | what to do |"
    yield "|---|---|"
    room = ""
    for each, problem, remedy in rows:
        if each != room:
            room = each
            yield f"| **{room}** | |"
        yield f"| {_cell(problem)} | {_cell(remedy)} |".replace("|  |", "| |")


def _paragraphs(docstring: str) -> str:
    """A docstring without its sections, one line for each paragraph."""
    text = docstring.partition("\nArgs:")[0].strip()
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _cell(text: str) -> str:
    """A message as Markdown in a cell: its code stays code, all else is plain text.

    Empty for a text without words, such as a remedy that is a single value.
    """
    if not re.search(r"\w", text):
        return ""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    parts[::2] = [
        re.sub(r"[\\*`]|_(?!\w)|(?<![^\W_])_|\](?=\()", r"\\\g<0>", part).replace("<", "&lt;")
        for part in parts[::2]
    ]
    return "".join(parts).replace("|", "\\|")
