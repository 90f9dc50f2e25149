"""LLaMA 2 and Qwen, on the decoders of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.models.attention import Attention, register_with_transformers
from shardwright.models.loss import next_token_loss
from shardwright.models.sizes import Dimensions


class Decoder(nn.Module):
    """A decoder of `transformers` with its head and loss.

    Parameters have the same names as in `transformers`, so its checkpoints can be loaded.

    Args:
        model: from `input_ids` to hidden states.
        lm_head: from hidden states to logits.
    """

    def __init__(self, model: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean next-token loss; both arguments are `[batch, positions]`."""
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return next_token_loss(self.lm_head(hidden), labels)


def llama(sizes: Dimensions, attention: Attention) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _decoder(LlamaForCausalLM, LlamaConfig(**_arguments(sizes, attention)), sizes)


def qwen(sizes: Dimensions, attention: Attention) -> nn.Module:
    """Qwen 1, built as the Qwen 2 of `transformers` without grouped-query attention.

    Only the query, key and value projections have biases. Qwen 1 stores these three as one tensor.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _decoder(Qwen2ForCausalLM, Qwen2Config(**_arguments(sizes, attention)), sizes)


def _arguments(sizes: Dimensions, attention: Attention) -> dict[str, Any]:
    return {
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "intermediate_size": sizes.intermediate_size,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.seq_length,
        "rms_norm_eps": sizes.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_base},
        "tie_word_embeddings": False,
        "attn_implementation": register_with_transformers(attention),
    }


def _decoder(kind: Any, config: Any, sizes: Dimensions) -> Decoder:
    hf_model = kind(config)
    _fuse_norms(hf_model, sizes)
    return Decoder(hf_model.model, hf_model.lm_head)


def _fuse_norms(net: nn.Module, sizes: Dimensions) -> None:
    """Replaces RMSNorm, which `transformers` composes of eight operators, by a fused one, for which
    autograd saves one tensor instead of five."""
    norms = [name for name, module in net.named_modules() if _is_rms_norm(module)]
    for name in norms:
        owner, _, attribute = name.rpartition(".")
        weight: torch.Tensor = net.get_parameter(f"{name}.weight")
        with torch.device("meta"):
            norm = nn.RMSNorm(weight.shape[0], sizes.norm_eps)
        norm.weight = nn.Parameter(weight)
        setattr(net.get_submodule(owner), attribute, norm)


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")
