"""Select the framework variant of a cluster and the kernel figures for a published run.

The selection uses only names in the row, never its measured throughput: the row names its kernel,
and the row or its source names the framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.clusters import built_in, load_cluster
from shardwright.errors import ConfigError
from shardwright.tools.compare.published_rows import PublishedRun

FRAMEWORKS = {
    "megatron-bridge": "nemo",
    "dgxc-benchmarking": "nemo",
    "megatron-core": "nemo",
    "megatron core": "nemo",
    "transformer engine": "nemo",
    "nemo": "nemo",
    "llm-foundry": "llm_foundry",
    "torchtitan": "compiled",
    "bigscience": "omni_path",
    "megatron-deepspeed": "omni_path",
    "aleph-alpha": "hdr",
    "2311.05610": "hdr",
}
"""Cluster name suffix of each framework, by a word in the row's `framework` or `source`."""

COMPOSED_NORMS = 14.0
"""`norm_traffic` of norms without a fused kernel: memory traffic relative to the fused kernel.

For each bfloat16 element, float32 operators (cast, square, mean, product, cast, product with the
weight) move 34 bytes in the forward pass and 106 in the backward pass; a fused kernel, 4 and 6."""

KERNELS: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "torch": {"a100": {"norm_traffic": COMPOSED_NORMS}},
    "fused": {"a100": {"norm_traffic": COMPOSED_NORMS}},
    "fa1": {
        "a100": {
            "norm_traffic": COMPOSED_NORMS,
            "attention_efficiency": 0.302,
            "attention_half": 0.0,
        },
        "h100": {"attention_efficiency": 0.171, "attention_half": 0.0},
    },
    "fa2": {
        "a100": {"norm_traffic": COMPOSED_NORMS},
        "h100": {"attention_efficiency": 0.365, "attention_half": 256.0},
    },
    "fa2rms": {"h100": {"attention_efficiency": 0.365, "attention_half": 256.0}},
}
"""Device figures that replace those of the cluster, by `kernel` or `attention` and by hardware.

Kernels: attention of PyTorch (`torch`) and with Megatron-LM's softmax (`fused`), FlashAttention 1
and 2, and 2 with a fused RMSNorm (`fa2rms`), as Hagemann et al. (arXiv:2311.05610) name them."""


def cluster_of_run(run: PublishedRun) -> Cluster:
    """Load the cluster of a published run, with the figures of the run's training framework and
    attention kernel.

    Raises:
        ConfigError: if the row's `hardware` is not the name of a cluster.
    """
    try:
        cluster = load_cluster(_cluster_name_with_framework(run))
    except ConfigError as error:
        raise ConfigError(
            f"row {run.id}: cannot load the cluster `hardware`: {error}\n"
            "set `hardware` to the name of a built-in cluster, such as h100"
        ) from None
    for name in (run.kernel, run.attention):
        figures = KERNELS.get(name or "", {}).get(run.hardware, {})
        cluster = replace(cluster, device=replace(cluster.device, **figures))  # type: ignore[arg-type]
    return cluster


def _cluster_name_with_framework(run: PublishedRun) -> str:
    for label in filter(None, (run.framework, run.source)):
        for word, suffix in FRAMEWORKS.items():
            if word in label.lower() and f"{run.hardware}_{suffix}" in built_in():
                return f"{run.hardware}_{suffix}"
    return run.hardware
