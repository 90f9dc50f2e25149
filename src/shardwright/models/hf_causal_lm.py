"""Causal language models of `transformers`, built from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardwright.errors import ConfigError, needs_extra
from shardwright.models.attention import Attention, register_with_transformers
from shardwright.models.sizes import MAX_LAYERS


class CausalLM(nn.Module):
    """Wrapper of a causal language model of `transformers` that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean next-token loss; both arguments are `[batch, positions]`."""
        # A cache of keys and values only serves generation.
        loss: Tensor = self.net(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def causal_lm(source: str | Path | Mapping[str, Any], attention: Attention) -> nn.Module:
    """Build a randomly initialized causal language model.

    Args:
        source: path of a `config.json` (or of its folder), or the arguments of
            `AutoConfig.for_model`, for example `{"model_type": "gpt2", "n_layer": 2}`.
        attention: attention implementation, used if the model supports it.

    Raises:
        ConfigError: if the file does not exist, or `transformers` does not have the model or cannot
            build it with these arguments.
    """
    with needs_extra("transformers", "hf: the model needs `transformers`", ConfigError):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = hf_config(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"hf: `transformers` has no causal language model {config.model_type!r}\n"
            "set `model_type` to one that `AutoModelForCausalLM` can build"
        )
    if getattr(config, "num_hidden_layers", 0) > MAX_LAYERS:
        raise ConfigError(
            f"hf: the model has {config.num_hidden_layers} layers\nuse at most {MAX_LAYERS}"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # The constructor of the model reads it from here.
    config._attn_implementation = _choose_attention_implementation(model_class, config, attention)
    try:
        return CausalLM(model_class(config))
    # Raised for arguments that contradict each other.
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"hf: cannot build a {config.model_type} model: {_get_first_line_of_error(error)}\n"
            "correct the arguments of the configuration"
        ) from error


def _choose_attention_implementation(
    model_class: Any, config: Any, attention: Attention
) -> str | None:
    """Return the `attn_implementation` of a model; None for the default of `transformers`."""
    # Soft-capping (Gemma 2) changes scores before the softmax, and models with attention sinks are
    # not compatible with attention backends.
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    if not model_class._supports_sdpa or not model_class.is_backend_compatible():
        return None
    return register_with_transformers(attention)


def hf_config(source: str | Path | Mapping[str, Any]) -> Any:
    """Load a configuration of `transformers`, without network access or remote code.

    Args:
        source: path of a `config.json` or of its folder, or the arguments of
            `AutoConfig.for_model`.

    Raises:
        ConfigError: if the file does not exist or is invalid, or `transformers` does not have the
            model.
    """
    with needs_extra("transformers", "hf: the model needs `transformers`", ConfigError):
        from transformers import AutoConfig

    if isinstance(source, Mapping):
        if "model_type" not in source:
            raise ConfigError(
                'hf: the argument `model_type` is missing\nset it, for example "model_type": "gpt2"'
            )
        try:
            return AutoConfig.for_model(**source)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"hf: invalid configuration: {_get_first_line_of_error(error)}\n"
                "use the keys of a `config.json` of `transformers`"
            ) from None
    if not Path(source).exists():
        raise ConfigError(
            f"hf: no such file or folder: {source}\nset it to a `config.json` or to its folder"
        )
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"hf: cannot load {source}: {_get_first_line_of_error(error)}\n"
            "use a `config.json` of a model of `transformers`"
        ) from None


def hf_compute_dtype(source: str | Path | Mapping[str, Any]) -> str | None:
    """Return the compute dtype of a configuration; None for float32, or if the configuration names
    no dtype.

    Reads `dtype` (`torch_dtype` in older files). Returns bfloat16 also for float16, which would
    need loss scaling.

    Args:
        source: path of a `config.json` or of its folder, or the arguments of
            `AutoConfig.for_model`.

    Raises:
        ConfigError: if the file does not exist or is invalid, or `transformers` does not have the
            model.
    """
    config = hf_config(source)
    # Multimodal configurations have the dtype in the configuration of their text model.
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(dtype).removeprefix("torch.")
    return "bfloat16" if name in ("bfloat16", "float16") else None


def _get_first_line_of_error(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
