"""Megatron-LM's data, tensor and pipeline parallelism as pinned strategies.

Tensor parallelism shards the first linear layers of attention and MLP by columns (outputs) and the
last linear layers by rows (inputs). Attention and MLP then have one all-reduce each in forward and
in backward (Shoeybi et al., 2019). Sequence parallelism replaces each all-reduce by a
reduce-scatter and an all-gather, and shards norms and residuals along the sequence (Korthikanti et
al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd

from torch import nn

from shardwright.core.constraints.shard import shard
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.partition.schedules import schedule_spec
from shardwright.errors import ConfigError

COLUMN = (
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj"),
    *("q_b_proj", "kv_b_proj"),  # Multi-head latent attention.
)
"""Names of column-parallel linear layers, sharded along their outputs."""

ROW = ("o_proj", "down_proj")
"""Names of row-parallel linear layers, sharded along their inputs."""

NORM = ("input_layernorm", "post_attention_layernorm", "norm")
"""Names of norms, which sequence parallelism shards along the sequence."""


def pin_expert(
    net: nn.Module,
    *,
    data_parallel: int,
    model_parallel: int,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    whole_experts: bool = False,
    seq_parallel: bool = False,
    vocab_emb_dp: bool = False,
) -> None:
    """Pin the Megatron-LM strategies of a language model of `shardwright.models`.

    The mode `sharding_propagation` then derives the strategies of all other operators.

    Args:
        data_parallel: number of shards of the batch.
        model_parallel: number of shards of heads, MLP and vocabulary.
        context_parallel: number of shards of the sequence in all layers; attention gathers keys and
            values.
        expert_parallel: number of shards of the experts; a divisor of `data_parallel` ·
            `context_parallel` · `model_parallel`, taken from the first of them as far as possible,
            then from the next.
        whole_experts: whether to take `expert_parallel` from the last of them first, so that as few
            devices as possible share an expert (Megatron Core's `expert_tensor_parallel_size` 1).
        seq_parallel: whether to shard norms and residuals along the sequence, over the
            `model_parallel` devices too.
        vocab_emb_dp: whether to replicate the embedding table, not shard it along the vocabulary.

    Raises:
        ConfigError: if the model has no row-parallel layers, or a sharded size is not divisible.
    """
    mp = model_parallel
    for path, dimension, size in tensor_parallel_dimensions(net, vocab_emb_dp):
        _check_divisible(path, dimension, size, mp)
    degrees = data_parallel, context_parallel, mp
    from_data, from_context, from_model = (
        reversed(_take_factors(expert_parallel, reversed(degrees)))
        if whole_experts
        else _take_factors(expert_parallel, degrees)
    )
    if from_data * from_context * from_model != expert_parallel:
        raise ConfigError(
            f"expert_parallel {expert_parallel} does not divide data_parallel {data_parallel} ·"
            f" context_parallel {context_parallel} · model_parallel {mp}\n"
            f"use a divisor of {data_parallel * context_parallel * mp}"
        )
    layout = Layout((data_parallel, context_parallel, mp), ("dp", "cp", "mp"))
    # The experts' own device matrix, in which expert parallelism takes parts of the other three.
    expert_matrix = (
        *(data_parallel // from_data, from_data),
        *(context_parallel // from_context, from_context),
        *(from_model, mp // from_model),
    )
    expert_layout = Layout(expert_matrix, ("dp", "ep", "cp", "ep_cp", "ep_mp", "mp"))
    sequence = ("cp", "mp") if seq_parallel else "cp"
    # The layout of the residual stream.
    output = layout("dp", sequence, "None")
    has_row_layers = False
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        if name in COLUMN:
            shard(
                # Weights of linear layers are `[outputs, inputs]`.
                _unwrap_lora_linear(module),
                (_choose_column_input_layout(net, path, layout), layout("mp", "None")),
            )
        elif name in ROW:
            # The partial sums of a row-parallel layer are reduced into the layout of the residual.
            shard(
                _unwrap_lora_linear(module),
                (layout("dp", "cp", "mp"), layout("None", "mp")),
                (output,),
            )
            has_row_layers = True
        elif _has_expert_weights(module):
            shard(module, _list_expert_layouts(module, expert_layout))
        elif name in NORM and isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            # Norms of other classes are composed of several operators, whose strategies propagate.
            shard(module, (output, *(None for _ in module.parameters())))
        elif isinstance(module, nn.Embedding) and name == "embed_tokens":
            if vocab_emb_dp:
                shard(module, (layout("None", "None"), layout("dp", sequence)))
                continue
            # Each device looks up the tokens in its part of the vocabulary; the results are summed.
            shard(module, (layout("mp", "None"), layout("dp", "cp")), (output,))
        elif isinstance(module, nn.Linear) and name == "lm_head":
            # Logits stay sharded along the vocabulary, also in the loss.
            shard(module, (layout("dp", "cp", "None"), layout("mp", "None")))
    if not has_row_layers:
        raise ConfigError(
            f"{type(net).__name__} has no layers named {' or '.join(ROW)}, by which row-parallel"
            " layers are found\nname its layers as in `shardwright.models`, or let a search plan it"
        )


def _take_factors(number: int, degrees: Iterable[int]) -> list[int]:
    """Return for each degree the largest common divisor with what the degrees before it leave of
    `number`."""
    factors = []
    for degree in degrees:
        factors.append(gcd(number, degree))
        number //= factors[-1]
    return factors


def _has_expert_weights(module: nn.Module) -> bool:
    """Whether `module` stores the weights of all experts in its own parameters."""
    up = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
    return isinstance(up, nn.Parameter)


def _list_expert_layouts(module: nn.Module, layout: Layout) -> tuple[TensorLayout | None, ...]:
    """Return the layouts of an expert layer's inputs, then of its parameters.

    The inputs are tokens, expert ids and routing weights; the parameters are the projections, then
    the biases. None leaves a layout to sharding propagation.
    """
    # Gate and up projections share a dimension: (2, width) if concatenated, (width, 2) if
    # interleaved. Only the width is sharded.
    width_dimensions = (
        ("None", "mp") if getattr(module, "is_concatenated", True) else ("mp", "None")
    )
    experts = ("ep", "ep_cp", "ep_mp")
    projections = layout(experts, *width_dimensions, "None"), layout(experts, "None", "mp")
    biases = layout(experts, *width_dimensions), layout(experts, "None")
    has_biases = getattr(module, "has_bias", False)
    # The strategies of routing follow from those of the tokens.
    return layout("dp", "cp", "None"), None, None, *projections, *(biases if has_biases else ())


def _choose_column_input_layout(net: nn.Module, path: str, layout: Layout) -> TensorLayout:
    """Return the layout of the input of a column-parallel layer."""
    if path.endswith("query_layer.self_attn.q_proj"):
        # The queries of PanguAlpha's query layer are shared by all samples: no batch dimension.
        return layout("cp", "None")
    parent, _, name = path.rpartition(".")
    if name == "kv_b_proj" and hasattr(net.get_submodule(parent), "expand_kv"):
        # The latent is stored with a head dimension of size 1, as in the KV cache.
        return layout("dp", "None", "cp", "None")
    return layout("dp", "cp", "None")


def tensor_parallel_dimensions(
    net: nn.Module, vocab_emb_dp: bool = False
) -> Iterator[tuple[str, str, int]]:
    """Find the dimensions that `pin_expert` shards over `model_parallel` devices.

    Yields:
        (path of the layer, name of the dimension, size of the dimension); `model_parallel` must
        divide the size.
    """
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        if name in COLUMN:
            yield path, "outputs", _unwrap_lora_linear(module).weight.shape[0]
        elif name in ROW:
            yield path, "inputs", _unwrap_lora_linear(module).weight.shape[1]
        elif isinstance(module, nn.Embedding) and name == "embed_tokens" and not vocab_emb_dp:
            yield path, "entries", module.num_embeddings
        elif isinstance(module, nn.Linear) and name == "lm_head":
            yield path, "outputs", module.out_features


def expert_stages(
    net: nn.Module,
    stages: int,
    layers: Sequence[int] | None = None,
    chunks: int = 1,
    schedule: str = "1f1b",
    blocks: Sequence[str] = (),
) -> dict[str, int]:
    """Return the pipeline stage of each block, embedding and final layer, by module path.

    Embeddings belong to the first stage, the final norm and the head to the last.

    Args:
        stages: number of pipeline stages.
        layers: number of blocks in each stage, or in each chunk; by default the same number in
            all.
        chunks: number of chunks of each stage.
        schedule: name of the pipeline schedule, which decides the stage of each chunk.
        blocks: paths of the blocks, if `net` does not have all of them; by default those of `net`.

    Raises:
        ConfigError: if there are fewer blocks than stages, or `layers` does not add up to the
            number of blocks.
    """
    blocks, num_chunks = blocks or list(paths_of_blocks(net)), stages * chunks
    if layers is not None and (len(layers) != num_chunks or sum(layers) != len(blocks)):
        raise ConfigError(
            f"layers {list(layers)} do not assign {len(blocks)} blocks to {num_chunks} stages\n"
            f"use {num_chunks} numbers that add up to {len(blocks)}"
        )
    if len(blocks) < num_chunks:
        raise ConfigError(
            f"pipeline_stage: {len(blocks)} layers cannot fill {num_chunks} stages\nuse at most"
            f" {len(blocks)}"
        )
    # Sizes of chunks differ by at most one block.
    chunk_of_block = [index * num_chunks // len(blocks) for index in range(len(blocks))]
    if layers is not None:
        chunk_of_block = [chunk for chunk, count in enumerate(layers) for _ in range(count)]
    # V-shaped schedules assign chunks to stages in another order.
    stage_of_chunk = [
        schedule_spec(schedule).stage_of(chunk, stages) for chunk in range(num_chunks)
    ]
    stage_of = {
        path: stage_of_chunk[chunk] for path, chunk in zip(blocks, chunk_of_block, strict=True)
    }
    # PanguAlpha's query layer, the last block, reads `embed_queries`.
    last_stage = dict.fromkeys(("norm", "lm_head", "embed_queries"), stage_of_chunk[-1])
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        # Norms inside of a block belong to its stage.
        in_block = any(path.startswith(f"{block}.") for block in blocks)
        if not in_block and name in last_stage:
            stage_of[path] = last_stage[name]
        elif not in_block and name.startswith("embed_") and isinstance(module, nn.Embedding):
            stage_of[path] = 0
    return stage_of


def paths_of_blocks(net: nn.Module) -> Iterator[str]:
    """Yield the paths of the transformer blocks, in order."""
    for path, module in net.named_modules():
        if hasattr(module, "self_attn") and hasattr(module, "mlp"):
            yield path


def _unwrap_lora_linear(module: nn.Module) -> nn.Linear:
    """Return the linear layer itself, without a LoRA wrapper of `peft`."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Linear)
    return base


def _check_divisible(path: str, dimension: str, size: int, model_parallel: int) -> None:
    if size % model_parallel:
        raise ConfigError(
            f"{path}: {size} {dimension} are not divisible by model_parallel {model_parallel}\n"
            f"use one of {', '.join(str(n) for n in range(1, 65) if size % n == 0)}"
        )
