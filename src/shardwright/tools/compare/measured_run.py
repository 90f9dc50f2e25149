"""Throughput of a published run, and its share of the peak of the cluster."""

from __future__ import annotations

from typing import Protocol

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import ConfigError
from shardwright.models import Dimensions


class MeasuredRun(Protocol):
    """A published run with measured throughput."""

    @property
    def id(self) -> str: ...

    @property
    def source(self) -> str:
        """Title or id of the publication."""

    @property
    def hardware(self) -> str:
        """Name of the cluster on which the run was measured."""

    @property
    def devices(self) -> int: ...

    @property
    def tokens_per_second_per_device(self) -> float: ...

    @property
    def memory_gib(self) -> float | None:
        """Peak memory of a device in GiB; None if not published."""

    @property
    def seconds(self) -> float:
        """Measured seconds of a training step."""

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """Return the MFU of a step of `seconds` seconds; see `model_flops_utilization`."""


def cluster_of(run: MeasuredRun) -> Cluster:
    """Load the cluster of a run. Raises ConfigError if `hardware` is not a cluster."""
    try:
        return load_cluster(run.hardware)
    except ConfigError as error:
        raise ConfigError(
            f"row {run.id}: cannot load the cluster `hardware`: {error}\n"
            "set `hardware` to the name of a built-in cluster, such as h100"
        ) from None


def check_below_peak(run: MeasuredRun, cluster: Cluster) -> None:
    """Raise ConfigError if a run's measured throughput exceeds the peak FLOPs of its cluster."""
    utilization = run.utilization(cluster, run.seconds)
    if utilization > 1:
        raise ConfigError(
            f"row {run.id}: {run.tokens_per_second_per_device:g} tokens per second and device are"
            f" {utilization:.0%} of the peak of {cluster.name}\ncheck the units and `hardware`"
        )


def model_flops_utilization(sizes: Dimensions, tokens: float, rate: float) -> float:
    """Return the model FLOPs utilization (MFU), as in PaLM (Chowdhery et al., 2022, appendix B).

    A token takes 6 FLOPs per weight, plus 12 · layers · hidden · seq for attention. Counts
    attention as if it were not causal, and only the experts that process the token; does not count
    recomputation.

    Args:
        tokens: tokens per second and device.
        rate: peak FLOPs per second of a device.
    """
    # Gated feed-forward layers have three matrices.
    linears = 2 if sizes.family in ("gpt", "pangualpha") else 3
    hidden, layers = sizes.hidden_size, sizes.num_layers
    # Queries and output projection, and keys and values of grouped-query attention.
    width = sizes.num_heads * sizes.head_size
    attention = (2 + 2 * sizes.num_kv_heads / sizes.num_heads) * width
    feed_forward = linears * sizes.intermediate_size * sizes.experts_per_token
    # The output layer counts; the embedding is a look-up without products.
    weights = layers * hidden * (attention + feed_forward) + sizes.vocab_size * hidden
    return tokens * (6 * weights + 12 * layers * width * sizes.seq_length) / rate
