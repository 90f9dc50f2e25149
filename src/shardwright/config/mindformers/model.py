"""Which model it is: `model.arch`, `model.model_config` and its `pet_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.config.mindformers.keys import Keys
from shardwright.errors import ConfigError
from shardwright.models.attention import Attention
from shardwright.models.lora import LoRA
from shardwright.models.loss import IGNORED
from shardwright.models.sizes import Dimensions, Family, Positions, feed_forward_size

_ARCHITECTURES: Mapping[str, tuple[Family, Positions, str]] = {
    "LlamaForCausalLM": ("llama", "rotary", "LlamaConfig"),
    "QwenForCausalLM": ("qwen", "rotary", "QwenConfig"),
    "Baichuan7BV2ForCausalLM": ("baichuan", "rotary", "LlamaConfig"),
    "Baichuan13BV2ForCausalLM": ("baichuan", "alibi", "LlamaConfig"),
    "PanguAlphaHeadModel": ("pangualpha", "learned", "PanguAlphaConfig"),
}
_DTYPES = {"float32": "float32", "float16": "bfloat16", "bfloat16": "bfloat16"}
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
}
"""Names of linear layers in MindFormers, and here."""


@dataclass(frozen=True)
class MindFormersModel:
    """A model as the file describes it.

    Args:
        param_dtype: in which parameters are stored.
        compute_dtype: in which products are computed.
    """

    sizes: Dimensions
    attention: Attention
    param_dtype: str
    compute_dtype: str
    lora: LoRA | None


def read_model(keys: Keys, notes: list[str]) -> MindFormersModel:
    """Reads the model; `notes` collects what differs from the file.

    Raises:
        ConfigError: an unknown architecture, a size that is missing or does not fit.
    """
    section = keys.section("model")
    arch, config = section.section("arch"), section.section("model_config")
    if not arch.has("type"):
        raise arch.error("type", f"missing; valid are {', '.join(_ARCHITECTURES)}")
    family, positions, kind = _ARCHITECTURES[arch.text("type", valid=list(_ARCHITECTURES))]
    if config.text("type", kind) != kind:
        raise config.error("type", f"{arch.text('type')} needs {kind}, not {config.text('type')}")
    if family == "llama" and config.flag("qkv_has_bias", False):
        family = "qwen"
    if config.whole("ignore_token_id", IGNORED, least=-(2**31)) != IGNORED:
        raise config.error("ignore_token_id", f"must be {IGNORED}: no other label is ignored")
    if config.number("rotary_pct", 1.0) != 1.0:
        raise config.error("rotary_pct", "must be 1.0: rotary embeddings apply to whole heads")
    if config.number("emb_dropout_prob", 0.0) != 0.0:
        raise config.error(
            "emb_dropout_prob", "must be 0.0: dropout of embeddings is not supported"
        )
    if config.has("extend_method"):
        method = config.text("extend_method")
        raise config.error("extend_method", f"{method} is not supported: must be None")
    sizes = _sizes(config, family, positions)
    explicit = not config.flag("use_flash_attention", family == "pangualpha")
    return MindFormersModel(
        sizes=sizes,
        attention="explicit" if explicit else "fused",
        param_dtype=_dtype(config, "param_init_type", "float32", notes),
        compute_dtype=_dtype(config, "compute_dtype", "float16", notes),
        lora=_lora(config.section("pet_config")),
    )


def _sizes(config: Keys, family: Family, positions: Positions) -> Dimensions:
    hidden, heads = config.whole("hidden_size"), config.whole("num_heads")
    pangualpha = family == "pangualpha"
    width = "ffn_hidden_size" if pangualpha else "intermediate_size"
    if config.has(width):
        feed_forward = config.whole(width)
    elif pangualpha:
        feed_forward = config.whole("expand_ratio", 4) * hidden
    else:
        multiplier = config.number("ffn_dim_multiplier", 0.0, least=0)
        feed_forward = feed_forward_size(
            hidden, config.whole("multiple_of", 256), multiplier or None
        )
    if config.has("kv_channels") and config.whole("kv_channels") * heads != hidden:
        channels = config.whole("kv_channels")
        raise config.error("kv_channels", f"{channels} · num_heads {heads} is not {hidden}")
    sizes: dict[str, Any] = {
        "num_layers": config.whole("num_layers"),
        "num_kv_heads": config.whole("n_kv_heads", heads),
        "vocab_size": config.whole("vocab_size"),
        "seq_length": config.whole("seq_length"),
        "norm_eps": config.number(
            "layernorm_epsilon" if pangualpha else "rms_norm_eps", 1e-5, above=0
        ),
        "rope_base": _rope_base(config),
        "dropout": _one_rate(config) if pangualpha else 0.0,
    }
    try:
        return Dimensions(
            family=family,
            positions=positions,
            hidden_size=hidden,
            num_heads=heads,
            intermediate_size=feed_forward,
            **sizes,
        )
    except ConfigError as error:
        raise ConfigError(f"{config.file}: {config.path}: {error}") from None


def _rope_base(config: Keys) -> float:
    """`rotary_emb_base` of Qwen, or `theta` of LLaMA."""
    base = config.number("theta", 10000.0, above=0)
    rotary = config.number("rotary_emb_base", base, above=0)
    if config.has("theta") and rotary != base:
        raise config.error("rotary_emb_base", f"{rotary:g}, but theta says {base:g}")
    return rotary


def _one_rate(config: Keys) -> float:
    """The one probability of all places where PanguAlpha drops."""
    names = ("hidden_dropout_rate", "attention_dropout_rate", "embedding_dropout_prob")
    rates = {name: config.number(name, least=0, below=1) for name in names if config.has(name)}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
        raise config.error(next(iter(rates)), f"all dropout rates must be equal, not {listed}")
    return next(iter(rates.values()), 0.1)


def _dtype(config: Keys, name: str, default: str, notes: list[str]) -> str:
    """The dtype to use: bfloat16 in place of float16, whose range needs a scaled loss."""
    name_in_file = config.text(name, default, valid=list(_DTYPES))
    dtype = _DTYPES[name_in_file]
    if dtype != name_in_file and config.has(name):
        notes.append(
            f"model.model_config.{name} is {_DTYPES[name_in_file]}, which needs no loss scaling"
        )
    return _DTYPES[name_in_file]


def _lora(config: Keys) -> LoRA | None:
    """The adapters that `pet_config` describes, its names of layers as they are called here."""
    if not config.content:
        return None
    config.text("pet_type", "lora", valid=("lora",))
    targets = config.any("target_modules") or ".*wq|.*wk|.*wv|.*wo"
    if not isinstance(targets, str):
        raise config.error("target_modules", f"expected a regular expression, got {targets!r}")
    renamed = re.sub(r"\b(\w+)\b", lambda m: _LAYERS.get(m.group(1), m.group(1)), targets)
    return LoRA(
        target_modules=renamed,
        rank=config.whole("lora_rank", 16),
        alpha=config.number("lora_alpha", 16, above=0),
        dropout=config.number("lora_dropout", 0.0, least=0, below=1),
    )
