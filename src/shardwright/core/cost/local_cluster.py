"""The cluster `local`: processes on this machine's CPU, measured once and cached.

`shardwright calibrate` measures rates, links and overheads with a given number of processes
(`tools/compare/measure_processes.py`). Without calibration, one process measures the CPU at first
use, in a few tenths of a second, and links and pass overhead have default values.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from shardwright.core.cost.cluster import GLOO, LOCAL, Cluster, LinkLevel
from shardwright.core.cost.cluster_file import cluster_file_text, read_cluster
from shardwright.core.cost.measure import measure_device
from shardwright.errors import ConfigError
from shardwright.text_files import read_text, write_text

logger = logging.getLogger("shardwright.cost")

ASSUMED_LINK = LinkLevel("processes", bandwidth=1e9, latency=8.5e-5, call=2.4e-4, collectives=GLOO)
"""Link between processes (gloo over loopback) without calibration, measured with 8 processes on two
cores."""

PASS_OVERHEAD = 7.5e-4
"""Overhead in seconds per pass of a pipeline stage without calibration, measured with 8 processes
on two cores."""


def cache_file() -> Path:
    """Return the path of the cached measurements: `$XDG_CACHE_HOME/shardwright/local.yaml`, where
    the variable defaults to `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "shardwright" / "local.yaml"


def local_cluster() -> Cluster:
    """Return the cluster of processes on this machine, from cached measurements or new ones.

    Raises:
        ConfigError: if the cached file is invalid.
    """
    file = cache_file()
    # The rates of the CPU hardly change, and measuring them at each start would delay every plan.
    if file.is_file():
        return read_cluster(read_text(file, ConfigError), str(file))
    # The measurement runs no pipeline stages, so that their overhead is a default.
    device = replace(measure_device(), pass_overhead=PASS_OVERHEAD)
    cluster = Cluster(LOCAL, device, (ASSUMED_LINK,))
    save_local_cluster(cluster)
    return cluster


def save_local_cluster(cluster: Cluster) -> None:
    """Write `cluster` to `cache_file()`; log a warning if the file cannot be written."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, cluster_file_text(replace(cluster, name=LOCAL)))
    except OSError as error:
        # A home folder that is read-only, as in many containers, must not prevent planning.
        logger.warning(
            "could not save the measurements of this machine: %s\n"
            "set XDG_CACHE_HOME to a writable folder; otherwise each run measures again",
            error,
        )
