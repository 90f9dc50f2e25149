import logging
import os
import random
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.core.api.description import description_lines
from shardwright.core.partition.decisions import OptimizerParallel

MODEL = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from shardwright.core.api.description import description_lines

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=8)
        self.llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        self.tags = {"one", "two", "three"}
        self.act = nn.functional.gelu

    def forward(self, ids):
        return self.llama(ids).logits if ids.dtype in {torch.int64, torch.int32} else "none"

print("\\n".join(description_lines(Named())))
"""


class Scaled(nn.Module):
    """All that a description looks at."""

    def __init__(
        self,
        scale: float = 1.0,
        act: object = torch.relu,
        table: Tensor | None = None,
        numbers: np.ndarray | None = None,
        options: object = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale, self.act, self.options = scale, act, options
        self.table = torch.zeros(3) if table is None else table
        self.numbers = np.zeros(3) if numbers is None else numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def doubled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def closed_over(factor: float) -> object:
    return lambda x: x * factor


def text(net: object) -> str:
    return "\n".join(description_lines(net))


@pytest.mark.slow
def test_a_description_is_the_same_in_every_process() -> None:
    texts = [
        subprocess.run(
            [sys.executable, "-c", MODEL],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "changed",
    [
        Scaled(2.0),
        Scaled(act=torch.tanh),
        Scaled(act=doubled),
        Scaled(table=torch.ones(3)),
        Scaled(numbers=np.ones(3)),
        Scaled(options=SimpleNamespace(dropout=0.1)),
        Scaled().eval(),
        Scaled().requires_grad_(False),
        Scaled().double(),
        nn.Sequential(Scaled()),
    ],
)
def test_a_model_that_computes_something_else_is_described_otherwise(changed: nn.Module) -> None:
    assert text(changed) != text(Scaled())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (closed_over(1.0), closed_over(2.0)),
        (partial(doubled, by=1.0), partial(doubled, by=2.0)),
        (lambda x: x + 1, lambda x: x - 1),
        (lambda x: x.relu(), lambda x: x.tanh()),
        (Scaled(1.0).forward, Scaled(2.0).forward),
        ({"a": {1, 2}}, {"a": {1, 3}}),
        (torch.float32, torch.float64),
        (torch.relu, torch.tanh),
        (torch.ops.aten.relu.default, torch.ops.aten.tanh.default),
        (random.Random(0), random.Random(1)),
        (np.random.default_rng(0), np.random.default_rng(1)),
        (OptimizerParallel("level1"), OptimizerParallel("level2")),
    ],
)
def test_functions_and_containers_are_looked_into(one: object, other: object) -> None:
    assert text(one) != text(other)
    assert text(one) == text(one)


def test_values_of_parameters_and_buffers_and_indices_of_devices_do_not_matter() -> None:
    assert text(Scaled()) == text(Scaled())
    assert text(nn.BatchNorm1d(3)) == text(nn.BatchNorm1d(3))
    assert text(torch.device("cuda", 0)) == text(torch.device("cuda", 1))


def test_what_refers_to_itself_is_described_once() -> None:
    net = Scaled()
    net.options = [net, net.linear]
    loop: list[object] = []
    loop.append(loop)
    assert text(net) == text(net)
    assert text(loop) == "builtins.list\nnumber 0"
    assert text([threading.Lock(), logging.getLogger("a")]) == text(
        [threading.Lock(), logging.getLogger("a")]
    )
