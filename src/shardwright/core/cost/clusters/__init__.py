"""Built-in clusters, one YAML file each, and loading a cluster by its name or file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from shardwright.core.cost.cluster import LOCAL, Cluster, read_cluster
from shardwright.core.cost.local_cluster import local_cluster
from shardwright.errors import ConfigError
from shardwright.text_files import read_text

_FOLDER = resources.files(__name__)


def built_in() -> tuple[str, ...]:
    """Return the names of the built-in clusters, sorted."""
    names = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml")))


def load_cluster(name: str | Path) -> Cluster:
    """Return a built-in cluster by name, the cluster of this machine, or the cluster of a file.

    Args:
        name: `local`, the name of a built-in cluster, or the path of a YAML file.

    Raises:
        ConfigError: if the cluster is unknown or its file is invalid.
    """
    if str(name) == LOCAL:
        return local_cluster()
    if str(name) in built_in():
        file = _FOLDER / f"{name}.yaml"
        return read_cluster(file.read_text(encoding="utf-8"), str(name))
    path = Path(name)
    if not path.is_file():
        names = ", ".join((LOCAL, *built_in()))
        raise ConfigError(
            f"cluster {str(name)!r}: no built-in cluster and no file has this name\n"
            f"use the path of a cluster file, or a built-in cluster: {names}"
        )
    return read_cluster(read_text(path, ConfigError), str(path))
