"""Read `pet_config` of a MindFormers file: LoRA and prefix tuning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardwright.mindformers.keys import Keys
from shardwright.models.lora import LoRA
from shardwright.models.prefix import PrefixTuning

# MindFormers may merge these layers into one.
_MERGED_QKV = "(?:q_proj|k_proj|v_proj)"
_LAYER_NAMES = {
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
"""Name of each linear layer in Shardwright, by its name in MindFormers."""

_EMBEDDING_NAMES = ("wte", "tok_embeddings", "word_embeddings")
"""MindFormers' names of the token embedding."""

PTUNING_ARCHITECTURE = "ChatGLM2WithPtuning2"


@dataclass(frozen=True)
class Adaptation:
    """Parameter-efficient fine-tuning of a frozen model; at most one method is set."""

    lora: LoRA | None = None
    prefix: PrefixTuning | None = None


def read_adaptation(config: Keys, architecture: str, notes: list[str]) -> Adaptation:
    """Read the model's `pet_config`.

    Args:
        config: the section `model.model_config`.
        architecture: the value of `model.arch.type`.
        notes: receives a note if Shardwright splits a merged layer of MindFormers.

    Raises:
        ConfigError: if `pet_type` is not supported, or a number is missing or invalid.
    """
    section, ptuning = config.section("pet_config"), architecture == PTUNING_ARCHITECTURE
    if ptuning and section.string("pet_type", "ptuning2") != "ptuning2":
        raise section.error("pet_type", f"must be ptuning2 for {architecture}\nset it to ptuning2")
    # MindFormers overwrites both keys with pet_config in models with prefixes. In other models they
    # would have no effect.
    has_prefix, projected = config.has("pre_seq_len"), config.flag("prefix_projection", False)
    if not ptuning and (has_prefix or projected):
        name = "pre_seq_len" if has_prefix else "prefix_projection"
        raise config.error(
            name, f"the key needs the architecture {PTUNING_ARCHITECTURE}\nremove the key"
        )
    if not section.content and not ptuning:
        return Adaptation()
    pet_type = section.string("pet_type", "lora", valid=("lora", "prefixtuning", "ptuning2"))
    if ptuning or pet_type == "ptuning2":
        return Adaptation(prefix=_read_ptuning(section))
    if pet_type == "prefixtuning":
        return Adaptation(prefix=_read_prefix_tuning(section))
    return Adaptation(lora=_read_lora(section, notes))


def _read_prefix_tuning(section: Keys) -> PrefixTuning:
    return PrefixTuning(
        tokens=section.integer("prefix_token_num"),
        projection=section.integer("mid_dim"),
        dropout=section.number("dropout_rate", minimum=0, below=1),
    )


def _read_ptuning(section: Keys) -> PrefixTuning:
    # MindFormers' defaults.
    width = section.integer("projection_dim", 128)
    return PrefixTuning(
        tokens=section.integer("pre_seq_len", 128),
        projection=width if section.flag("prefix_projection", False) else None,
        dropout=section.number("dropout_prob", 0.01, minimum=0, below=1),
    )


def _read_lora(section: Keys, notes: list[str]) -> LoRA:
    targets = section.any("target_modules") or ".*wq|.*wk|.*wv|.*wo"
    if not isinstance(targets, str):
        raise section.error(
            "target_modules", f"{targets!r} is not a regular expression\nset for example .*wq|.*wv"
        )
    # Without a `*` after a layer's name, which would apply to its last letter, or to the whole
    # group of a merged layer.
    renamed = re.sub(
        r"\b(\w+)\b(\*?)", lambda m: _LAYER_NAMES.get(m.group(1)) or m.group(0), targets
    )
    if _MERGED_QKV in renamed:
        # MindFormers has one adapter for the merged layer, with one low-rank input projection.
        notes.append(
            "model.model_config.pet_config: query, key and value projections have separate adapters"
        )
    for name in ("freeze_include", "exclude_layers"):
        if section.any(name):
            raise section.error(name, "this key is not supported\nremove it, or set it to None")
    return LoRA(
        target_modules=renamed,
        rank=section.integer("lora_rank", 16),
        alpha=section.number("lora_alpha", 16, above=0),
        dropout=section.number("lora_dropout", 0.0, minimum=0, below=1),
        trained=_read_unfrozen_patterns(section),
    )


def _read_unfrozen_patterns(section: Keys) -> list[str]:
    """Read `freeze_exclude`: name patterns of trained parameters, in Shardwright's names."""
    patterns: Any = section.any("freeze_exclude") or []
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise section.error(
            "freeze_exclude", f"{patterns!r} is not a list of patterns\nset for example ['*wq*']"
        )
    names = {**dict.fromkeys(_EMBEDDING_NAMES, "embed_tokens"), **_LAYER_NAMES}
    merged = [each for each in patterns if any(n in each for n in names if names[n] == _MERGED_QKV)]
    if merged:
        raise section.error(
            "freeze_exclude",
            f"{merged[0]!r} matches a merged layer that Shardwright splits into three\n"
            "use separate patterns for wq, wk and wv instead",
        )
    # Whole words only: `w1` may also be a part of another name.
    return [re.sub(r"\w+", lambda m: names.get(m.group(), m.group()), each) for each in patterns]
