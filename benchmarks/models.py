"""The models that are measured: those of the tests, those of the examples, and LLaMA 2."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.run.config.run import Run

Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

LLAMA_2: dict[str, dict[str, Any]] = {
    "7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def small(name: str, **sizes: Any) -> Model:
    """A model of `tests/sample_models.py`: module, positional and keyword arguments."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    model: Model = getattr(importlib.import_module("sample_models"), name)(**sizes)
    return model


def examples() -> list[str]:
    """Names of the configurations in `examples/`."""
    return sorted(path.name for path in EXAMPLES.glob("*.yaml"))


def example(name: str) -> Model:
    """The model of a configuration in `examples/` and its first batch."""
    run = Run.from_file(EXAMPLES / name)
    return run.model(), run.example_batch(), {}


def feed_forward(batch: int = 32) -> Model:
    """The network of `examples/ffn.py` with its loss, not pinned."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    net = importlib.import_module("ffn").FFN()
    images, labels = torch.zeros(batch, 1, 28, 28), torch.zeros(batch, dtype=torch.long)
    return sw.WithLoss(net, nn.CrossEntropyLoss()), (images, labels), {}


def llama_2(name: str, batch: int, sequence: int, layers: int | None = None) -> Model:
    """LLaMA 2 of `transformers` in its real size, on the meta device; `layers` of them if given."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32000, "max_position_embeddings": 4096, **LLAMA_2[name]}
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    config = LlamaConfig(**sizes)
    with torch.device("meta"):
        net = LlamaForCausalLM(config)
        ids = torch.empty((batch, sequence), dtype=torch.long)
    return net, (), {"input_ids": ids, "labels": ids, "use_cache": False}
