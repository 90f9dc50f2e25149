"""Parameter-efficient fine-tuning (LoRA, prefix tuning): `pet_config`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardwright.mindformers.keys import Keys
from shardwright.models.lora import LoRA
from shardwright.models.prefix import PrefixTuning

# MindFormers may merge these into one linear layer.
_MERGED_QKV = "(?:q_proj|k_proj|v_proj)"
_LAYERS = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "dense1": "q_proj",
    "dense2": "k_proj",
    "dense3": "v_proj",
    "w_qkv": _MERGED_QKV,
    "query_key_value": _MERGED_QKV,
    "dense_h_to_4h": "gate_up_proj",
    "dense_4h_to_h": "down_proj",
}
"""Names of linear layers here, by their names in MindFormers."""

_EMBEDDINGS = ("wte", "tok_embeddings", "word_embeddings")
"""Names of the token embedding in MindFormers."""

PTUNING_ARCHITECTURE = "ChatGLM2WithPtuning2"


@dataclass(frozen=True)
class Adaptation:
    """Trained additions to a frozen model; at most one is set."""

    lora: LoRA | None = None
    prefix: PrefixTuning | None = None


def read_adaptation(config: Keys, architecture: str, notes: list[str]) -> Adaptation:
    """Read the model's `pet_config`.

    Args:
        config: the section `model.model_config`.
        architecture: the value of `model.arch.type`.
        notes: receives a note where a layer of MindFormers is several layers here.

    Raises:
        ConfigError: the type of adaptation is unknown, or a number is missing or invalid.
    """
    section, ptuning = config.section("pet_config"), architecture == PTUNING_ARCHITECTURE
    if ptuning and section.text("pet_type", "ptuning2") != "ptuning2":
        raise section.error("pet_type", f"{architecture} needs ptuning2")
    # In models with prefixes MindFormers overwrites both with pet_config; elsewhere they would be
    # ignored in silence.
    has_prefix, projected = config.has("pre_seq_len"), config.flag("prefix_projection", False)
    if not ptuning and (has_prefix or projected):
        name = "pre_seq_len" if has_prefix else "prefix_projection"
        raise config.error(name, f"needs the architecture {PTUNING_ARCHITECTURE}")
    if not section.content and not ptuning:
        return Adaptation()
    pet_type = section.text("pet_type", "lora", valid=("lora", "prefixtuning", "ptuning2"))
    if ptuning or pet_type == "ptuning2":
        return Adaptation(prefix=_ptuning(section))
    if pet_type == "prefixtuning":
        return Adaptation(prefix=_prefix_tuning(section))
    return Adaptation(lora=_lora(section, notes))


def _prefix_tuning(section: Keys) -> PrefixTuning:
    return PrefixTuning(
        tokens=section.integer("prefix_token_num"),
        projection=section.integer("mid_dim"),
        dropout=section.number("dropout_rate", least=0, below=1),
    )


def _ptuning(section: Keys) -> PrefixTuning:
    # The defaults are MindFormers'.
    width = section.integer("projection_dim", 128)
    return PrefixTuning(
        tokens=section.integer("pre_seq_len", 128),
        projection=width if section.flag("prefix_projection", False) else None,
        dropout=section.number("dropout_prob", 0.01, least=0, below=1),
    )


def _lora(section: Keys, notes: list[str]) -> LoRA:
    targets = section.any("target_modules") or ".*wq|.*wk|.*wv|.*wo"
    if not isinstance(targets, str):
        raise section.error("target_modules", f"expected a regular expression, got {targets!r}")
    renamed = re.sub(r"\b(\w+)\b(\*?)", lambda m: _LAYERS.get(m.group(1)) or m.group(0), targets)
    if _MERGED_QKV in renamed:
        # MindFormers has one adapter for the merged layer, with one low-rank input projection.
        notes.append(
            "model.model_config.pet_config: query, key and value projections have separate adapters"
        )
    for name in ("freeze_include", "exclude_layers"):
        if section.any(name):
            raise section.error(name, "is not supported: must be None")
    return LoRA(
        target_modules=renamed,
        rank=section.integer("lora_rank", 16),
        alpha=section.number("lora_alpha", 16, above=0),
        dropout=section.number("lora_dropout", 0.0, least=0, below=1),
        trained=_trained(section),
    )


def _trained(section: Keys) -> list[str]:
    """Patterns of the names of unfrozen parameters: `freeze_exclude`, with names translated."""
    patterns: Any = section.any("freeze_exclude") or []
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise section.error("freeze_exclude", f"expected a list of patterns, got {patterns!r}")
    names = {**dict.fromkeys(_EMBEDDINGS, "embed_tokens"), **_LAYERS}
    merged = [each for each in patterns if any(n in each for n in names if names[n] == _MERGED_QKV)]
    if merged:
        problem = f"{merged[0]!r} is three layers here: use patterns for wq, wk and wv instead"
        raise section.error("freeze_exclude", problem)
    return [re.sub(r"\w+", lambda m: names.get(m.group(), m.group()), each) for each in patterns]
