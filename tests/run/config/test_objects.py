"""Models, data and optimizers that configurations describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.core.cost.optimizer_state import OPTIMIZERS
from shardwright.errors import ConfigError, DataError
from shardwright.models import MODELS
from shardwright.run.config import Run, parse
from shardwright.run.config.objects import (
    build_model,
    build_optimizer,
    build_schedule,
    load_samples,
    mark_recomputed,
)
from shardwright.run.config.schema import (
    DataSection,
    ModelSection,
    OptimizerSection,
    RecomputeSection,
)
from shardwright.run.loop.lr_schedule import LRSchedule

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 320}


@pytest.mark.parametrize(
    "given",
    [
        {"name": "llama2_7b_tiny", "arguments": {"num_layers": 1}},
        {"sizes": {**vars(MODELS["qwen_7b_tiny"]), "num_layers": 1}},
        {"hf": GPT2},
        {"hf": "model/config.json"},
    ],
    ids=["name", "sizes", "hf", "file"],
)
def test_a_language_model_is_given_by_name_sizes_or_configuration(
    given: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(GPT2))
    net = build_model(ModelSection(**given), tmp_path, torch.float64)
    ids = torch.randint(0, 320, (2, 8))
    assert net(ids, ids).shape == ()
    assert next(net.parameters()).dtype == torch.float64


def test_adapters_are_added_as_described() -> None:
    model = ModelSection.model_validate({"name": "llama2_7b_tiny", "lora": {"rank": 2}})
    net = build_model(model, Path(), torch.float32)
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 4 * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "llama9"}, "unknown model 'llama9'\nuse one of llama2_7b"),
        ({"name": "llama2_7b_tiny", "arguments": {"layers": 3}}, "model.arguments: .*'layers'"),
        ({"sizes": {"family": "llama"}}, "model.sizes: .*missing"),
        ({"hf": "nowhere"}, "no such file or folder: .*nowhere"),
    ],
)
def test_a_model_that_cannot_be_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(ModelSection(**given), Path(), torch.float32)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "model: {}",
            "model: `model` has no source; set exactly one of the keys `target`, `name`, `sizes`,"
            " `hf`",
        ),
        (
            "model: {name: a, hf: b}",
            "model: `model` has `name` and `hf`; set exactly one of the keys `target`, `name`,"
            " `sizes`, `hf`",
        ),
        (
            "model: {target: 'a:b', lora: {}}",
            "model: the key `lora` needs a language model; set `name`, `sizes` or `hf`",
        ),
        (
            "model: {name: a}\nloss: mse",
            "a language model computes its own loss; remove the key `loss`",
        ),
    ],
)
def test_contradictions_about_the_model_are_errors(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value) == f"config: {problem}"


def test_text_is_packed_for_a_language_model(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("a" * 40)
    data = DataSection(name="text", path="story.txt", seq_length=8)
    ids, labels = load_samples(data, ModelSection(name="llama2_7b_tiny"), tmp_path)
    assert isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor)
    assert ids.shape == (5, 8)
    assert torch.equal(ids, labels)


@pytest.mark.parametrize("given", [{"hf": GPT2}, {"hf": "config.json"}], ids=["hf", "file"])
@pytest.mark.parametrize("name", ["text", "tokens"])
def test_a_token_beyond_the_vocabulary_of_any_model_is_an_error(
    given: dict[str, Any], name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "vocab_size": 100}))
    (tmp_path / "data.bin").write_bytes(b"\x65\x00" * 20)
    model = ModelSection(hf=given["hf"] if given["hf"] != GPT2 else {**GPT2, "vocab_size": 100})
    data = DataSection.model_validate({"name": name, "path": "data.bin", "seq_length": 4})
    with pytest.raises(DataError, match=r"token id 10\d|token 0 has the id 101"):
        load_samples(data, model, tmp_path)[0][torch.arange(2)]


def test_an_optimizer_has_what_is_said_and_only_what_is_trained() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    chosen = OptimizerSection(name="adamw", learning_rate=0.1, betas=[0.8, 0.9], eps=1e-6)
    (group,) = build_optimizer(chosen, net).param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.9), 1e-6)
    assert [id(p) for p in group["params"]] == [id(net.weight)]


def test_biases_and_norms_may_have_no_weight_decay() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    section = {"name": "adamw", "weight_decay": 0.1, "decay_vectors": False}
    chosen = OptimizerSection.model_validate(section)
    groups = build_optimizer(chosen, net).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (3, 0)]
    assert groups[0]["params"][0] is net[0].weight
    matrices = build_optimizer(chosen, nn.Embedding(2, 2)).param_groups
    assert [len(group["params"]) for group in matrices] == [1, 0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_kernel_updates_all_parameters_where_there_is_one(name: str) -> None:
    net = nn.Linear(4, 4)
    section = {"name": name, **OPTIMIZERS[name].required}
    optimizer = build_optimizer(OptimizerSection.model_validate(section), net)
    fused = [group.get("fused", False) for group in optimizer.param_groups]
    assert any(fused) is (name != "muon")
    net(torch.ones(4)).sum().backward()
    before = net.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(net.weight, before)


def test_parameters_without_a_fused_kernel_are_updated_one_by_one() -> None:
    section = OptimizerSection(name="adamw")
    for net in (nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4, device="meta")):
        assert not any(g["fused"] for g in build_optimizer(section, net).param_groups)


def test_a_schedule_starts_at_the_learning_rate() -> None:
    said = {"learning_rate": 0.1, "schedule": {"kind": "linear", "warmup_ratio": 0.1}}
    chosen = OptimizerSection.model_validate(said)
    assert build_schedule(chosen) == LRSchedule("linear", 0.1, warmup_ratio=0.1)
    assert build_schedule(OptimizerSection()) is None


def test_modules_that_are_computed_again_must_be_there() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    mark_recomputed(net, RecomputeSection(modules=["1"]))
    with pytest.raises(ConfigError, match="the model has no module '7'\ndid you mean "):
        mark_recomputed(net, RecomputeSection(modules=["7"]))
    with pytest.raises(ConfigError, match="no transformer blocks\nset the key `modules`"):
        mark_recomputed(net, RecomputeSection())


def test_a_large_language_model_is_planned_without_memory_for_it() -> None:
    text = (
        "model: {name: llama2_7b, arguments: {num_layers: 2}}\n"
        "data: {name: text, seq_length: 64, batch_size: 8}"
    )
    plan = Run(parse(text), Path()).plan(devices=8)
    assert plan.graph is not None
    assert sum(value.numel for value in plan.graph.parameters) > 6e8
