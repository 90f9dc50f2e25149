"""The strategy that an expert would write by hand: data × tensor × pipeline parallelism.

Tensor parallelism cuts the first linear layers of attention and MLP along their outputs and the
last ones along their inputs, so that each half of a block has one all-reduce forward and one
backward (Shoeybi et al., Megatron-LM, 2019). Sequence parallelism replaces each all-reduce by a
reduce-scatter and an all-gather, and cuts norms and residuals along the sequence (Korthikanti et
al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from shardwright.core.constraints.shard import shard
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.errors import ConfigError

COLUMN = (
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj"),
    *("q_b_proj", "kv_b_proj"),  # Of latent attention.
)
"""Linear layers that are cut along their outputs."""

ROW = ("o_proj", "down_proj")
"""Linear layers that are cut along their inputs."""

NORM = ("input_layernorm", "post_attention_layernorm", "norm")


def pin_expert(
    net: nn.Module,
    *,
    data_parallel: int,
    model_parallel: int,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    seq_parallel: bool = False,
    vocab_emb_dp: bool = False,
) -> None:
    """Pins a language model of `shardwright.models` as an expert would.

    Plan it with `sharding_propagation`, which derives the strategies of all other operators.

    Args:
        data_parallel: number of shards of the batch.
        model_parallel: number of shards of heads, MLP and vocabulary.
        context_parallel: number of shards of the sequence in all layers; attention gathers keys and
            values.
        expert_parallel: number of shards of the experts, over devices that share the batch.
        seq_parallel: cut norms and residuals along the sequence into `model_parallel` times as many
            shards.
        vocab_emb_dp: replicate the embedding table instead of cutting it along the vocabulary.

    Raises:
        ConfigError: if the model has no such layers, or their sizes are not divisible.
    """
    mp = model_parallel
    for path, dimension, size in cut_by_model_parallel(net, vocab_emb_dp):
        _check(path, dimension, size, mp)
    if data_parallel % expert_parallel:
        raise ConfigError(
            f"expert_parallel {expert_parallel} must divide data_parallel {data_parallel}"
        )
    lay = Layout((data_parallel, context_parallel, mp), ("dp", "cp", "mp"))
    split = (data_parallel // expert_parallel, expert_parallel, context_parallel, mp)
    experts = Layout(split, ("dp", "ep", "cp", "mp"))
    sequence = ("cp", "mp") if seq_parallel else "cp"
    output = lay("dp", sequence, "None")
    has_row_layers = False
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        if name in COLUMN:
            shard(_linear(module), (_read(net, path, lay), lay("mp", "None")))
        elif name in ROW:
            shard(_linear(module), (lay("dp", "cp", "mp"), lay("None", "mp")), (output,))
            has_row_layers = True
        elif _holds_experts(module):
            shard(module, _of_experts(module, experts))
        elif name in NORM and isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            # Others are composed of several operators, which follow their neighbors.
            shard(module, (output, *(None for _ in module.parameters())))
        elif isinstance(module, nn.Embedding) and name == "embed_tokens":
            if vocab_emb_dp:
                shard(module, (lay("None", "None"), lay("dp", sequence)))
                continue
            shard(module, (lay("mp", "None"), lay("dp", "cp")), (output,))
        elif isinstance(module, nn.Linear) and name == "lm_head":
            shard(module, (lay("dp", "cp", "None"), lay("mp", "None")))
    if not has_row_layers:
        raise ConfigError(
            f"{type(net).__name__} has no layers named {' or '.join(ROW)}, so there is no expert"
            " strategy for it"
        )


def _holds_experts(module: nn.Module) -> bool:
    """Whether its projections are parameters: with gates, or without."""
    up = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
    return isinstance(up, nn.Parameter)


def _of_experts(module: nn.Module, lay: Layout) -> tuple[TensorLayout | None, ...]:
    """Of tokens, choices, weights, both projections, and biases where there are any."""
    inner = ("None", "mp") if getattr(module, "is_concatenated", True) else ("mp", "None")
    projections = lay("ep", *inner, "None"), lay("ep", "None", "mp")
    biases = lay("ep", *inner), lay("ep", "None")
    has_biases = getattr(module, "has_bias", False)
    return lay("dp", "cp", "None"), None, None, *projections, *(biases if has_biases else ())


def _read(net: nn.Module, path: str, lay: Layout) -> TensorLayout:
    """What a layer that is cut along its outputs reads."""
    if path.endswith("query_layer.self_attn.q_proj"):
        # The queries of PanguAlpha's query layer are shared by all samples: no batch dimension.
        return lay("cp", "None")
    parent, _, name = path.rpartition(".")
    if name == "kv_b_proj" and hasattr(net.get_submodule(parent), "expand_kv"):
        # Latents are those of a single head, as caches keep them.
        return lay("dp", "None", "cp", "None")
    return lay("dp", "cp", "None")


def cut_by_model_parallel(
    net: nn.Module, vocab_emb_dp: bool = False
) -> Iterator[tuple[str, str, int]]:
    """The layers that `pin_expert` cuts by `model_parallel`, which must divide the sizes.

    Returns:
        For each layer its path, the name of the dimension that is cut, and its size.
    """
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        if name in COLUMN:
            yield path, "outputs", _linear(module).weight.shape[0]
        elif name in ROW:
            yield path, "inputs", _linear(module).weight.shape[1]
        elif isinstance(module, nn.Embedding) and name == "embed_tokens" and not vocab_emb_dp:
            yield path, "entries", module.num_embeddings
        elif isinstance(module, nn.Linear) and name == "lm_head":
            yield path, "outputs", module.out_features


def expert_stages(
    net: nn.Module, stages: int, layers: Sequence[int] | None = None
) -> dict[str, int]:
    """By module name the stage: each takes as many blocks as `layers` says, or all equally many;
    the embeddings belong to the first stage, and all that follows the blocks to the last.

    Raises:
        ConfigError: if there are fewer blocks than stages, or not as many as `layers` says.
    """
    blocks = list(paths_of_blocks(net))
    if layers is not None and (len(layers) != stages or sum(layers) != len(blocks)):
        raise ConfigError(
            f"layers {list(layers)} must be {stages} numbers, for the stages, that add up to"
            f" {len(blocks)}, the layers"
        )
    if len(blocks) < stages:
        raise ConfigError(
            f"pipeline_stage: {len(blocks)} layers cannot fill {stages} stages; use at most"
            f" {len(blocks)}"
        )
    of_block = [number * stages // len(blocks) for number in range(len(blocks))]
    if layers is not None:
        of_block = [stage for stage, number in enumerate(layers) for _ in range(number)]
    stage_of = dict(zip(blocks, of_block, strict=True))
    ends = {"norm": stages - 1, "lm_head": stages - 1, "embed_queries": stages - 1}
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        inside = any(path.startswith(f"{block}.") for block in blocks)
        if not inside and name in ends:
            stage_of[path] = ends[name]
        elif not inside and name.startswith("embed_") and isinstance(module, nn.Embedding):
            stage_of[path] = 0
    return stage_of


def paths_of_blocks(net: nn.Module) -> Iterator[str]:
    """The paths of the transformer blocks, in order."""
    for path, module in net.named_modules():
        if hasattr(module, "self_attn") and hasattr(module, "mlp"):
            yield path


def _linear(module: nn.Module) -> nn.Linear:
    """The linear layer itself, without an adapter around it."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Linear)
    return base


def _check(path: str, dimension: str, size: int, model_parallel: int) -> None:
    if size % model_parallel:
        raise ConfigError(
            f"{path}: its {size} {dimension} are not divisible by model_parallel {model_parallel};"
            " valid are"
            f" {', '.join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 64)}"
        )
