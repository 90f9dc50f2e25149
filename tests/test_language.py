"""The worst patterns of a private dialect are in no docstring, message or page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from source_texts import ROOT, SourceText, docstrings, messages, modules

PAGES = sorted((ROOT / "docs").glob("*.md"))

ANYWHERE = {
    "a text that needs its neighbor": r"\b[Ll]ikewise\b|\bas above\b|\bThe same,",
    "a number without a value": r"\bso many\b",
    "an inverted passive": r"(?:^|[.:;] )[A-Z]\w+(?:ed|en) (?:is|are) (?!not\b|never\b)",
}
FIRST_WORDS = r"(?:What|Who|Whom|Which|Whose)\b"
"""A relative clause where a verb or a noun belongs; `Whether` is fine for a truth value."""

VAGUE_NAME = (
    r"_*(?:again|alike|both|fit|found|kept|kinds?|known|left|marks?|mine|ones?|own|parts?|peak|"
    r"places?|rest|said|texts?|things?|told|whole)_*"
)
"""Names that do not say of what: `op_type`, `peak_bytes`, `operands` do. A parameter may be `text`,
if it is the text that a function parses, wraps or hashes."""

PUBLIC_VAGUE_NAMES = {
    "Alternative.kind": "key of `shardwright compare --json`",
    "Alternative.parts": "key of `shardwright compare --json`",
    "CollectiveTotal.kind": "key of a profile's file",
    "LRSchedule.kind": "argument in configurations",
    "LRSchedule.peak": "argument in configurations",
    "LeftOut.text": "public field",
    "Memory.peak": "`plan.memory.peak`",
    "Plan.text": "public method",
    "RankedPlans.slower_for.kind": "argument of a public method",
    "RehearsalPhase.parts": "key of `shardwright rehearse --json`",
    "ScheduleSection.kind": "configuration key",
    "StageMemory.peak": "of the same name as `plan.memory.peak`",
    "StepRow.parts": "key of a plan's file",
    "TimePart.kind": "key of a plan's file",
    "whole": "public function `sw.whole`",
}
"""Vague names that users or files refer to, each with the reference."""


def objections(text: str) -> list[str]:
    """The patterns that a text contains."""
    words = " ".join(text.split())
    return [reason for reason, pattern in ANYWHERE.items() if re.search(pattern, words)]


def report(texts: Iterable[SourceText], first_words: str = "") -> str:
    """The texts that contain a pattern, with the reasons."""
    lines = []
    for each in texts:
        reasons = objections(each.text)
        if first_words and re.match(first_words, each.text.strip()):
            reasons.append("a relative clause as first words")
        if reasons:
            lines.append(f"{each}\n  {'; '.join(reasons)}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "Likewise, for a list.",
        "Checked as above.",
        "The same, aligned.",
        "Runs on so many devices.",
        "Refused are gradients through random draws.",
        "Raises an error. Compared are the numbers of all ranks.",
    ],
)
def test_each_pattern_is_recognized(text: str) -> None:
    assert objections(text)


@pytest.mark.parametrize(
    "text",
    ["Parameters are sharded.", "Gradients that are needed are reduced."],
)
def test_plain_sentences_are_not(text: str) -> None:
    assert not objections(text)


def test_docstrings() -> None:
    assert report(docstrings(), FIRST_WORDS) == ""


def test_messages() -> None:
    assert report(messages()) == ""


def defined_names(node: ast.AST, owner: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield (name with its classes and functions, name, line) of the variables, fields, parameters,
    functions and classes that `node` defines; parameters named `text` aside."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.arg(arg=name) if name != "text":
                yield f"{owner}{name}", name, child.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield f"{owner}{name}", name, child.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield f"{owner}{name}", name, child.lineno
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield f"{owner}{name}", name, child.lineno
                yield from defined_names(child, f"{owner}{name}.")
                continue
        yield from defined_names(child, owner)


def test_names_say_of_what() -> None:
    vague = {
        path: f"{file.relative_to(ROOT)}:{line}: {path}"
        for file, tree in modules()
        for path, name, line in defined_names(tree)
        if re.fullmatch(VAGUE_NAME, name)
    }
    assert [vague[path] for path in vague.keys() - PUBLIC_VAGUE_NAMES.keys()] == []
    assert PUBLIC_VAGUE_NAMES.keys() - vague.keys() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [line for line in prose.splitlines() if objections(line)]
    assert found == []
