"""The cluster `local`: processes on this machine's CPU, measured and kept in the user's cache.

`shardwright calibrate` measures everything, with as many processes as are asked for
(`tools/compare/measure_processes.py`). Where it has not run, the CPU is measured by one process at
first use, which takes some tenths of a second, and all else is assumed to be as on other machines.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from shardwright.core.cost.cluster import (
    GLOO,
    LOCAL,
    Cluster,
    LinkLevel,
    cluster_to_yaml,
    read_cluster,
)
from shardwright.core.cost.measure import measure_device
from shardwright.errors import ConfigError
from shardwright.text_files import read_text

logger = logging.getLogger("shardwright.cost")

ASSUMED_LINK = LinkLevel("processes", bandwidth=1e9, latency=8.5e-5, call=2.4e-4, collectives=GLOO)
PASS_OVERHEAD = 7.5e-4
"""gloo over loopback, and what a pass of a pipeline stage takes, as measured with 8 processes on
two cores."""


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
    device = replace(measure_device(), pass_overhead=PASS_OVERHEAD)
    cluster = Cluster(LOCAL, device, (ASSUMED_LINK,))
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
