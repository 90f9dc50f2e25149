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
from shardwright.models.sizes import (
    Dimensions,
    Family,
    Gelu,
    Positions,
    feed_forward_size,
)

_ARCHITECTURES: Mapping[str, tuple[Family, Positions, str]] = {
    "LlamaForCausalLM": ("llama", "rotary", "LlamaConfig"),
    "InternLMForCausalLM": ("llama", "rotary", "InternLMConfig"),
    "InternLM2ForCausalLM": ("llama", "rotary", "InternLM2Config"),
    "ChatGLM2ForConditionalGeneration": ("glm", "rotary", "ChatGLM2Config"),
    "QwenForCausalLM": ("qwen", "rotary", "QwenConfig"),
    "Baichuan7BForCausalLM": ("llama", "rotary", "LlamaConfig"),
    "Baichuan13BForCausalLM": ("baichuan1", "alibi", "LlamaConfig"),
    "Baichuan7BV2ForCausalLM": ("baichuan", "rotary", "LlamaConfig"),
    "Baichuan13BV2ForCausalLM": ("baichuan", "alibi", "LlamaConfig"),
    "GPT2LMHeadModel": ("gpt", "learned", "GPT2Config"),
    "PanguAlphaHeadModel": ("pangualpha", "learned", "PanguAlphaConfig"),
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "pangualpha": {"intermediate_size": "ffn_hidden_size", "rms_norm_eps": "layernorm_epsilon"},
    "gpt": {"rms_norm_eps": "layernorm_epsilon"},
    "glm": {
        "num_heads": "num_attention_heads",
        "n_kv_heads": "multi_query_group_num",
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layernorm_epsilon",
    },
}
"""Names of sizes that differ from those of LLaMA."""

_REQUIRED: Mapping[str, bool | float] = {
    "rotary_pct": 1.0,
    "emb_dropout_prob": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "prefix_projection": False,
}
"""The only value with which the models here compute what those of MindFormers do."""

_GELU: Mapping[str, Gelu] = {"gelu": "gelu_tanh", "fast_gelu": "fast_gelu"}
_MERGED = "(?:q_proj|k_proj|v_proj)"
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
    "w_qkv": _MERGED,
    "query_key_value": _MERGED,
    "dense_h_to_4h": "gate_up_proj",
    "dense_4h_to_h": "down_proj",
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
    if config.whole("ignore_token_id", IGNORED, least=-(2**31)) != IGNORED:
        raise config.error("ignore_token_id", f"must be {IGNORED}: no other label is ignored")
    for name, value in _REQUIRED.items():
        read = config.flag if isinstance(value, bool) else config.number
        if read(name, value) != value:  # type: ignore[arg-type]
            raise config.error(name, f"{config.any(name)} is not supported: must be {value}")
    if config.has("pre_seq_len"):
        raise config.error("pre_seq_len", "prefixes are not supported: must be None")
    family, experts = _with_experts(keys, config, family, notes)
    sizes = _sizes(config, family, positions, experts)
    explicit = not config.flag("use_flash_attention", family == "pangualpha")
    return MindFormersModel(
        sizes=sizes,
        attention="explicit" if explicit else "fused",
        param_dtype=_dtype(config, "param_init_type", "float32", notes),
        compute_dtype=_dtype(config, "compute_dtype", "float16", notes),
        lora=_lora(config.section("pet_config"), notes),
    )


def _with_experts(
    keys: Keys, config: Keys, family: Family, notes: list[str]
) -> tuple[Family, dict[str, Any]]:
    """The family, which biases and experts make another one, and the sizes of its experts."""
    biased, section = config.flag("qkv_has_bias", False), keys.section("moe_config")
    number = section.whole("expert_num", 1)
    if number == 1:
        return ("qwen" if family == "llama" and biased else family), {}
    if family != "llama":
        raise section.error("expert_num", f"{number} are not supported here; valid is 1")
    shared = section.whole("shared_expert_num", 0, least=0)
    normalized = section.flag("norm_topk_prob", True)
    if section.whole("first_k_dense_replace", 0, least=0):
        raise section.error("first_k_dense_replace", "must be 0: all layers have experts")
    if section.text("topk_method", "greedy") != "greedy":
        raise section.error("topk_method", "must be greedy: tokens choose among all experts")
    if shared and not (biased and section.flag("use_shared_expert_gating", False)):
        problem = "must be 0 without qkv_has_bias and use_shared_expert_gating, as in Qwen's models"
        raise section.error("shared_expert_num", problem)
    if not shared and (biased or not normalized):
        name = "norm_topk_prob" if not normalized else "shared_expert_num"
        raise section.error(name, "differs from Mixtral's, and Qwen's models have a shared expert")
    for name, effect in (("capacity_factor", "no token is dropped"), ("aux_loss_factor", _AUX)):
        if section.number(name, 0.0):
            notes.append(f"moe_config.{name} has no effect: {effect}")
    sizes: dict[str, Any] = {
        "num_experts": number,
        "experts_per_token": section.whole("num_experts_chosen", 1),
    }
    if not shared:
        return "mixtral", sizes
    width = shared * config.whole("intermediate_size")
    hf = {"shared_expert_intermediate_size": width, "norm_topk_prob": normalized}
    return "qwen_moe", {**sizes, "hf": hf}


_AUX = "the loss has no term that balances experts"


def _sizes(
    config: Keys, family: Family, positions: Positions, experts: Mapping[str, Any]
) -> Dimensions:
    def name(of: str) -> str:
        other = _NAMES.get(family, {}).get(of, of)
        return other if config.has(other) or not config.has(of) else of

    hidden, heads = config.whole("hidden_size"), config.whole(name("num_heads"))
    if config.has(name("intermediate_size")):
        feed_forward = config.whole(name("intermediate_size"))
    elif positions == "learned":
        feed_forward = config.whole("expand_ratio", 4) * hidden
    else:
        multiplier = config.number("ffn_dim_multiplier", 0.0, least=0)
        feed_forward = feed_forward_size(
            hidden, config.whole("multiple_of", 256), multiplier or None
        )
    if config.has("kv_channels") and config.whole("kv_channels") * heads != hidden:
        product = f"{config.whole('kv_channels')} · {name('num_heads')} {heads}"
        raise config.error("kv_channels", f"{product} is not {hidden}")
    groups = family != "glm" or config.flag("multi_query_attention", True)
    sizes: dict[str, Any] = {
        "num_layers": config.whole("num_layers"),
        "num_kv_heads": config.whole(name("n_kv_heads"), heads) if groups else heads,
        "vocab_size": config.whole(name("vocab_size")),
        "seq_length": config.whole("seq_length"),
        "norm_eps": config.number(name("rms_norm_eps"), 1e-5, above=0),
        "rope_base": _rope_base(config),
        "dropout": _one_rate(config) if positions == "learned" else 0.0,
        **experts,
        "hf": {**experts.get("hf", {}), **_further(config, family, positions)},
    }
    if family == "gpt":
        sizes["activation"] = _GELU[config.text("hidden_act", "gelu", valid=list(_GELU))]
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


def _further(config: Keys, family: Family, positions: Positions) -> dict[str, Any]:
    """Arguments of the configuration of `transformers`: biases, tied weights, longer positions."""
    kind = config.text("type")
    biases = {"InternLMConfig": ("has_bias", True), "InternLM2Config": ("has_bias", False)}
    name, default = (
        ("add_qkv_bias", True) if family == "glm" else biases.get(kind, ("has_bias", False))
    )
    further: dict[str, Any] = {}
    if config.flag(name, default):
        further["attention_bias"] = True
    if config.flag("tie_word_embeddings", False):
        further["tie_word_embeddings"] = True
    if rotary := _extended(config):
        further["rope_parameters"] = rotary
    if further and family in ("baichuan1", "baichuan", "pangualpha"):
        raise config.error("type", f"{family} has no {', '.join(further)}")
    return {} if family == "gpt" else further


def _extended(config: Keys) -> dict[str, Any]:
    """How rotary positions are extended beyond what the model was first trained for."""
    method = config.text("extend_method", "None", valid=("None", "NTK", *_EXTENDED))
    if method in ("None", "NTK"):
        return {}
    kind, names = _EXTENDED[method]
    if not names:
        return {"rope_type": kind, "factor": config.number("scaling_factor", 1.0, least=1)}
    factors = config.section("scaling_factor")
    return {"rope_type": kind, **{name: factors.number(name, above=0) for name in names}}


_EXTENDED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "PI": ("linear", ()),
    "LLAMA3": (
        "llama3",
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "YARN": (
        "yarn",
        (
            *("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
            *("mscale", "mscale_all_dim"),
        ),
    ),
}
"""The kind of rotary positions in `transformers`, and what `scaling_factor` holds if no number."""


def _rope_base(config: Keys) -> float:
    """`rotary_emb_base` of Qwen, or `theta` of LLaMA."""
    base = config.number("theta", 10000.0, above=0)
    rotary = config.number("rotary_emb_base", base, above=0)
    if config.has("theta") and rotary != base:
        raise config.error("rotary_emb_base", f"{rotary:g}, but theta says {base:g}")
    if config.text("extend_method") == "NTK":
        rotary *= config.number("scaling_factor", 1.0, least=1)
    return rotary * config.number("rope_ratio", 1.0, above=0)


def _one_rate(config: Keys) -> float:
    """The one probability of all places where PanguAlpha and GPT drop."""
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


def _lora(config: Keys, notes: list[str]) -> LoRA | None:
    """The adapters that `pet_config` describes, its names of layers as they are called here.
    `notes` collects where one layer is several."""
    if not config.content:
        return None
    config.text("pet_type", "lora", valid=("lora",))
    targets = config.any("target_modules") or ".*wq|.*wk|.*wv|.*wo"
    if not isinstance(targets, str):
        raise config.error("target_modules", f"expected a regular expression, got {targets!r}")
    renamed = re.sub(r"\b(\w+)\b(\*?)", lambda m: _LAYERS.get(m.group(1)) or m.group(0), targets)
    if _MERGED in renamed:
        notes.append("model.model_config.pet_config: queries, keys and values have an adapter each")
    return LoRA(
        target_modules=renamed,
        rank=config.whole("lora_rank", 16),
        alpha=config.number("lora_alpha", 16, above=0),
        dropout=config.number("lora_dropout", 0.0, least=0, below=1),
    )
