"""Captured graphs of language models, cached on disk, so that a model is captured once.

They are in `$XDG_CACHE_HOME/shardwright/graphs`, by default in `~/.cache`, one file for each model,
shape of its inputs, and version of everything that determines the graph. A file is used only if its
checksum proves that it is what was written under its name. Reading it runs no code, but a graph is
what is trained: a folder that others can write to is not used. `SHARDWRIGHT_GRAPH_CACHE=off` in the
environment captures each time.

The cache never ends a run: a file or folder that cannot be used is one warning, and the model is
captured.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from shardwright.core.graph.graph import Graph
from shardwright.core.graph.serialize import FORMAT, dumps, loads

logger = logging.getLogger("shardwright.capture")

MAX_GRAPHS = 32
"""Graphs that are kept; beyond it, the least recently read are removed."""

PACKAGES = ("shardwright", "transformers", "peft")


def cached_graph(description: object, capture: Callable[[], Graph]) -> Graph:
    """The cached graph for `description`, else what `capture` returns, which is then cached.

    A file that is damaged or of another format is replaced; a folder that cannot be read or
    written, or that others can write to, is ignored.

    Args:
        description: of all that determines the graph beside the versions of packages; its `repr`
            must be the same each time.
    """
    if os.environ.get("SHARDWRIGHT_GRAPH_CACHE") == "off":
        return capture()
    key = _key(description)
    try:
        folder = graphs_folder()
        graph = _read(folder, key)
    except ValueError as error:
        logger.warning("%s is damaged, capturing again: %s", folder / f"{key}.graph", error)
        graph = None
    except (OSError, RuntimeError) as error:
        # RuntimeError: of a user without a home folder.
        logger.warning("graphs are not cached: %s", error)
        return capture()
    if graph is None:
        graph = capture()
        _write(folder, key, graph)
    return graph


def graphs_folder() -> Path:
    """The folder of the cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "shardwright" / "graphs"


def _read(folder: Path, key: str) -> Graph | None:
    """The graph, or None if there is no file.

    Raises:
        OSError: if the folder or the file cannot be read, or others can write to the folder.
        ValueError: if the file is not as it was written.
    """
    path = folder / f"{key}.graph"
    try:
        _check_private(folder)
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    graph = loads(content, key)
    with suppress(OSError):  # Only the order of removal depends on it.
        path.touch()
    return graph


def _check_private(folder: Path) -> None:
    """Raises: PermissionError: others than this user can write to the folder."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} is not used: it belongs to another user, or others can write to it (its"
            " owner can `chmod 700` it)"
        )


def _write(folder: Path, key: str, graph: Graph) -> None:
    """Replaces the file at once, so that another process reads the earlier file or the new one."""
    try:
        content = dumps(graph, key)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as temporary:
            written = Path(temporary.name)
            try:
                temporary.write(content)
                temporary.flush()
                written.replace(folder / f"{key}.graph")
            except OSError:
                written.unlink(missing_ok=True)
                raise
        _remove_oldest(folder)
    except Exception as error:  # A constant of the graph can raise anything.
        logger.warning("the captured graph is not cached: %s", error)


def _remove_oldest(folder: Path) -> None:
    """Other processes may remove files at the same time."""
    ages: dict[Path, float] = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            ages[path] = path.stat().st_mtime
    for path in sorted(ages, key=ages.__getitem__, reverse=True)[MAX_GRAPHS:]:
        path.unlink(missing_ok=True)


def _key(description: object) -> str:
    versions = [
        *(FORMAT, platform.python_version(), torch.__version__, torch.version.git_version),
        *map(_version, PACKAGES),
        _own_source(),
    ]
    return hashlib.sha256(repr((description, versions)).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _own_source() -> str:
    """A hash of all modules of this package, which capture and the form of graphs depend on."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
