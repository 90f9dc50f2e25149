"""Supported architectures of MindFormers, and reasons why others are not supported."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.mindformers.keys import Keys
from shardwright.models.sizes import Positions

_ARCHITECTURES: Mapping[str, tuple[str, Positions, str]] = {
    "LlamaForCausalLM": ("llama", "rotary", "LlamaConfig"),
    # InternLM is LLaMA with biases, which are read with the sizes.
    "InternLMForCausalLM": ("llama", "rotary", "InternLMConfig"),
    "InternLM2ForCausalLM": ("llama", "rotary", "InternLM2Config"),
    "TelechatForCausalLM": ("telechat", "rotary", "TelechatConfig"),
    "ChatGLM2ForConditionalGeneration": ("glm", "rotary", "ChatGLM2Config"),
    "ChatGLM2WithPtuning2": ("glm", "rotary", "ChatGLM2Config"),
    "QwenForCausalLM": ("qwen", "rotary", "QwenConfig"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "rotary", "DeepseekV2Config"),
    # Baichuan 7B is LLaMA; the 13B models have ALiBi, and version 2 a normalized head.
    "Baichuan7BForCausalLM": ("llama", "rotary", "LlamaConfig"),
    "Baichuan13BForCausalLM": ("baichuan1", "alibi", "LlamaConfig"),
    "Baichuan7BV2ForCausalLM": ("baichuan", "rotary", "LlamaConfig"),
    "Baichuan13BV2ForCausalLM": ("baichuan", "alibi", "LlamaConfig"),
    "GPT2LMHeadModel": ("gpt", "learned", "GPT2Config"),
    "PanguAlphaHeadModel": ("pangualpha", "learned", "PanguAlphaConfig"),
}
"""Model family, position encoding and `model.model_config.type`, by `model.arch.type`."""

_UNSUPPORTED_TASKS: Mapping[str, str] = {
    "CogVLM2ForCausalLM": "reads images and videos",
    "CogVLM2ForCausalLMVideo": "reads images and videos",
    "QwenVL": "reads images",
    "WhisperForConditionalGeneration": "reads sound",
    "GPT2ForSequenceClassification": "is trained on a label of each text",
}
"""Task of each unsupported architecture, as the predicate of an error message."""


def read_architecture(arch: Keys) -> tuple[str, Positions, str]:
    """Read `model.arch`.

    Returns:
        The model family, its position encoding, and the required `model.model_config.type`.

    Raises:
        ConfigError: if the architecture is missing or not supported.
    """
    valid = ", ".join(_ARCHITECTURES)
    if not arch.has("type"):
        raise arch.error("type", f"the key is missing\nuse one of {valid}")
    name = arch.string("type")
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    remedy = "build the model yourself, or with `transformers`, and call `shardwright.parallelize`"
    if name in _UNSUPPORTED_TASKS:
        raise arch.error(
            "type",
            f"{name} {_UNSUPPORTED_TASKS[name]}, but only causal language models on text are"
            f" supported\n{remedy}",
        )
    raise arch.error("type", f"{name!r} is not supported\nuse one of {valid}; for others, {remedy}")
