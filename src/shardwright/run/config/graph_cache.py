"""On-disk cache of captured graphs of language models.

Location: `$XDG_CACHE_HOME/shardwright/graphs`, by default `~/.cache/shardwright/graphs`. Each file
name is a hash of the model, its input shapes, and the versions of all code that affects the graph;
each file has a checksum. Loading a graph executes no code, but the graph determines the training
step, so a folder writable by other users is ignored. `SHARDWRIGHT_GRAPH_CACHE=off` disables the
cache.

Cache failures never stop a run: they are logged as a warning, and the model is captured.
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
"""Maximum number of cached graphs; the least recently used are evicted."""

PARTIAL = ".graph.partial"
"""Suffix of the names of cache files that are still being written."""

VERSIONED_PACKAGES = ("shardwright", "transformers", "peft")
"""Packages whose versions are part of the cache key: they define the captured models."""


def cached_graph(description: object, capture: Callable[[], Graph]) -> Graph:
    """Return the cached graph of `description`; on a miss, call `capture` and cache its result.

    Damaged files and files of another format version are replaced. The cache is skipped if its
    folder is not accessible, or is writable by other users.

    Args:
        description: all inputs that determine the graph, except package versions; its `repr` must
            be equal in every process.
    """
    if os.environ.get("SHARDWRIGHT_GRAPH_CACHE") == "off":
        return capture()
    key = _compute_cache_key(description)
    try:
        folder = graphs_folder()
        graph = _read_graph(folder, key)
    except ValueError as error:
        # Only reading the file raises ValueError, so `folder` is set.
        path = folder / f"{key}.graph"
        problem = str(error).partition("\n")[0]
        logger.warning("%s is damaged, so the model is captured again: %s", path, problem)
        graph = None
    except (OSError, RuntimeError) as error:
        # Path.home() raises RuntimeError for a user without a home folder.
        logger.warning("graphs are not cached: %s", error)
        return capture()
    if graph is None:
        graph = capture()
        _write_graph(folder, key, graph)
    return graph


def graphs_folder() -> Path:
    """Return the folder of the cache, below `$XDG_CACHE_HOME` or `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "shardwright" / "graphs"


def _read_graph(folder: Path, key: str) -> Graph | None:
    """Return the cached graph, or None on a miss.

    Raises:
        OSError: if the folder or the file cannot be read, or the folder is writable by other users.
        ValueError: if the file is damaged.
    """
    path = folder / f"{key}.graph"
    try:
        _refuse_folder_writable_by_others(folder)
        content = path.read_bytes()
    # Before the first capture neither the folder nor the file exists.
    except FileNotFoundError:
        return None
    graph = loads(content, key)
    # The modification time records the last use, for eviction; a read-only folder has none.
    with suppress(OSError):
        path.touch()
    return graph


def _refuse_folder_writable_by_others(folder: Path) -> None:
    """Raise PermissionError if other users can write to the folder."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"the cache {folder} is ignored, as another user owns it or can write to it\n"
            f"if it is yours, run: chmod 700 {folder}"
        )


def _write_graph(folder: Path, key: str, graph: Graph) -> None:
    """Write the graph file atomically: concurrent readers see the old file or the new one."""
    try:
        content = dumps(graph, key)
        # Private despite the umask: a folder in which others may write would be ignored when it is
        # read.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # In the same folder, since a rename is atomic only within a file system. `delete=False`, as
        # the temporary name no longer exists after the rename.
        with tempfile.NamedTemporaryFile(dir=folder, suffix=PARTIAL, delete=False) as temporary:
            temporary_path = Path(temporary.name)
            try:
                temporary.write(content)
                # Flushed before the rename, or a reader of the final name could see a truncated
                # file.
                temporary.flush()
                temporary_path.replace(folder / f"{key}.graph")
            # A full disk must leave no partial file.
            except OSError:
                temporary_path.unlink(missing_ok=True)
                raise
        _evict_least_recently_used(folder)
    # Constants of the graph may be objects of any library, and serializing them can raise anything.
    except Exception as error:
        logger.warning("the captured graph is not cached: %s", error)


def _evict_least_recently_used(folder: Path) -> None:
    last_used: dict[Path, float] = {}
    # Not other files: the folder may be one that the user has for other purposes too.
    for path in (*folder.glob("*.graph"), *folder.glob(f"*{PARTIAL}")):
        # Another process may evict the same file at the same time.
        with suppress(FileNotFoundError):
            last_used[path] = path.stat().st_mtime
    for path in sorted(last_used, key=last_used.__getitem__, reverse=True)[MAX_GRAPHS:]:
        path.unlink(missing_ok=True)


def _compute_cache_key(description: object) -> str:
    versions = [
        # The commit as well, because builds of one version of PyTorch may differ.
        *(FORMAT, platform.python_version(), torch.__version__, torch.version.git_version),
        *map(_get_package_version, VERSIONED_PACKAGES),
        _hash_source_files(),
    ]
    return hashlib.sha256(repr((description, versions)).encode()).hexdigest()[:32]


def _get_package_version(package: str) -> str:
    try:
        return version(package)
    # `transformers` and `peft` are optional; without one of them, no graph depends on its version.
    except PackageNotFoundError:
        return ""


# Cached, because it reads every source file of the package.
@cache
def _hash_source_files() -> str:
    """Hash all source files of this package, since any change of them may change the graphs."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    # Sorted, because the order of `rglob` depends on the file system.
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
