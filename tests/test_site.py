"""The site: every page is in it, and its reference has every public name."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import shardwright as sw
from markdown_fences import ROOT

VALUES = [value for name in sw.__all__ if not isinstance(value := getattr(sw, name), ModuleType)]
PUBLIC = {f"{value.__module__}.{value.__name__}" for value in VALUES}


def test_the_reference_has_every_public_name_once() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: (.*)$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) >= PUBLIC
    assert {each.split(".")[2] for each in set(named) - PUBLIC} == {"plan"}


def test_every_page_is_in_the_navigation_once() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    entries = [each for section in sections for each in section.values()]
    pages = [page for each in entries for page in ([each] if isinstance(each, str) else each)]
    assert sorted(pages) == sorted(file.name for file in (ROOT / "docs").glob("*.md"))


def test_the_site_is_built_strictly_with_every_fence(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    unrendered = [
        page.name for page in tmp_path.glob("*.html") if "```" in page.read_text(encoding="utf-8")
    ]
    assert unrendered == []
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    missing = [name for name in PUBLIC if f'id="{name}"' not in reference]
    assert missing == []
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="https?://(?!github\.com|squidfunk)', home)
