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
    """Wraps a causal language model of `transformers` so that its call returns the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean next-token loss; both arguments are `[batch, positions]`."""
        loss: Tensor = self.net(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def causal_lm(source: str | Path | Mapping[str, Any], attention: Attention) -> nn.Module:
    """A randomly initialized model.

    Args:
        source: path of a `config.json` (or of its folder), or the arguments of
            `AutoConfig.for_model`: `{"model_type": "gpt2", "n_layer": 2}`.

    Raises:
        ConfigError: if the file does not exist, or `transformers` does not know the model or cannot
            build it with these arguments.
    """
    with needs_extra("transformers", "hf: a model of transformers needs transformers", ConfigError):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = hf_config(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"hf: transformers has no causal language model {config.model_type!r}")
    if getattr(config, "num_hidden_layers", 0) > MAX_LAYERS:
        raise ConfigError(f"hf: {config.num_hidden_layers} layers: at most {MAX_LAYERS} are built")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = _implementation(kind, config, attention)
    try:
        return CausalLM(kind(config))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"hf: {config.model_type}: {_first_line(error)}") from error


def _implementation(kind: Any, config: Any, attention: Attention) -> str | None:
    """Our attention if the model supports it; the model's own for soft-capped scores or sinks."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    if not kind._supports_sdpa or not kind.is_backend_compatible():
        return None
    return register_with_transformers(attention)


def hf_config(source: str | Path | Mapping[str, Any]) -> Any:
    """The configuration that `causal_lm` builds a model of. Raises: ConfigError: as `causal_lm`."""
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
    """The dtype that a configuration names (`dtype`, earlier `torch_dtype`), bfloat16 in place of
    float16, which needs a scaled loss; None for none or float32.

    Raises:
        ConfigError: as `causal_lm`.
    """
    config = hf_config(source)
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(named).removeprefix("torch.")
    return "bfloat16" if name in ("bfloat16", "float16") else None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
