"""Weights of a model without adapters, read into one that has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.checkpoint.position import Position
from shardwright.errors import CheckpointError
from shardwright.models import LoRA, PrefixTuning, build
from shardwright.run.loop.weights import load_weights


def tiny(seed: int, lora: LoRA | None = None) -> nn.Module:
    torch.manual_seed(seed)
    return build("llama2_7b_tiny", num_layers=1, lora=lora)


ADAPTERS = LoRA(("q_proj", "v_proj"), rank=2)


def written(net: nn.Module, path: Path) -> Path:
    """As a file of one device, or as a folder of checkpoints."""
    if path.suffix:
        sw.save_state_dict(net, path)
    else:
        sw.save_checkpoint(path, net, position=Position(step=1, epoch=0, batch=1))
    return path


def layer(net: nn.Module, name: str) -> Tensor:
    return net.state_dict()[f"model.layers.0.self_attn.q_proj.{name}"]


@pytest.mark.parametrize("name", ["base.safetensors", "base.pt", "checkpoints"])
def test_layers_are_read_under_their_adapters_which_stay_as_they_are(
    tmp_path: Path, name: str
) -> None:
    base, net = tiny(1), tiny(2, ADAPTERS)
    fresh = layer(net, "lora_A.default.weight").clone()
    load_weights(net, written(base, tmp_path / name))
    assert torch.equal(layer(net, "base_layer.weight"), layer(base, "weight"))
    assert torch.equal(net.state_dict()["lm_head.weight"], base.state_dict()["lm_head.weight"])
    assert torch.equal(layer(net, "lora_A.default.weight"), fresh)


def test_weights_are_read_beside_new_prefixes_and_with_old_ones(tmp_path: Path) -> None:
    def tuned(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build("llama2_7b_tiny", num_layers=1, prefix=PrefixTuning(4, projection=8))

    base, net, other = tiny(1), tuned(2), tuned(3)
    fresh = net.state_dict()["prefix_tuning.embedding"].clone()
    load_weights(net, written(base, tmp_path / "base.pt"))
    assert torch.equal(layer(net, "weight"), layer(base, "weight"))
    assert torch.equal(net.state_dict()["prefix_tuning.embedding"], fresh)
    load_weights(other, written(net, tmp_path / "tuned.pt"))
    assert all(torch.equal(other.state_dict()[n], value) for n, value in net.state_dict().items())


def test_the_names_that_peft_writes_are_read_with_their_adapters(tmp_path: Path) -> None:
    given, net = tiny(1, ADAPTERS), tiny(2, ADAPTERS)
    state = {
        f"base_model.model.{name.replace('.default', '')}": value
        for name, value in given.state_dict().items()
    }
    torch.save(state, tmp_path / "all.pt")
    load_weights(net, tmp_path / "all.pt")
    for name, value in given.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("net", "change", "message"),
    [
        (
            LoRA(("q_proj",)),
            "-model.norm.weight",
            "the model has 'model.norm.weight', the checkpoint does not",
        ),
        (LoRA(("q_proj",)), "+model.more", "the checkpoint has 'model.more', the model does not"),
        (
            LoRA(("q_proj",)),
            "+model.layers.0.self_attn.q_proj.lora_A.weight",
            "the model has 'model.layers.0.self_attn.q_proj.lora_B.default.weight'",
        ),
        (
            None,
            "+model.layers.0.self_attn.q_proj.lora_A.default.weight",
            "lora_A.default.weight', the model does not",
        ),
    ],
)
def test_names_that_are_missing_or_not_known_are_an_error(
    tmp_path: Path, net: LoRA | None, change: str, message: str
) -> None:
    state = tiny(1).state_dict()
    if change[0] == "-":
        del state[change[1:]]
    else:
        state[change[1:]] = torch.zeros(16, 64)
    torch.save(state, tmp_path / "base.pt")
    with pytest.raises(
        CheckpointError, match=f"base.pt belongs to another model: .*{re.escape(message)}"
    ):
        load_weights(tiny(2, net), tmp_path / "base.pt")


def test_a_run_does_not_go_on_with_adapters_that_were_not_saved(tmp_path: Path) -> None:
    written(tiny(1), tmp_path / "checkpoints")
    net = tiny(2, ADAPTERS)
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(CheckpointError, match=r"the model has .model.*lora_A"):
        sw.load_checkpoint(tmp_path / "checkpoints", net, optimizer)
