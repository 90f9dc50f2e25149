"""Other names of the keys and values of published runs, as tables of other frameworks use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.core.cost.clusters import built_in_clusters
from shardwright.core.partition.schedules import SCHEDULES

KEYS = {
    **dict.fromkeys(("dp", "data_parallel_size"), "data_parallel"),
    **dict.fromkeys(("dp_shard", "data_parallel_shard_degree"), "shard_size"),
    **dict.fromkeys(("dp_replicate", "data_parallel_replicate_degree"), "copies"),
    **dict.fromkeys(("tp", "tensor_parallel_size"), "tensor_parallel"),
    **dict.fromkeys(("pp", "pipeline_parallel", "pipeline_parallel_size"), "stages"),
    **dict.fromkeys(("cp", "context_parallel_size"), "context_parallel"),
    **dict.fromkeys(("ep", "expert_parallel_size"), "expert_parallel"),
    **dict.fromkeys(("etp", "expert_tensor_parallel_size"), "expert_tensor_parallel"),
    **dict.fromkeys(("vp", "vpp", "virtual_stages"), "chunks"),
    "sp": "sequence_parallel",
    **dict.fromkeys(("mbs", "micro_batch_size"), "micro_batch"),
    **dict.fromkeys(("gbs", "global_batch_size"), "global_batch"),
    **dict.fromkeys(("seq_len", "seq_length", "sequence_length"), "seq"),
    **dict.fromkeys(("gpus", "num_gpus"), "devices"),
    **dict.fromkeys(
        ("tokens_per_second_per_gpu", "tokens_per_sec_per_gpu"), "tokens_per_second_per_device"
    ),
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
}
"""Keys of Megatron Core, NeMo, torchtitan and `transformers`, and those of rows."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "sharded": {
        **dict.fromkeys(("ddp", "zero0", "no_shard", "0"), "none"),
        **dict.fromkeys(("zero1", "distributed_optimizer", "1"), "optimizer"),
        **dict.fromkeys(("zero2", "shard_grad_op", "2"), "gradients"),
        **dict.fromkeys(("zero3", "fsdp", "fsdp2", "full_shard", "3"), "parameters"),
    },
    "recompute": {"false": "none", "true": "full"},
    "schedule": {
        spec.torch_name.removeprefix("Schedule").lower(): name for name, spec in SCHEDULES.items()
    },
}
"""Values of DeepSpeed, FSDP and PyTorch for each key, in lower case and without hyphens."""

NAMES_OF_MODULES = ("nvidia", "amd", "dgx", "hgx", "sxm", "sxm2", "sxm4", "sxm5", "80gb")
"""Words in names of accelerators that do not change their figures."""

ADAPTERS = ("lora", "peft", "adapter", "adapters")
"""Keys of runs that train adapters only."""

LOW_PRECISIONS = ("fp8", "mxfp8", "nvfp4", "fp4", "float8", "int8")
"""Values of `dtype` of runs whose matrix products have fewer bits than their activations."""


def with_names_of_rows(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the keys and values of `PublishedRun` in place of other names.

    Raises:
        ValueError: if a key is given under two names, or the run is of a kind that is not
            predicted: only adapters are trained, or products are in float8.
    """
    renamed: dict[str, Any] = {}
    for key, value in row.items():
        name = KEYS.get(key, key)
        if name in renamed and renamed[name] != value:
            raise ValueError(f"`{name}` has two values, {renamed[name]} and {value}; keep one")
        renamed[name] = _value_of_rows(name, value)
    _divide_replicas(renamed)
    if adapter := next((key for key in ADAPTERS if renamed.get(key)), None):
        raise ValueError(
            f"`{adapter}`: runs that train only adapters are not predicted; remove the row"
        )
    if str(renamed.get("dtype")).lower().startswith(LOW_PRECISIONS):
        raise ValueError(
            f"dtype {renamed['dtype']}: clusters have no rates of such products; remove the row"
        )
    return renamed


def _divide_replicas(row: dict[str, Any]) -> None:
    """Replace the number of copies of sharded state (`dp_replicate`) by the number of replicas that
    share one."""
    copies = row.pop("copies", 1)
    if row.get("shard_size") == -1:
        # In torchtitan, all that are left.
        del row["shard_size"]
    shard_size, replicas = row.get("shard_size"), row.get("data_parallel")
    if isinstance(copies, int) and isinstance(shard_size, int):
        row.setdefault("data_parallel", copies * shard_size)
    elif isinstance(copies, int) and copies > 1 and isinstance(replicas, int):
        if replicas % copies:
            raise ValueError(
                f"`dp_replicate` is {copies}, which does not divide {replicas} replicas"
            )
        row["shard_size"] = replicas // copies


def _value_of_rows(key: str, value: object) -> object:
    if key == "hardware" and isinstance(value, str):
        return _name_of_cluster(value)
    # As text, in which True is not 1.
    return VALUES.get(key, {}).get(str(value).lower().replace("-", ""), value)


def _name_of_cluster(name: str) -> str:
    """Return the cluster of an accelerator such as `NVIDIA A100-SXM4-80GB`; a remark in parentheses
    after the name is dropped."""
    name = name.partition(" (")[0]
    words = name.lower().replace("-", " ").replace("_", " ").split()
    short = "_".join(word for word in words if word not in NAMES_OF_MODULES)
    return short if short in built_in_clusters() else name
