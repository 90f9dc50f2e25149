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
    """A causal language model of `transformers` whose call returns the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean next-token loss; both arguments are `[batch, positions]`."""
        loss: Tensor = self.net(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def causal_lm(source: str | Path | Mapping[str, Any], attention: Attention) -> nn.Module:
    """Build a randomly initialized model.

    Args:
        source: path of a `config.json` (or of its folder), or the arguments of
            `AutoConfig.for_model`, for example `{"model_type": "gpt2", "n_layer": 2}`.
        attention: the attention implementation, if the model supports it.

    Raises:
        ConfigError: the file does not exist, or `transformers` does not have the model, or cannot
            build it with these arguments.
    """
    with needs_extra("transformers", "hf: a model of transformers needs transformers", ConfigError):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = hf_config(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"hf: transformers has no causal language model {config.model_type!r}")
    if getattr(config, "num_hidden_layers", 0) > MAX_LAYERS:
        raise ConfigError(
            f"hf: the model has {config.num_hidden_layers} layers; supported are at most"
            f" {MAX_LAYERS}"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = _attention_implementation(model_class, config, attention)
    try:
        return CausalLM(model_class(config))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"hf: {config.model_type}: {_first_line(error)}") from error


def _attention_implementation(model_class: Any, config: Any, attention: Attention) -> str | None:
    """Our attention if the model supports it, else the model's own."""
    # Soft-capping (Gemma 2) changes scores before the softmax; models with attention sinks are not
    # compatible with attention backends.
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    if not model_class._supports_sdpa or not model_class.is_backend_compatible():
        return None
    return register_with_transformers(attention)


def hf_config(source: str | Path | Mapping[str, Any]) -> Any:
    """Load a configuration of `transformers`, without network access and without running its code.

    Raises:
        ConfigError: see `causal_lm`.
    """
    with needs_extra("transformers", "hf: a model of transformers needs transformers", ConfigError):
        from transformers import AutoConfig

    if isinstance(source, Mapping):
        if "model_type" not in source:
            raise ConfigError("hf: missing model_type, for example gpt2")
        try:
            return AutoConfig.for_model(**source)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"hf: {_first_line(error)}") from None
    if not Path(source).exists():
        raise ConfigError(f"hf: no such file or folder: {source}")
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"hf: {source}: {_first_line(error)}") from None


def hf_compute_dtype(source: str | Path | Mapping[str, Any]) -> str | None:
    """The 16-bit compute dtype of a configuration; None if it names none or float32.

    Reads `dtype` (`torch_dtype` in older files). bfloat16 replaces float16, which would need loss
    scaling.

    Raises:
        ConfigError: see `causal_lm`.
    """
    config = hf_config(source)
    # Multimodal configurations have the dtype in the one of their text model.
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(dtype).removeprefix("torch.")
    return "bfloat16" if name in ("bfloat16", "float16") else None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
