"""What is trained beside frozen weights: `pet_config`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardwright.mindformers.keys import Keys
from shardwright.models.lora import LoRA
from shardwright.models.prefix import PrefixTuning

_MERGED = "(?:q_proj|k_proj|v_proj)"
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
    "w_qkv": _MERGED,
    "query_key_value": _MERGED,
    "dense_h_to_4h": "gate_up_proj",
    "dense_4h_to_h": "down_proj",
}
"""Names of linear layers in MindFormers, and here."""

_TABLES = ("wte", "tok_embeddings", "word_embeddings")
"""Names of the table of embeddings in MindFormers."""

PTUNING_ARCHITECTURE = "ChatGLM2WithPtuning2"


@dataclass(frozen=True)
class Adaptation:
    """What is trained where the weights of the model are not; at most one is there."""

    lora: LoRA | None = None
    prefix: PrefixTuning | None = None


def read_adaptation(config: Keys, architecture: str, notes: list[str]) -> Adaptation:
    """What the model's `pet_config` describes; `notes` collects where one layer is several.

    Raises:
        ConfigError: a kind that is not known, a number that is missing or does not fit.
    """
    section, ptuning = config.section("pet_config"), architecture == PTUNING_ARCHITECTURE
    if ptuning and section.text("pet_type", "ptuning2") != "ptuning2":
        raise section.error("pet_type", f"{architecture} needs ptuning2")
    # MindFormers takes both from pet_config where its model has prefixes.
    has_prefix, projected = config.has("pre_seq_len"), config.flag("prefix_projection", False)
    if not ptuning and (has_prefix or projected):
        name = "pre_seq_len" if has_prefix else "prefix_projection"
        raise config.error(name, f"needs the architecture {PTUNING_ARCHITECTURE}")
    if not section.content and not ptuning:
        return Adaptation()
    kind = section.text("pet_type", "lora", valid=("lora", "prefixtuning", "ptuning2"))
    if ptuning or kind == "ptuning2":
        return Adaptation(prefix=_ptuning(section))
    if kind == "prefixtuning":
        return Adaptation(prefix=_prefix_tuning(section))
    return Adaptation(lora=_lora(section, notes))


def _prefix_tuning(section: Keys) -> PrefixTuning:
    return PrefixTuning(
        tokens=section.whole("prefix_token_num"),
        projection=section.whole("mid_dim"),
        dropout=section.number("dropout_rate", least=0, below=1),
    )


def _ptuning(section: Keys) -> PrefixTuning:
    """The defaults are those of MindFormers."""
    width = section.whole("projection_dim", 128)
    return PrefixTuning(
        tokens=section.whole("pre_seq_len", 128),
        projection=width if section.flag("prefix_projection", False) else None,
        dropout=section.number("dropout_prob", 0.01, least=0, below=1),
    )


def _lora(section: Keys, notes: list[str]) -> LoRA:
    targets = section.any("target_modules") or ".*wq|.*wk|.*wv|.*wo"
    if not isinstance(targets, str):
        raise section.error("target_modules", f"expected a regular expression, got {targets!r}")
    renamed = re.sub(r"\b(\w+)\b(\*?)", lambda m: _LAYERS.get(m.group(1)) or m.group(0), targets)
    if _MERGED in renamed:
        notes.append("model.model_config.pet_config: queries, keys and values have an adapter each")
    for name in ("freeze_include", "exclude_layers"):
        if section.any(name):
            raise section.error(name, "is not supported: must be None")
    return LoRA(
        target_modules=renamed,
        rank=section.whole("lora_rank", 16),
        alpha=section.number("lora_alpha", 16, above=0),
        dropout=section.number("lora_dropout", 0.0, least=0, below=1),
        trained=_trained(section),
    )


def _trained(section: Keys) -> list[str]:
    """`freeze_exclude`: patterns of the names of parameters that are not frozen."""
    patterns: Any = section.any("freeze_exclude") or []
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise section.error("freeze_exclude", f"expected a list of patterns, got {patterns!r}")
    names = {**dict.fromkeys(_TABLES, "embed_tokens"), **_LAYERS}
    merged = [each for each in patterns if any(n in each for n in names if names[n] == _MERGED)]
    if merged:
        problem = f"{merged[0]!r}: queries, keys and values are three layers here: name each"
        raise section.error("freeze_exclude", problem)
    return [re.sub(r"\w+", lambda m: names.get(m.group(), m.group()), each) for each in patterns]
