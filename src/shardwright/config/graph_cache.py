"""Captured graphs of language models, cached on disk, so that a model is captured once.

They are in `$XDG_CACHE_HOME/shardwright/graphs`, by default in `~/.cache`, one file for each model,
shape of its inputs, and version of all that takes part. Reading them runs no code, but a graph is
what is trained: a folder that others can write to is not used. `SHARDWRIGHT_GRAPH_CACHE=off` in the
environment captures each time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardwright.graph.graph import Graph
from shardwright.graph.serialize import dumps, loads

logger = logging.getLogger("shardwright.capture")

MAX_GRAPHS = 32
"""Graphs that are kept; beyond it, the least recently read are removed."""

PACKAGES = ("torch", "transformers", "peft")


def cached_graph(description: object, capture: Callable[[], Graph]) -> Graph:
    """The cached graph for `description`, else what `capture` returns, which is then cached.

    A file that cannot be read is replaced; a folder that cannot be written, or that others can
    write to, is ignored.

    Args:
        description: of all that decides the graph beside the versions of packages; its `repr` must
            be the same each time.
    """
    if os.environ.get("SHARDWRIGHT_GRAPH_CACHE") == "off":
        return capture()
    path = graphs_folder() / f"{_key(description)}.json"
    if path.parent.exists() and not _is_private(path.parent):
        logger.warning(
            "%s is not used: it belongs to another user, or others can write to it (its owner can"
            " `chmod 700` it)",
            path.parent,
        )
        return capture()
    graph = _read(path)
    if graph is None:
        graph = capture()
        _write(path, graph)
    return graph


def graphs_folder() -> Path:
    """The folder of the cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "shardwright" / "graphs"


def _is_private(folder: Path) -> bool:
    """Whether only this user can write to it."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(path: Path) -> Graph | None:
    try:
        graph = loads(path.read_bytes())
        path.touch()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, capturing again: %s", path, error)
        return None
    return graph


def _write(path: Path, graph: Graph) -> None:
    try:
        content = dumps(graph)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as temporary:
            temporary.write(content)
        Path(temporary.name).replace(path)
        newest_first = sorted(
            path.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True
        )
        for old in newest_first[MAX_GRAPHS:]:
            old.unlink(missing_ok=True)
    except (OSError, TypeError, NotImplementedError) as error:
        logger.warning("the captured graph is not cached: %s", error)


def _key(description: object) -> str:
    versions = [platform.python_version(), *map(_version, PACKAGES), _own_source()]
    return hashlib.sha256(repr((description, versions)).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _own_source() -> str:
    """A hash of all modules of this package, which capture and the form of graphs depend on."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
