"""Published dimensions of the language models that Shardwright builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from shardwright.errors import ConfigError

MAX_LAYERS = 512
"""Maximum number of blocks, as capture takes minutes beyond it; published models have up to 126."""

Gelu = Literal["gelu", "gelu_tanh", "fast_gelu"]
Positions = Literal["rotary", "alibi", "learned"]


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The dimensions of a language model.

    Args:
        family: a key of `FAMILIES` in `models/build.py`. `llama`, `telechat` (biases in the output
            projections of attention and MLP), `qwen` (biases in the QKV projections), `qwen3`,
            `glm`, `mixtral`, `qwen_moe`, `qwen3_moe`, `deepseek_v2` and `deepseek_v3` are built on
            `transformers`; `baichuan1`, `baichuan` (Baichuan 2), `pangualpha` and `gpt` (GPT-2) are
            modules of this package.
        hidden_size: width of the residual stream.
        num_layers: number of blocks; in PanguAlpha the last one is the query layer.
        num_heads: number of query heads.
        num_kv_heads: key-value heads, each shared by `num_heads / num_kv_heads` query heads.
        intermediate_size: width of the feed-forward layers, or of each expert.
        vocab_size: number of tokens in the vocabulary.
        seq_length: maximum sequence length; only learned positions depend on it.
        norm_eps: epsilon of RMSNorm and LayerNorm.
        positions: the position encoding.
        rope_base: base of the rotary frequencies.
        dropout: dropout probability of embeddings, attention weights and the outputs of residual
            branches; only families without experts have dropout.
        logit_scale: factor of the logits, for families built on `transformers`.
        activation: GELU of GPT: exact, tanh approximation, or sigmoid approximation.
        num_experts: number of experts of MoE models.
        experts_per_token: number of experts to which each token is routed.
        hf: further arguments of the `transformers` configuration, for families built on it, for
            example `{"tie_word_embeddings": True}`.

    Raises:
        ConfigError: if a size is not a positive integer, or `hidden_size` or the numbers of heads
            are not divisible.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    seq_length: int
    norm_eps: float
    positions: Positions = "rotary"
    rope_base: float = 10000.0
    dropout: float = 0.0
    logit_scale: float = 1.0
    activation: Gelu = "gelu"
    num_experts: int = 1
    experts_per_token: int = 1
    hf: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_sizes_and_options()
        # With `head_dim`, the sizes of all heads need not add up to the hidden size.
        if self.hidden_size % self.num_heads and "head_dim" not in self.hf:
            raise ConfigError(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}\n"
                "use a multiple of num_heads as hidden_size"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}\n"
                "use a divisor of num_heads as num_kv_heads"
            )
        # Rotary positions rotate pairs of features.
        if self.positions == "rotary" and self.head_size % 2:
            raise ConfigError(
                f"rotary positions need an even head size, not {self.head_size} = "
                f"hidden_size {self.hidden_size} / num_heads {self.num_heads}\n"
                "use a hidden_size that is a multiple of 2 · num_heads"
            )
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} is more than"
                f" num_experts={self.num_experts}\nuse at most num_experts"
            )
        if self.family == "pangualpha" and self.num_layers < 2:
            raise ConfigError(
                f"num_layers={self.num_layers}: the last layer of PanguAlpha is its query layer\n"
                "use at least 2"
            )

    def _check_sizes_and_options(self) -> None:
        literals = (("positions", Positions), ("activation", Gelu))
        for name, valid in ((name, get_args(literal)) for name, literal in literals):
            if getattr(self, name) not in valid:
                raise ConfigError(
                    f"unknown {name}={getattr(self, name)!r}\nuse one of {', '.join(valid)}"
                )
        # Annotations are strings in this module.
        for name in (each.name for each in fields(self) if each.type == "int"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} is not a positive integer\nuse at least 1")
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(
                f"num_layers={self.num_layers} is too many: capture would take minutes\n"
                f"use at most {MAX_LAYERS}"
            )
        for name in ("norm_eps", "rope_base", "logit_scale"):
            value = getattr(self, name)
            # `not … > 0` also rejects NaN.
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name}={value!r} is not positive\nuse for example {name}=1.0")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout!r} is not in [0, 1)\nuse for example 0.1")

    @property
    def head_size(self) -> int:
        """Size of an attention head: `head_dim` of `hf`, or hidden_size / num_heads."""
        size: int = self.hf.get("head_dim", self.hidden_size // self.num_heads)
        return size

    def tiny(self) -> Dimensions:
        """Return the same architecture with sizes small enough for tests, all divisible by 8.

        Grouped-query attention remains. The vocabulary is large enough for a byte-level tokenizer.
        """
        has_groups = self.num_kv_heads < self.num_heads
        return replace(
            self,
            hidden_size=64,
            num_layers=2,
            # With groups, two query heads share each key-value head.
            num_heads=16 if has_groups else 8,
            num_kv_heads=8,
            intermediate_size=128,
            vocab_size=320,
            seq_length=64,
            dropout=0.0,
        )


def feed_forward_size(
    hidden_size: int, multiple_of: int, ffn_dim_multiplier: float | None = None
) -> int:
    """Compute the default width of LLaMA's feed-forward layers.

    Args:
        hidden_size: width of the residual stream.
        multiple_of: the width is rounded up to a multiple of this number.
        ffn_dim_multiplier: factor of the width, as in LLaMA 2 70B.
    """
    size = 4 * hidden_size
    if ffn_dim_multiplier is not None:
        # The published width of LLaMA 2 70B is 28672; without the 0.01 it would be 28416.
        size = int((ffn_dim_multiplier + 0.01) * size)
    # 2/3 of the usual width, as SwiGLU has three matrices instead of two (Shazeer, 2020).
    size = int(2 * size / 3)
    return -(-size // multiple_of) * multiple_of


def _make_dimensions(
    family: str, width: int, layers: int, heads: int, ffn: int, vocabulary: int, **changes: Any
) -> Dimensions:
    return Dimensions(
        family=family,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        **{"num_kv_heads": heads, "seq_length": 4096, "norm_eps": 1e-6, **changes},
    )


_LLAMA: Mapping[str, Any] = {"norm_eps": 1e-5}
_QWEN: Mapping[str, Any] = {"seq_length": 8192}
_PANGU: Mapping[str, Any] = {
    "seq_length": 1024,
    "norm_eps": 1e-5,
    "positions": "learned",
    "dropout": 0.1,
}

_PUBLISHED = {
    "llama2_7b": _make_dimensions("llama", 4096, 32, 32, 11008, 32000, **_LLAMA),
    "llama2_13b": _make_dimensions("llama", 5120, 40, 40, 13824, 32000, **_LLAMA),
    "llama2_70b": _make_dimensions("llama", 8192, 80, 64, 28672, 32000, num_kv_heads=8, **_LLAMA),
    "qwen_7b": _make_dimensions("qwen", 4096, 32, 32, 11008, 151936, **_QWEN),
    "qwen_14b": _make_dimensions("qwen", 5120, 40, 40, 13696, 152064, **_QWEN),
    "baichuan2_7b": _make_dimensions("baichuan", 4096, 32, 32, 11008, 125696),
    "baichuan2_13b": _make_dimensions("baichuan", 5120, 40, 40, 13696, 125696, positions="alibi"),
    "pangualpha_2_6b": _make_dimensions("pangualpha", 2560, 32, 32, 4 * 2560, 40000, **_PANGU),
    "pangualpha_13b": _make_dimensions("pangualpha", 5120, 40, 40, 4 * 5120, 40000, **_PANGU),
}

MODELS: Mapping[str, Dimensions] = {
    **_PUBLISHED,
    **{f"{name}_tiny": dimensions.tiny() for name, dimensions in _PUBLISHED.items()},
}
"""Dimensions of the built-in models, by name; `llama2_7b_tiny` is `llama2_7b` scaled for tests."""

COMPUTE_DTYPES: Mapping[str, str] = dict.fromkeys(_PUBLISHED, "bfloat16")
"""Compute dtype of the published training, with float32 parameters in the optimizer, by model. Tiny
models have none. Sources: LLaMA 2: its page in the documentation of `transformers` ("trained using
bfloat16"). Qwen (Bai et al., 2023, section 2.4) and Baichuan 2 (Yang et al., 2023): bfloat16 mixed
precision. PanguAlpha (Zeng et al., 2021): float16, replaced with bfloat16, which needs no loss
scaling."""


def dimensions(name: str) -> Dimensions:
    """Return the dimensions of a built-in model.

    Raises:
        ConfigError: if no model has this name.
    """
    if name not in MODELS:
        raise ConfigError(
            f"unknown model {name!r}\nuse one of {', '.join(_PUBLISHED)}, each also with the"
            " suffix _tiny"
        )
    return MODELS[name]
