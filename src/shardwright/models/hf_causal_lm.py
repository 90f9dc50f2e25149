"""Any causal language model of `transformers`, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardwright.errors import ConfigError
from shardwright.models.attention import Attention, registered_with_transformers


class CausalLM(nn.Module):
    """A causal language model of `transformers` as a module that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of the next tokens; both arguments are batch × positions."""
        loss: Tensor = self.net(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def causal_lm(source: str | Path | Mapping[str, Any], attention: Attention) -> nn.Module:
    """A model with new weights.

    Args:
        source: path of a `config.json` (or of its folder), or the arguments of
            `AutoConfig.for_model`: `{"model_type": "gpt2", "n_layer": 2}`.

    Raises:
        ConfigError: there is no such file, `transformers` knows no such model, or cannot build it
            in these sizes.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = _config(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"hf: transformers has no causal language model {config.model_type!r}")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = _implementation(kind, config, attention)
    try:
        return CausalLM(kind(config))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"hf: {config.model_type}: {_first_line(error)}") from error


def _implementation(kind: Any, config: Any, attention: Attention) -> str | None:
    """Ours where the model can take it; its own where scores are capped or have sinks."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    if not kind._supports_sdpa or not kind.is_backend_compatible():
        return None
    return registered_with_transformers(attention)


def _config(source: str | Path | Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    if isinstance(source, Mapping):
        if "model_type" not in source:
            raise ConfigError("hf: model_type is missing, for example gpt2")
        try:
            return AutoConfig.for_model(**source)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"hf: {_first_line(error)}") from None
    if not Path(source).exists():
        raise ConfigError(f"hf: there is no file or folder {source}")
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ConfigError(f"hf: {source}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
