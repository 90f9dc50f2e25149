"""Functions under `functools.lru_cache`, whose cache TorchDynamo ignores."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.core.torch_internals.dynamo import DynamoCapture

CALLS: list[int] = []


@cache
def registered_rules() -> dict[str, int]:
    return {}


@lru_cache(4)
def noise(length: int) -> Tensor:
    return torch.randn(length)


@lru_cache(4)
def noise_in_place(length: int) -> Tensor:
    return torch.empty(length).exponential_()


@cache
def logged(length: int) -> int:
    CALLS.append(length)
    return length


@cache
def shape(length: int) -> dict[str, int]:
    parts = {"heads": 2}
    parts["width"] = length // 2
    return parts


def count(x: Tensor) -> Tensor:
    counts = registered_rules()
    counts["calls"] = counts.get("calls", 0) + 1
    return x * counts["calls"]


@pytest.mark.parametrize(
    ("function", "impure"),
    [
        (count, ("registered_rules",)),
        (lambda x: x + noise(len(x)), ("noise",)),
        (lambda x: x + noise_in_place(len(x)), ("noise_in_place",)),
        (lambda x: x * logged(len(x)), ("logged",)),
        (lambda x: x * shape(len(x))["width"] + torch.rand(1), ()),
    ],
)
def test_a_cached_function_is_impure_if_it_or_a_change_of_its_result_has_effects(
    function: Callable[..., Any], impure: tuple[str, ...]
) -> None:
    assert DynamoCapture.of(function, (torch.zeros(4),), {}).impure_caches == impure
