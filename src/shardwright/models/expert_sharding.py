"""The configuration that an expert would write by hand: data × tensor × pipeline parallel.

Tensor parallel cuts the first linear layers of attention and MLP along their outputs and the last
ones along their inputs, so that each block has one all-reduce forward and one backward in each of
its two halves (Shoeybi et al., Megatron-LM, 2019); sequence parallel makes of each a reduce-scatter
and an all-gather, and cuts norms and residuals along the sequence (Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwright.constraints.shard import shard
from shardwright.errors import ConfigError
from shardwright.layout.layout import Layout

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
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
    seq_parallel: bool = False,
    vocab_emb_dp: bool = False,
) -> None:
    """Pins a language model of `shardwright.models` as an expert would; plan it with
    `sharding_propagation`, which lets all other operators follow.

    Args:
        data_parallel: equal parts of the batch.
        model_parallel: equal parts of heads, MLP and vocabulary.
        context_parallel: equal parts of the sequence, in all layers; attention gathers keys and
            values.
        seq_parallel: cut norms and residuals along the sequence, in `model_parallel` times as many
            parts.
        vocab_emb_dp: keep the embedding table whole, rather than cut along the vocabulary.

    Raises:
        ConfigError: if the model has none of the layers, or they cannot be cut in so many parts.
    """
    mp = model_parallel
    for path, what, size in cut_by_model_parallel(net, vocab_emb_dp):
        _check(path, what, size, mp)
    lay = Layout((data_parallel, context_parallel, mp), ("dp", "cp", "mp"))
    sequence = ("cp", "mp") if seq_parallel else "cp"
    left = lay("dp", sequence, "None")
    found = False
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        if name in COLUMN:
            # The top query layer asks for all samples alike: its queries have no batch.
            same_for_all = path.endswith("query_layer.self_attn.q_proj")
            read = lay("cp", "None") if same_for_all else lay("dp", "cp", "None")
            shard(_linear(module), (read, lay("mp", "None")))
        elif name in ROW:
            shard(_linear(module), (lay("dp", "cp", "mp"), lay("None", "mp")), (left,))
            found = True
        elif name in NORM:
            shard(module, (left, *(None for _ in module.parameters())))
        elif isinstance(module, nn.Embedding) and name == "embed_tokens":
            if vocab_emb_dp:
                shard(module, (lay("None", "None"), lay("dp", sequence)))
                continue
            shard(module, (lay("mp", "None"), lay("dp", "cp")), (left,))
        elif isinstance(module, nn.Linear) and name == "lm_head":
            shard(module, (lay("dp", "cp", "None"), lay("mp", "None")))
    if not found:
        raise ConfigError(
            f"{type(net).__name__} has no layers {', '.join(ROW)}, so there is no expert's"
            " configuration for it"
        )


def cut_by_model_parallel(
    net: nn.Module, vocab_emb_dp: bool = False
) -> Iterator[tuple[str, str, int]]:
    """The layers that `pin_expert` cuts: the path of each, what of it is cut, and its size, which
    model parallel must divide."""
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


def expert_stages(net: nn.Module, stages: int) -> dict[str, int]:
    """Stages by module name: equally many blocks each, the embeddings with the first, what follows
    the blocks with the last.

    Raises:
        ConfigError: fewer blocks than stages.
    """
    blocks = list(paths_of_blocks(net))
    if len(blocks) < stages:
        raise ConfigError(
            f"pipeline_stage: {len(blocks)} layers cannot be divided into {stages} stages; valid is"
            f" at most {len(blocks)}"
        )
    found = {path: number * stages // len(blocks) for number, path in enumerate(blocks)}
    ends = {"norm": stages - 1, "lm_head": stages - 1, "embed_queries": stages - 1}
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        inside = any(path.startswith(f"{block}.") for block in blocks)
        if not inside and name in ends:
            found[path] = ends[name]
        elif not inside and name.startswith("embed_") and isinstance(module, nn.Embedding):
            found[path] = 0
    return found


def paths_of_blocks(net: nn.Module) -> Iterator[str]:
    """Paths of the transformer blocks, in their order."""
    for path, module in net.named_modules():
        if hasattr(module, "self_attn") and hasattr(module, "mlp"):
            yield path


def _linear(module: nn.Module) -> nn.Linear:
    """The linear layer itself, where adapters are around it."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Linear)
    return base


def _check(path: str, what: str, size: int, parts: int) -> None:
    if size % parts:
        raise ConfigError(
            f"{path}: model_parallel {parts} does not divide its {size} {what}; valid are"
            f" {', '.join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 64)}"
        )
