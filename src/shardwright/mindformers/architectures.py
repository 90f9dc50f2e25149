"""The architectures of MindFormers that are built here, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.mindformers.keys import Keys
from shardwright.models.sizes import Positions

_ARCHITECTURES: Mapping[str, tuple[str, Positions, str]] = {
    "LlamaForCausalLM": ("llama", "rotary", "LlamaConfig"),
    "InternLMForCausalLM": ("llama", "rotary", "InternLMConfig"),
    "InternLM2ForCausalLM": ("llama", "rotary", "InternLM2Config"),
    "TelechatForCausalLM": ("telechat", "rotary", "TelechatConfig"),
    "ChatGLM2ForConditionalGeneration": ("glm", "rotary", "ChatGLM2Config"),
    "ChatGLM2WithPtuning2": ("glm", "rotary", "ChatGLM2Config"),
    "QwenForCausalLM": ("qwen", "rotary", "QwenConfig"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "rotary", "DeepseekV2Config"),
    "Baichuan7BForCausalLM": ("llama", "rotary", "LlamaConfig"),
    "Baichuan13BForCausalLM": ("baichuan1", "alibi", "LlamaConfig"),
    "Baichuan7BV2ForCausalLM": ("baichuan", "rotary", "LlamaConfig"),
    "Baichuan13BV2ForCausalLM": ("baichuan", "alibi", "LlamaConfig"),
    "GPT2LMHeadModel": ("gpt", "learned", "GPT2Config"),
    "PanguAlphaHeadModel": ("pangualpha", "learned", "PanguAlphaConfig"),
}

_REASONS: Mapping[str, str] = {
    "CogVLM2ForCausalLM": "reads images and videos",
    "CogVLM2ForCausalLMVideo": "reads images and videos",
    "QwenVL": "reads images",
    "WhisperForConditionalGeneration": "reads sound",
    "GPT2ForSequenceClassification": "is trained on a label of each text",
}
"""What those do that are no models of the next token."""


def read_architecture(arch: Keys) -> tuple[str, Positions, str]:
    """Family, positions, and the type that the model's configuration must have.

    Raises:
        ConfigError: none, or one that is not built here; the message says what else would do.
    """
    valid = ", ".join(_ARCHITECTURES)
    if not arch.has("type"):
        raise arch.error("type", f"missing; valid are {valid}")
    name = arch.text("type")
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    own = "build it as a module of your own, or of transformers, and call shardwright.parallelize"
    if name in _REASONS:
        problem = f"{_REASONS[name]}, but these files train models of the next token of a text"
        raise arch.error("type", f"{name} {problem}: {own}")
    raise arch.error("type", f"{name!r} is not known; valid are {valid}; any other: {own}")
