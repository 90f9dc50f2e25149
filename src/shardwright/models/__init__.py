"""Language models that return their loss: LLaMA 2, Qwen, Baichuan 2, PanguAlpha, and every causal
language model of `transformers`.

>>> from shardwright.models import MODELS
>>> MODELS["llama2_7b"].hidden_size
4096
"""

from shardwright.models.build import build, build_hf, example_batch
from shardwright.models.lora import LoRA
from shardwright.models.prefix import PrefixTuning
from shardwright.models.sizes import MODELS, Dimensions, dimensions

__all__ = [
    "MODELS",
    "Dimensions",
    "LoRA",
    "PrefixTuning",
    "build",
    "build_hf",
    "dimensions",
    "example_batch",
]
