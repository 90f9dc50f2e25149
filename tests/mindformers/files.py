"""The smallest file of the MindFormers shape, and changes of it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from shardwright.mindformers import LanguageRun, language_run

SMALL: dict[str, Any] = {
    "use_parallel": True,
    "trainer": {"model_name": "small"},
    "runner_config": {"batch_size": 2},
    "optimizer": {"type": "AdamW", "learning_rate": 1e-4},
    "parallel": {"parallel_mode": 2, "full_batch": True},
    "parallel_config": {"data_parallel": 4, "model_parallel": 2},
    "model": {
        "arch": {"type": "LlamaForCausalLM"},
        "model_config": {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 8,
            "vocab_size": 320,
            "seq_length": 32,
        },
    },
}


def small(**changes: Any) -> dict[str, Any]:
    """`SMALL` with changes by dotted path, `__` for a dot; None takes a key away."""
    content = deepcopy(SMALL)
    for path, value in changes.items():
        *sections, name = path.split("__")
        section = content
        for part in sections:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value
    return content


def run_of(**changes: Any) -> LanguageRun:
    return language_run(small(**changes), "small.yaml")
