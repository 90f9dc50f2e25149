"""The cluster `local`: processes on this machine's CPU, measured and kept in the user's cache.

`shardwright calibrate` measures everything, with as many processes as are asked for. Where it has
not run, the CPU is measured by one process at first use, which takes some tenths of a second, and
the links are assumed to be those of gloo on one machine.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from shardwright.cost.cluster import (
    GLOO,
    LOCAL,
    Cluster,
    LinkLevel,
    cluster_to_yaml,
    read_cluster,
)
from shardwright.cost.measure import measure_cluster, measure_device
from shardwright.errors import ConfigError
from shardwright.text_files import read_text

logger = logging.getLogger("shardwright.cost")

ASSUMED_LINK = LinkLevel("processes", bandwidth=1e9, latency=2e-4, collectives=GLOO)
"""gloo over loopback: in a program some 0.4 ms for each message of two processes, 0.8 of four, 1.5
of eight on two cores."""


def cache_file() -> Path:
    """Where the measurements are kept: `$XDG_CACHE_HOME/shardwright/local.yaml`, by default in
    `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "shardwright" / "local.yaml"


def local_cluster() -> Cluster:
    """This machine as it was measured; measures its CPU if it never was.

    Raises:
        ConfigError: if the file in the cache is not as it should be.
    """
    file = cache_file()
    if file.is_file():
        return read_cluster(read_text(file, ConfigError), str(file))
    cluster = Cluster(LOCAL, measure_device(), (ASSUMED_LINK,))
    save(cluster)
    return cluster


def calibrate(processes: int = 2) -> Cluster:
    """Measures this machine's CPU and its links with so many processes; keeps the result.

    Raises:
        ValueError: if there are fewer than two processes.
    """
    cluster = measure_cluster(processes)
    save(cluster)
    return cluster


def save(cluster: Cluster) -> None:
    """Keeps the measurements, unless the cache cannot be written: then they are made again."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as partial:
            partial.write(cluster_to_yaml(replace(cluster, name=LOCAL)))
        Path(partial.name).replace(file)
    except OSError as error:
        logger.warning("measurements of this machine are not kept: %s", error)
