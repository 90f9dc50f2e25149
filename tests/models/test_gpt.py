"""GPT."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from shardwright.errors import ConfigError
from shardwright.models import MODELS, Dimensions, build, example_batch

SIZES = Dimensions(**{**vars(MODELS["pangualpha_2_6b_tiny"]), "family": "gpt"})


def test_gpt_computes_the_loss_of_gpt2() -> None:
    net = build(SIZES).double()
    config = GPT2Config(
        vocab_size=SIZES.vocab_size,
        n_positions=SIZES.seq_length,
        n_embd=SIZES.hidden_size,
        n_layer=SIZES.num_layers,
        n_head=SIZES.num_heads,
        n_inner=SIZES.intermediate_size,
        activation_function="gelu",
        layer_norm_epsilon=SIZES.norm_eps,
    )
    reference = GPT2LMHeadModel(config).double().eval()
    state = {
        "wte": net.model.embed_tokens,
        "wpe": net.model.embed_positions,
        "ln_f": net.model.norm,
    }
    for number, block in enumerate(net.model.layers):
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        state |= {
            f"h.{number}.ln_1": block.input_layernorm,
            f"h.{number}.ln_2": block.post_attention_layernorm,
        }
        layer = reference.transformer.h[number]
        for theirs, linears in (
            (layer.attn.c_attn, projections),
            (layer.attn.c_proj, (attention.o_proj,)),
            (layer.mlp.c_fc, (mlp.up_proj,)),
            (layer.mlp.c_proj, (mlp.down_proj,)),
        ):
            theirs.weight.data = torch.cat([linear.weight.data.T for linear in linears], dim=1)
            theirs.bias.data = torch.cat([linear.bias.data for linear in linears])
    for path, module in state.items():
        reference.transformer.get_submodule(path).load_state_dict(module.state_dict())
    ids, labels = example_batch(SIZES, 2, 16)
    # The reference computes its loss in single precision.
    torch.testing.assert_close(net(ids, labels).float(), reference(ids, labels=labels).loss)


def test_more_positions_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"65 positions, but the model only has 64"):
        build(SIZES)(*example_batch(SIZES, 1, 65))
