"""Supported architectures of MindFormers, and reasons why others are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from shardwright.mindformers.keys import Keys, UnsupportedModelError
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
    "DeepseekV3ForCausalLM": ("deepseek_v3", "rotary", "DeepseekV3Config"),
    # Only its sharding differs from that of LLaMA with experts.
    "MixtralForCausalLM": ("llama", "rotary", "LlamaConfig"),
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
    "CogVLM2": "reads images and videos",
    "QwenVL": "reads images",
    "Mllama": "reads images",
    "CLIP": "reads images",
    "ViT": "reads images",
    "Swin": "reads images",
    "Whisper": "reads sound",
    "GPT2ForSequenceClassification": "is trained on a label of each text",
    "Bert": "reads a text in both directions",
    "T5": "has an encoder",
}
"""Reason why an architecture is not supported, by prefix of its name; ends an error message."""


def read_architecture(arch: Keys) -> tuple[str, Positions, str]:
    """Read `model.arch`.

    Returns:
        The model family, its position encoding, and the required `model.model_config.type`.

    Raises:
        ConfigError: if the architecture is missing, or similar to a supported one.
        UnsupportedModelError: if another architecture is not supported.
    """
    valid = ", ".join(_ARCHITECTURES)
    if not arch.has("type"):
        raise arch.error("type", f"the key is missing\nuse one of {valid}")
    name = arch.string("type")
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    remedy = "build the model yourself, or with `transformers`, and call `shardwright.parallelize`"
    tasks = [task for begin, task in _UNSUPPORTED_TASKS.items() if name.startswith(begin)]
    problem = (
        f"{name} {tasks[0]}, but only causal language models on text are supported\n{remedy}"
        if tasks
        else f"{name!r} is not supported\nuse one of {valid}; for others, {remedy}"
    )
    error = arch.error("type", problem)
    # All but misspelled names: 1 is equality; most names end alike.
    if tasks or not get_close_matches(name, _ARCHITECTURES, cutoff=0.9):
        raise UnsupportedModelError(str(error), error.key)
    raise error
