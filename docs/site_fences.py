"""Read by MkDocs: a fence that only the slow tests run is a fence like others to a reader."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page as the site shows it."""
    return markdown.replace("```console slow\n", "```console\n")
