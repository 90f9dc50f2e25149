"""The cluster of a published run has the run's framework and kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import ConfigError
from shardwright.tools.compare.published_rows import PublishedRun
from shardwright.tools.compare.published_software import COMPOSED_NORMS, cluster_of_run
from tools.compare.test_published_rows import planned, row

BF16 = torch.bfloat16


def cluster(**changes: Any) -> Cluster:
    return cluster_of_run(PublishedRun(**row(**changes)))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "h100"),
        ({"source": "github.com/NVIDIA/dgxc-benchmarking (NeMo 24.12, BF16)"}, "h100_nemo"),
        ({"framework": "torchtitan", "source": "a page on NeMo"}, "h100_torchtitan"),
        ({"source": "https://github.com/pytorch/torchtitan table 1"}, "h100_grand_teton"),
        ({"source": "arXiv:2205.05198 table 5", "hardware": "a100"}, "a100_megatron"),
        ({"source": "arXiv:2104.04473 table 2 ZeRO-3 175B", "hardware": "a100"}, "a100_zero3"),
        ({"framework": "Megatron-LM 0.8"}, "h100_megatron_core"),
        ({"source": "https://github.com/NVIDIA/Megatron-LM README.md"}, "h100_nemo"),
        ({"framework": "MindSpeed-LLM", "hardware": "ascend910b"}, "ascend910b_mindspeed"),
        ({"source": "foundation-model-stack/fms-fsdp README.md"}, "h100_compiled"),
        ({"source": "a page of BigScience", "hardware": "a100"}, "a100_omni_path_bf16"),
        (
            {"source": "a page of BigScience", "hardware": "a100", "dtype": "fp16"},
            "a100_omni_path",
        ),
        # Nobody knows the framework.
        ({"framework": "Minitron"}, "h100"),
    ],
)
def test_a_framework_is_a_variant_of_the_hardware(changes: dict[str, Any], name: str) -> None:
    assert cluster(**changes) == load_cluster(name)


def test_other_hardware_has_what_a_framework_changes_of_an_h100() -> None:
    nemo, gb200, plain = (
        load_cluster("h100_nemo"),
        cluster(framework="NeMo 25.02", hardware="gb200"),
        load_cluster("gb200"),
    )
    assert gb200.software == nemo.software and gb200.levels == plain.levels
    assert gb200.device.overlaps_products and gb200.device.sends_routed_tokens
    assert gb200.device.pointwise_traffic == nemo.device.pointwise_traffic
    # Attention kernels are those of the hardware, unless it computes as fast as an H100.
    assert gb200.device.attention_efficiency == plain.device.attention_efficiency
    h200 = cluster(framework="NeMo 25.02", hardware="h200").device
    assert h200.attention_efficiency == nemo.device.attention_efficiency
    assert h200.memory == load_cluster("h200").device.memory


def test_a_kernel_changes_its_own_figures() -> None:
    first, second, fused = (
        cluster(hardware="a100", kernel=kernel).device for kernel in ("fa1", "fa2", "fa2rms")
    )
    assert first.rate(BF16, (2048,), True) < second.rate(BF16, (2048,), True)
    assert (second.norm_traffic, fused.norm_traffic) == (COMPOSED_NORMS, 1)
    assert fused == load_cluster("a100").device
    # An A800 computes as fast as an A100.
    assert cluster(hardware="a800", kernel="fa2").device.norm_traffic == COMPOSED_NORMS


def test_an_eager_run_of_a_framework_that_compiles_has_separate_operators() -> None:
    eager, compiled = (cluster(framework=name) for name in ("torchtitan, eager", "torchtitan"))
    assert compiled.device.pointwise_traffic < eager.device.pointwise_traffic == 1
    assert eager.device.norm_traffic == COMPOSED_NORMS and eager.levels == compiled.levels


def test_models_of_transformers_compose_norms_and_deepep_sends_tokens_once_to_a_node() -> None:
    assert cluster(framework="transformers 4.40").device.norm_traffic == COMPOSED_NORMS
    sender = cluster(framework="Megatron-Core, DeepEP").device
    assert sender.sends_tokens_once
    assert sender.dispatch_efficiency == load_cluster("h100_automodel").device.dispatch_efficiency
    assert not cluster(framework="Megatron-Core").device.sends_tokens_once


@pytest.mark.parametrize("key", [{"expert_biases": True}, {"hf_config": {"model_type": "gpt_oss"}}])
def test_biases_and_clamps_of_experts_move_more_bytes(key: dict[str, Any]) -> None:
    biased = cluster(framework="NeMo", **key).device
    # The name of a model says nothing.
    plain = cluster(framework="NeMo", model="gpt-oss-20b").device
    assert biased.routing_traffic > 2 * plain.routing_traffic
    assert biased.pointwise_traffic == plain.pointwise_traffic


def test_unknown_hardware_is_refused_with_the_row() -> None:
    with pytest.raises(
        ConfigError, match=r"row tiny: cannot load the cluster `hardware`: cluster 'h300'"
    ):
        cluster(hardware="h300")


def test_only_mixtures_of_experts_of_automodel_keep_gathered_parameters() -> None:
    automodel = {"framework": "NeMo Automodel", "sharded": "parameters"}
    dense = planned(**automodel).candidate.decisions.sharding
    experts = {"family": "mixtral", "experts": 4, "experts_per_token": 2}
    sparse = planned(**automodel, **experts).candidate.decisions.sharding
    assert dense is not None and dense.level == "level3"
    assert sparse is not None and sparse.level == "level1"
