"""Read the section `model` of a MindFormers file: architecture, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.errors import ConfigError
from shardwright.mindformers.adaptation import Adaptation, read_adaptation
from shardwright.mindformers.architectures import read_architecture
from shardwright.mindformers.dropout import read_dropout
from shardwright.mindformers.experts import read_experts
from shardwright.mindformers.keys import Keys
from shardwright.mindformers.telechat import TELECHAT_KEYS, read_telechat
from shardwright.models.attention import Attention
from shardwright.models.loss import IGNORED
from shardwright.models.sizes import (
    Dimensions,
    Gelu,
    Positions,
    feed_forward_size,
)

_FAMILY_KEYS: Mapping[str, Mapping[str, str]] = {
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
"""Names of model size keys that differ from LLaMA's, by family and by LLaMA's name."""

_ONLY_VALUES: Mapping[str, bool | float] = {
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
"""The only supported value of some keys of MindFormers' `model_config`, by key."""

_DROPOUT_KEYS = ("hidden_dropout_rate", "attention_dropout_rate", "embedding_dropout_prob")
"""Keys of the dropout of PanguAlpha and GPT."""

# MindSpore's "gelu" is the tanh approximation.
_GELU: Mapping[str, Gelu] = {"gelu": "gelu_tanh", "fast_gelu": "fast_gelu"}
_DTYPES = {"float32": "float32", "float16": "bfloat16", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class MindFormersModel:
    """The model of a MindFormers file.

    Args:
        sizes: model family and dimensions.
        attention: attention kernel.
        param_dtype: dtype of stored parameters.
        compute_dtype: dtype of matrix products.
        adaptation: LoRA or prefix tuning.
    """

    sizes: Dimensions
    attention: Attention
    param_dtype: str
    compute_dtype: str
    adaptation: Adaptation


def read_model(keys: Keys, notes: list[str]) -> MindFormersModel:
    """Read the sections `model` and `moe_config`.

    Args:
        keys: all keys of the file.
        notes: receives a note for each setting that differs from the file.

    Raises:
        ConfigError: if the architecture is not supported, or a size is missing or invalid.
    """
    section = keys.section("model")
    arch, config = section.section("arch"), section.section("model_config")
    family, positions, config_type = read_architecture(arch)
    if config.string("type", config_type) != config_type:
        raise config.error(
            "type",
            f"{config.string('type')} is not the configuration of "
            f"{arch.string('type')}\nset {config_type}",
        )
    if config.integer("ignore_token_id", IGNORED, minimum=-(2**31)) != IGNORED:
        raise config.error(
            "ignore_token_id", f"the loss ignores only the label {IGNORED}\nset it to {IGNORED}"
        )
    for name, value in _ONLY_VALUES.items():
        if family == "telechat" and name in TELECHAT_KEYS:
            continue
        # A flag is read as one, so that `"True"` in quotes counts too.
        read = config.flag if isinstance(value, bool) else config.number
        if read(name, value) != value:  # type: ignore[arg-type]
            raise config.error(name, f"{config.any(name)} is not supported\nset it to {value}")
    adaptation = read_adaptation(config, arch.string("type"), notes)
    family, further = read_experts(keys.section("moe_config"), config, family, notes)
    if family == "telechat":
        family, further = read_telechat(config)
    if config.integer("mtp_depth", 0, minimum=0):
        notes.append(
            "model.model_config.mtp_depth has no effect: the loss has no term of multi-token"
            " prediction"
        )
    sizes = _read_dimensions(config, family, positions, further, config_type, notes)
    # PanguAlpha is the only model of MindFormers with flash attention by default.
    is_explicit = not config.flag("use_flash_attention", family == "pangualpha")
    return MindFormersModel(
        sizes=sizes,
        attention="explicit" if is_explicit else "fused",
        param_dtype=read_dtype(config, "param_init_type", "float32", notes),
        compute_dtype=read_dtype(config, "compute_dtype", "float16", notes),
        adaptation=adaptation,
    )


def _read_dimensions(
    config: Keys,
    family: str,
    positions: Positions,
    further: Mapping[str, Any],
    config_type: str,
    notes: list[str],
) -> Dimensions:
    def name(llama_key: str) -> str:
        # Published files also use LLaMA's keys in other families.
        family_key = _FAMILY_KEYS.get(family, {}).get(llama_key, llama_key)
        use_family_key = config.has(family_key) or not config.has(llama_key)
        return family_key if use_family_key else llama_key

    hidden, heads = config.integer("hidden_size"), config.integer(name("num_heads"))
    if config.has(name("intermediate_size")):
        feed_forward = config.integer(name("intermediate_size"))
    # GPT and PanguAlpha, the models with learned positions, set a multiple of the hidden size.
    elif positions == "learned":
        feed_forward = config.integer("expand_ratio", 4) * hidden
    else:
        # 0 stands for no multiplier.
        multiplier = config.number("ffn_dim_multiplier", 0.0, minimum=0)
        feed_forward = feed_forward_size(
            hidden, config.integer("multiple_of", 256), multiplier or None
        )
    # Published files with LlamaConfig contain Qwen's keys with arbitrary values, which LlamaConfig
    # ignores.
    has_channels = config_type in ("QwenConfig", "ChatGLM2Config") and config.has("kv_channels")
    if has_channels and config.integer("kv_channels") * heads != hidden:
        product = f"{config.integer('kv_channels')} · {name('num_heads')} {heads}"
        raise config.error(
            "kv_channels", f"{product} is not equal to hidden_size {hidden}\nremove kv_channels"
        )
    # In GLM a flag decides whether `n_kv_heads` has an effect.
    grouped_query = family != "glm" or config.flag("multi_query_attention", True)
    sizes: dict[str, Any] = {
        "num_layers": config.integer("num_layers"),
        # Without the key, each query head has a key-value head of its own.
        "num_kv_heads": config.integer(name("n_kv_heads"), heads) if grouped_query else heads,
        "vocab_size": config.integer(name("vocab_size")),
        "seq_length": config.integer("seq_length"),
        "norm_eps": config.number(name("rms_norm_eps"), 1e-5, above=0),
        "rope_base": _read_rope_base(config, config_type, notes),
        "dropout": read_dropout(config, _DROPOUT_KEYS, 0.1) if positions == "learned" else 0.0,
        **further,
        "hf": {**further.get("hf", {}), **_read_hf_arguments(config, family, positions)},
    }
    # PanguAlpha always has the sigmoid approximation.
    if family == "gpt":
        sizes["activation"] = _GELU[config.string("hidden_act", "gelu", valid=list(_GELU))]
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
        # `Dimensions` does not know the file and the key.
        raise ConfigError(f"{config.file}: {config.path}: {error}") from None


def _read_hf_arguments(config: Keys, family: str, positions: Positions) -> dict[str, Any]:
    """Read the arguments of the model's `transformers` configuration: biases, tied weights, RoPE
    scaling."""
    config_type = config.string("type")
    # MindFormers' defaults.
    biases = {"InternLMConfig": ("has_bias", True), "InternLM2Config": ("has_bias", False)}
    name, default = (
        ("add_qkv_bias", True) if family == "glm" else biases.get(config_type, ("has_bias", False))
    )
    arguments: dict[str, Any] = {}
    if config.flag(name, default):
        arguments["attention_bias"] = True
    if config.flag("tie_word_embeddings", False):
        arguments["tie_word_embeddings"] = True
    if rope_scaling := _read_rope_scaling(config):
        arguments["rope_parameters"] = rope_scaling
    # These families are modules of this package, not of `transformers`.
    if arguments and family in ("baichuan1", "baichuan", "pangualpha"):
        raise config.error(
            "type", f"{family} does not support {', '.join(arguments)}\nremove these keys"
        )
    # GPT-2 of this package always has biases and tied embeddings.
    return {} if family == "gpt" else arguments


def _read_rope_scaling(config: Keys) -> dict[str, Any]:
    """Convert RoPE scaling beyond the pretraining length to `rope_parameters` of `transformers`."""
    method = config.string("extend_method", "None", valid=("None", "NTK", *_ROPE_SCALING))
    # NTK changes only the base; see `_read_rope_base`.
    if method in ("None", "NTK"):
        return {}
    rope_type, names = _ROPE_SCALING[method]
    if not names:
        return {"rope_type": rope_type, "factor": config.number("scaling_factor", 1.0, minimum=1)}
    factors = config.section("scaling_factor")
    return {"rope_type": rope_type, **{name: factors.number(name, above=0) for name in names}}


_ROPE_SCALING: Mapping[str, tuple[str, tuple[str, ...]]] = {
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
"""For each `extend_method`: `rope_type` of `transformers`, and the keys of the section
`scaling_factor`; no keys if `scaling_factor` is a number."""


def _read_rope_base(config: Keys, config_type: str, notes: list[str]) -> float:
    """Read the RoPE base: Qwen's `rotary_emb_base` or LLaMA's `theta`, with NTK scaling."""
    names = ("theta", "rotary_emb_base")
    used, unused = reversed(names) if config_type == "QwenConfig" else names
    base = config.number(used, 10000.0, above=0)
    if config.number(unused, base, above=0) != base:
        notes.append(
            f"model.model_config.{unused} has no effect: {config_type} has {used} {base:g}"
        )
    if config.string("extend_method") == "NTK":
        # NTK scaling changes the base, where other methods change the angles.
        base *= config.number("scaling_factor", 1.0, minimum=1)
    return base * config.number("rope_ratio", 1.0, above=0)


def read_dtype(config: Keys, name: str, default: str, notes: list[str]) -> str:
    """Read a dtype; return bfloat16 instead of float16, which would need loss scaling.

    Args:
        default: dtype if the key is missing.
        notes: receives a note if the dtype is replaced.
    """
    requested = config.string(name, default, valid=list(_DTYPES))
    dtype = _DTYPES[requested]
    # Only a dtype that the file sets is worth a note.
    if dtype != requested and config.has(name):
        notes.append(
            f"model.model_config.{name} is {_DTYPES[requested]}, which needs no loss scaling"
        )
    return _DTYPES[requested]
