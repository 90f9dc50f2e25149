"""Sizes of the published models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.errors import ConfigError
from shardwright.models.sizes import COMPUTE_DTYPES, MODELS, dimensions, feed_forward_size

PUBLISHED = [name for name in MODELS if not name.endswith("_tiny")]


@pytest.mark.parametrize(
    ("hidden", "multiple", "multiplier", "size"),
    [
        (4096, 256, None, 11008),
        (5120, 256, None, 13824),
        (8192, 256, 1.3, 28672),
        (5120, 128, None, 13696),
    ],
)
def test_the_width_of_feed_forward_layers_follows_the_published_rule(
    hidden: int, multiple: int, multiplier: float | None, size: int
) -> None:
    assert feed_forward_size(hidden, multiple, multiplier) == size


def test_nine_models_are_known_each_with_a_tiny_one() -> None:
    assert len(PUBLISHED) == 9
    assert {f"{name}_tiny" for name in PUBLISHED} | set(PUBLISHED) == set(MODELS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tiny_model_divides_by_eight_and_keeps_the_architecture(name: str) -> None:
    whole, tiny = MODELS[name], MODELS[f"{name}_tiny"]
    sizes = (tiny.hidden_size, tiny.num_kv_heads, tiny.intermediate_size, tiny.vocab_size)
    assert all(size % 8 == 0 for size in sizes)
    assert (tiny.family, tiny.positions) == (whole.family, whole.positions)
    assert (tiny.num_kv_heads < tiny.num_heads) == (whole.num_kv_heads < whole.num_heads)


def test_an_unknown_model_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown model 'llama3_8b'\nuse one of llama2_7b, "):
        dimensions("llama3_8b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 7}, "hidden_size=4096 is not divisible by num_heads=7"),
        ({"num_kv_heads": 5}, "num_heads=32 is not divisible by num_kv_heads=5"),
        ({"vocab_size": 0}, "vocab_size=0 is not a positive integer"),
        ({"num_layers": "32"}, "num_layers='32' is not a positive integer"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 is not positive"),
        ({"dropout": 1.0}, "dropout=1.0 is not in"),
        ({"num_heads": 4096, "num_kv_heads": 1}, "an even head size, not 1 = hidden_size 4096"),
        ({"family": "pangualpha", "num_layers": 1}, "is its query layer"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(MODELS["llama2_7b"], **changes)  # type: ignore[arg-type]


def test_every_published_model_has_the_dtype_that_it_was_trained_in_and_a_tiny_one_none() -> None:
    assert set(COMPUTE_DTYPES) == set(PUBLISHED)
    assert set(COMPUTE_DTYPES.values()) == {"bfloat16"}
