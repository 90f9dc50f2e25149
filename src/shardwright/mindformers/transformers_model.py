"""Read the model of newer MindFormers files, with the keys of a `transformers` configuration.

These files have no `model.arch`. The folder `pretrained_model_dir` contains the `config.json` of a
model of `transformers`; keys of `model.model_config` override it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError
from shardwright.mindformers.adaptation import Adaptation
from shardwright.mindformers.keys import Keys
from shardwright.mindformers.model import MindFormersModel, read_dtype
from shardwright.models.decoder import MODEL_TYPES
from shardwright.models.sizes import Dimensions
from shardwright.plain_data import parse_json
from shardwright.text_files import read_text

_LATENT_ATTENTION = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("llama", ("attention_bias", "mlp_bias")),
    "qwen2": ("qwen", ()),
    "qwen3": ("qwen3", ("attention_bias",)),
    "mixtral": ("mixtral", ()),
    "qwen3_moe": (
        "qwen3_moe",
        (
            *("attention_bias", "intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
            "mlp_only_layers",
        ),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        (
            *("attention_bias", "moe_intermediate_size", "n_shared_experts", "n_group"),
            *("topk_group", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor"),
            *("q_lora_rank", "rope_interleave", *_LATENT_ATTENTION),
        ),
    ),
}
"""Model family, and the further arguments of its configuration, by `model_type`."""

_ONLY_VALUES: Mapping[str, bool | float] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "use_sliding_window": False,
}
"""The only supported value of some keys of MindFormers' `model_config`, by key."""

_KEYS_WITHOUT_EFFECT: Mapping[str, str] = {
    "router_aux_loss_coef": "the loss has no load-balancing term",
    "moe_aux_loss_coeff": "the loss has no load-balancing term",
    "moe_z_loss_coeff": "the loss has no router z-loss term",
    "num_nextn_predict_layers": "the loss has no term of multi-token prediction",
    "mtp_num_layers": "the loss has no term of multi-token prediction",
}
"""Reasons why keys that change only the training loss have no effect, by key."""


def has_transformers_keys(keys: Keys) -> bool:
    """Whether the model of a file has the keys of a `transformers` configuration."""
    model = keys.section("model")
    # Older files have `arch`, also with `pretrained_model_dir`.
    if model.section("arch").content:
        return False
    config = model.section("model_config")
    names = ("model_type", "architectures", "num_hidden_layers")
    return keys.has("pretrained_model_dir") or any(config.has(name) for name in names)


def read_transformers_model(keys: Keys, notes: list[str]) -> MindFormersModel:
    """Read the section `model` and the configuration in `pretrained_model_dir`.

    Args:
        keys: all keys of the file.
        notes: receives a note for each setting that differs from the file.

    Raises:
        ConfigError: if the folder has no configuration, the model type is not supported, or a size
            is missing or invalid.
    """
    model_config = keys.section("model").section("model_config")
    config = model_config.with_defaults(_read_pretrained_config(keys, model_config))
    model_type = _read_model_type(config)
    _check_supported_values(config, model_type)
    return MindFormersModel(
        sizes=_read_dimensions(config, model_type, _read_seq_length(keys, config), notes),
        attention="fused" if config.flag("use_flash_attention", True) else "explicit",
        param_dtype=read_dtype(config, "params_dtype", "float32", notes),
        compute_dtype=read_dtype(config, "compute_dtype", "bfloat16", notes),
        adaptation=Adaptation(),
    )


def _read_pretrained_config(keys: Keys, model_config: Keys) -> Mapping[str, Any]:
    """Read the `config.json` in `pretrained_model_dir`; {} if the MindFormers file has sizes."""
    folder = keys.string("pretrained_model_dir")
    if not folder:
        return {}
    file = Path(folder) / "config.json"
    # The folder may be missing on this machine if the file has the sizes itself.
    if not file.exists() and model_config.has("num_hidden_layers"):
        return {}
    if not file.exists():
        raise keys.error(
            "pretrained_model_dir",
            f"no such file: {file}\nset it to the folder of a model of `transformers`",
        )
    content = parse_json(read_text(file, ConfigError), str(file), ConfigError)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file}: not a mapping\nuse the `config.json` of a model")
    return content


def _read_model_type(config: Keys) -> str:
    valid = list(_FAMILIES)
    architectures = config.any("architectures")
    # `config.json` has a list of one class.
    name = architectures[0] if isinstance(architectures, list) and architectures else architectures
    # `model_type` wins over the class in `architectures`.
    if not config.has("model_type"):
        types = {_remove_underscores(model_type): model_type for model_type in valid}
        # `Qwen3MoeForCausalLM` is the class of `qwen3_moe`.
        prefix = str(name).removesuffix("ForCausalLM").lower()
        if prefix in types:
            return types[prefix]
    elif config.string("model_type") in valid:
        return config.string("model_type")
    value = config.string("model_type") if config.has("model_type") else name
    if value is None:
        raise config.error(
            "model_type",
            "the key is missing\nset it, or `pretrained_model_dir` to the folder of a model of"
            " `transformers`",
        )
    remedy = "build the model with `transformers`, and call `shardwright.parallelize`"
    raise config.error(
        "model_type",
        f"{value!r} is not supported\nuse one of {', '.join(valid)}; for others, {remedy}",
    )


def _remove_underscores(model_type: str) -> str:
    return model_type.replace("_", "")


def _check_supported_values(config: Keys, model_type: str) -> None:
    # Qwen3 always normalizes queries and keys.
    only_values = {**_ONLY_VALUES, **({"qk_layernorm": True} if "qwen3" in model_type else {})}
    for name, value in only_values.items():
        read = config.flag if isinstance(value, bool) else config.number
        if read(name, value) != value:  # type: ignore[arg-type]
            raise config.error(name, f"{config.any(name)} is not supported\nset it to {value}")
    config.string("position_embedding_type", "rope", valid=("rope", "yarn"))
    # MindFormers' `swiglu` is a gated SiLU, as `silu` of these models in `transformers`.
    config.string("hidden_act", "silu", valid=("silu", "swiglu"))
    config.string("normalization", "RMSNorm", valid=("RMSNorm",))
    normalizes = config.flag("norm_topk_prob", model_type == "deepseek_v3")
    if not config.flag("moe_router_pre_softmax", True) and not normalizes:
        raise config.error(
            "moe_router_pre_softmax",
            "False computes the softmax of the chosen experts only\nset it to True, and"
            " norm_topk_prob to True, which computes the same",
        )


def _read_seq_length(keys: Keys, config: Keys) -> int:
    """Read the sequence length: `seq_length` of the model, else of the dataset, else
    `max_position_embeddings`."""
    if config.has("seq_length"):
        return config.integer("seq_length")
    loader = keys.section("train_dataset").section("data_loader")
    if loader.section("config").has("seq_length"):
        return loader.section("config").integer("seq_length")
    handlers = loader.any("handler") or []
    for index, handler in enumerate(handlers if isinstance(handlers, list) else []):
        if isinstance(handler, Mapping) and handler.get("seq_length") is not None:
            path = f"train_dataset.data_loader.handler[{index}]"
            return Keys(handler, path, keys.file).integer("seq_length")
    return config.integer("max_position_embeddings")


def _read_dimensions(
    config: Keys, model_type: str, seq_length: int, notes: list[str]
) -> Dimensions:
    family, arguments = _FAMILIES[model_type]
    heads = config.integer("num_attention_heads")
    expert_names = MODEL_TYPES[family][1]
    sizes: dict[str, Any] = {}
    # Dense families have no arguments for experts.
    for field, name in zip(("num_experts", "experts_per_token"), expert_names, strict=False):
        sizes[field] = config.integer(name)
    # The width of an expert, where it is not that of dense layers.
    width = expert_names[2] if len(expert_names) > 2 else "intermediate_size"
    hf = {name: config.any(name) for name in ("head_dim", *arguments) if config.has(name)}
    if model_type == "deepseek_v3":
        # Only the rotary dimensions; `transformers` derives it from this key too.
        hf["head_dim"] = config.integer("qk_rope_head_dim")
        # None is a value: queries without a latent.
        hf["q_lora_rank"] = config.any("q_lora_rank")
        # 0 stands for no groups, which is one group of all experts.
        hf |= {
            name: config.integer(name, minimum=0) or 1
            for name in ("n_group", "topk_group")
            if config.has(name)
        }
    # Megatron-LM's key for the opposite of `tie_word_embeddings`.
    if not config.flag("untie_embeddings_and_output_weights", not _read_tied_embeddings(config)):
        hf["tie_word_embeddings"] = True
    if scaling := _read_rope_scaling(config):
        hf["rope_parameters"] = scaling
    _note_keys_without_effect(config, arguments, notes)
    try:
        return Dimensions(
            family=family,
            hidden_size=config.integer("hidden_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.integer("num_key_value_heads", heads),
            intermediate_size=config.integer(width),
            vocab_size=config.integer("vocab_size"),
            seq_length=seq_length,
            # The default of `transformers`.
            norm_eps=config.number("rms_norm_eps", 1e-6, above=0),
            rope_base=_read_rope_base(config),
            hf=hf,
            **sizes,
        )
    except ConfigError as error:
        # Errors of keys name the file already.
        if str(error).startswith(config.file):
            raise
        raise ConfigError(f"{config.file}: {config.path}: {error}") from None


def _read_tied_embeddings(config: Keys) -> bool:
    return config.flag("tie_word_embeddings", False)


def _read_rope_base(config: Keys) -> float:
    """Read `rope_theta`, in newer configurations a key of `rope_parameters`."""
    section = config.section("rope_parameters")
    source = section if section.has("rope_theta") else config
    return source.number("rope_theta", 10000.0, above=0)


def _read_rope_scaling(config: Keys) -> dict[str, Any]:
    """Convert the scaling of rotary positions to `rope_parameters` of `transformers`."""
    name = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    section = config.section(name)
    # `rope_theta` is not scaling; `_read_rope_base` reads it.
    scaling = {key: section.any(key) for key in section.content if key != "rope_theta"}
    # `type` is the older name of `rope_type`.
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    return {} if scaling.get("rope_type", "default") == "default" else scaling


def _note_keys_without_effect(config: Keys, arguments: tuple[str, ...], notes: list[str]) -> None:
    reasons = dict(_KEYS_WITHOUT_EFFECT)
    if (
        "routed_scaling_factor" not in arguments
        and config.number("routed_scaling_factor", 1.0) != 1
    ):
        reasons["routed_scaling_factor"] = (
            "the router of this model in `transformers` has no factor"
        )
    for name, reason in reasons.items():
        if config.number(name, 0.0):
            notes.append(f"{config.path}.{name} has no effect: {reason}")
