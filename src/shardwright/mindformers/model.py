"""Which model it is: `model.arch`, `model.model_config` and its `pet_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.errors import ConfigError
from shardwright.mindformers.adaptation import Adaptation, read_adaptation
from shardwright.mindformers.architectures import read_architecture
from shardwright.mindformers.experts import read_experts
from shardwright.mindformers.keys import Keys
from shardwright.models.attention import Attention
from shardwright.models.loss import IGNORED
from shardwright.models.sizes import (
    Dimensions,
    Gelu,
    Positions,
    feed_forward_size,
)

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
    "apply_query_key_layer_scaling": True,
    "embed_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_dropout_prob": 0.0,
    "out_proj_has_bias": True,
    "wo_has_bias": True,
}
"""The only value with which the models here compute what those of MindFormers do."""

_GELU: Mapping[str, Gelu] = {"gelu": "gelu_tanh", "fast_gelu": "fast_gelu"}
_DTYPES = {"float32": "float32", "float16": "bfloat16", "bfloat16": "bfloat16"}


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
    adaptation: Adaptation


def read_model(keys: Keys, notes: list[str]) -> MindFormersModel:
    """Reads the model; `notes` collects what differs from the file.

    Raises:
        ConfigError: an unknown architecture, a size that is missing or does not fit.
    """
    section = keys.section("model")
    arch, config = section.section("arch"), section.section("model_config")
    family, positions, kind = read_architecture(arch)
    if config.text("type", kind) != kind:
        raise config.error("type", f"{arch.text('type')} needs {kind}, not {config.text('type')}")
    if config.whole("ignore_token_id", IGNORED, least=-(2**31)) != IGNORED:
        raise config.error("ignore_token_id", f"must be {IGNORED}: no other label is ignored")
    for name, value in _REQUIRED.items():
        read = config.flag if isinstance(value, bool) else config.number
        if read(name, value) != value:  # type: ignore[arg-type]
            raise config.error(name, f"{config.any(name)} is not supported: must be {value}")
    adaptation = read_adaptation(config, arch.text("type"), notes)
    family, experts = read_experts(keys.section("moe_config"), config, family, notes)
    sizes = _sizes(config, family, positions, experts, kind, notes)
    explicit = not config.flag("use_flash_attention", family == "pangualpha")
    return MindFormersModel(
        sizes=sizes,
        attention="explicit" if explicit else "fused",
        param_dtype=_dtype(config, "param_init_type", "float32", notes),
        compute_dtype=_dtype(config, "compute_dtype", "float16", notes),
        adaptation=adaptation,
    )


def _sizes(
    config: Keys,
    family: str,
    positions: Positions,
    experts: Mapping[str, Any],
    kind: str,
    notes: list[str],
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
    # Published files have Qwen's keys with any number in LLaMA's configuration, which ignores them.
    channels = kind in ("QwenConfig", "ChatGLM2Config") and config.has("kv_channels")
    if channels and config.whole("kv_channels") * heads != hidden:
        product = f"{config.whole('kv_channels')} · {name('num_heads')} {heads}"
        raise config.error("kv_channels", f"{product} is not {hidden}")
    groups = family != "glm" or config.flag("multi_query_attention", True)
    sizes: dict[str, Any] = {
        "num_layers": config.whole("num_layers"),
        "num_kv_heads": config.whole(name("n_kv_heads"), heads) if groups else heads,
        "vocab_size": config.whole(name("vocab_size")),
        "seq_length": config.whole("seq_length"),
        "norm_eps": config.number(name("rms_norm_eps"), 1e-5, above=0),
        "rope_base": _rope_base(config, kind, notes),
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


def _further(config: Keys, family: str, positions: Positions) -> dict[str, Any]:
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


def _rope_base(config: Keys, kind: str, notes: list[str]) -> float:
    """`rotary_emb_base` of Qwen, or `theta` of LLaMA; `notes` collects the one without effect."""
    names = ("theta", "rotary_emb_base")
    used, other = reversed(names) if kind == "QwenConfig" else names
    rotary = config.number(used, 10000.0, above=0)
    if config.number(other, rotary, above=0) != rotary:
        notes.append(f"model.model_config.{other} has no effect: {kind} has {used} {rotary:g}")
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
