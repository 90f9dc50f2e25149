"""Built-in clusters, one YAML file each, and loading a cluster by its name or file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from shardwright.core.cost.cluster import LOCAL, Cluster
from shardwright.core.cost.cluster_file import cluster_from_content
from shardwright.core.cost.local_cluster import local_cluster
from shardwright.errors import ConfigError
from shardwright.plain_data import DIGEST, parse_yaml, short_repr, warn_if_edited
from shardwright.text_files import read_text

_FOLDER = resources.files(__name__)


def built_in_clusters() -> tuple[str, ...]:
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
    return cluster_from_content(_load_cluster_with_base(name, ()), str(name))


def _load_cluster_with_base(name: str | Path, derived_files: tuple[str, ...]) -> Any:
    """Return the parsed YAML of a cluster file, with missing keys taken from its `base` cluster.

    Args:
        name: name of a built-in cluster, or path of a file.
        derived_files: names of the files whose key `base` led to this file, to detect cycles.

    Raises:
        ConfigError: if the file does not exist or is invalid, or bases form a cycle.
    """
    content = parse_yaml(_read_cluster_file(name), str(name), ConfigError)
    # `cluster_from_content` raises the error for a file that is not a mapping.
    if not isinstance(content, Mapping) or "base" not in content:
        return content
    base, path = content["base"], Path(name)
    # A path is relative to the file that names it.
    inherited = base if base in built_in_clusters() else path.parent / str(base)
    if not isinstance(base, str) or str(inherited) in (*derived_files, str(name)):
        raise ConfigError(
            f"{name}: base must be the name or file of another cluster, not {short_repr(base)}\n"
            f"use one of {', '.join(built_in_clusters())}, or the path of a file"
        )
    base_content = _load_cluster_with_base(inherited, (*derived_files, str(name)))
    if not isinstance(base_content, Mapping):
        return base_content
    for values, file in ((base_content, inherited), (content, name)):
        warn_if_edited(values, str(file))
    # A digest covers the contents of one file, not the merged contents.
    keys = {**base_content, **content}.keys() - {"base", DIGEST}
    merged = {key: content.get(key, base_content.get(key)) for key in keys}
    inherited_device, device = base_content.get("device"), content.get("device", {})
    # Figure by figure, while a list of `levels` replaces that of the base.
    if isinstance(inherited_device, Mapping) and isinstance(device, Mapping):
        merged["device"] = {**inherited_device, **device}
    # A variant without a name is called like its file, as its base is another cluster.
    return merged if "name" in content else {**merged, "name": path.stem}


def _read_cluster_file(name: str | Path) -> str:
    if str(name) in built_in_clusters():
        return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    path = Path(name)
    if not path.is_file():
        names = ", ".join((LOCAL, *built_in_clusters()))
        raise ConfigError(
            f"cluster {str(name)!r}: no built-in cluster and no file has this name\n"
            f"use the path of a cluster file, or a built-in cluster: {names}"
        )
    return read_text(path, ConfigError)
