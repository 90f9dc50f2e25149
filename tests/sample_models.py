"""Small models that many tests share. Each function gives `(module, args, kwargs)`, seeded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph, WholeBatch

Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@cache
def captured(model: Callable[..., Model], **options: Any) -> Graph:
    """The graph of a model, which has no memory for its parameters: once for all tests."""
    with torch.device("meta"):
        net, args, kwargs = model(**options)
    return capture(net, args, kwargs)


def captured_micro_batch(
    model: Callable[..., Model], micro_batches: int, batch: int = 4, **options: Any
) -> Graph:
    """The graph of one of so many micro-batches, whose mean loss is that of the batch."""
    graph = captured(model, batch=batch // micro_batches, **options)
    return replace(graph, whole_batch=WholeBatch())


class MLP(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (16, 32, 32, 8)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return F.mse_loss(self.layers[-1](x), target)


class Stack(nn.Module):
    """Parameters of 256 KiB a layer, and activations of as much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


class Network(nn.Module):
    """784-512-512-1 with ReLU: three matrix products without biases."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(784, hidden, bias=False)
        self.layer2 = nn.Linear(hidden, hidden, bias=False)
        self.layer3 = nn.Linear(hidden, 1, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.relu(self.layer1(self.flatten(x)))
        x = self.relu(self.layer2(x))
        return F.binary_cross_entropy_with_logits(self.layer3(x).squeeze(-1), y)


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet-18 in small: four stages of two blocks unless said otherwise."""

    def __init__(self, width: int = 8, blocks: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=True)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, channels = [], width
        for index, count in enumerate(blocks):
            out = width * 2**index
            first = BasicBlock(channels, out, 1 if index == 0 else 2)
            stages.append(
                nn.Sequential(first, *(BasicBlock(out, out, 1) for _ in range(count - 1)))
            )
            channels = out
        self.stages = nn.ModuleList(stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.fc(torch.flatten(self.avgpool(x), 1)), labels)


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a classifier."""

    def __init__(self, width: int, heads: int, layers: int, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 11)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x)).transpose(1, 2), labels)


def mlp(batch: int = 8, sizes: tuple[int, ...] = (16, 32, 32, 8)) -> Model:
    torch.manual_seed(0)
    net = MLP(sizes)
    return net, (torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])), {}


def network(batch: int = 8, hidden: int = 512) -> Model:
    torch.manual_seed(0)
    net = Network(hidden)
    return net, (torch.randn(batch, 1, 28, 28), torch.randint(0, 2, (batch,)).float()), {}


def resnet(batch: int = 4, width: int = 8, blocks: tuple[int, ...] = (2, 2, 2, 2)) -> Model:
    torch.manual_seed(0)
    net = ResNet(width, blocks)
    return net, (torch.randn(batch, 3, 64, 64), torch.randint(0, 10, (batch,))), {}


def encoder(batch: int = 4, sequence: int = 8, width: int = 16, norm_first: bool = False) -> Model:
    torch.manual_seed(0)
    net = Encoder(width, 4, 2, norm_first)
    return net, (torch.randn(batch, sequence, width), torch.randint(0, 11, (batch, sequence))), {}


def _language_model(net: nn.Module, vocabulary: int, batch: int, sequence: int) -> Model:
    ids = torch.randint(0, vocabulary, (batch, sequence))
    return net, (), {"input_ids": ids, "labels": ids}


def llama(
    batch: int = 4,
    sequence: int = 8,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 32,
    vocabulary: int = 64,
    **options: Any,
) -> Model:
    """LLaMA with grouped key and value heads, of `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max(64, sequence),
        **options,
    )
    net, args, kwargs = _language_model(LlamaForCausalLM(config), vocabulary, batch, sequence)
    return net, args, {**kwargs, "use_cache": False}


def gpt2(
    batch: int = 4,
    sequence: int = 8,
    layers: int = 2,
    heads: int = 4,
    width: int = 32,
    vocabulary: int = 64,
    dropout: float = 0.0,
) -> Model:
    """GPT-2 of `transformers`; its embedding and its output layer share one weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=max(64, sequence),
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    net, args, kwargs = _language_model(GPT2LMHeadModel(config), vocabulary, batch, sequence)
    return net.train(), args, {**kwargs, "use_cache": False}


def bert(
    batch: int = 4,
    sequence: int = 8,
    layers: int = 2,
    heads: int = 4,
    width: int = 32,
    vocabulary: int = 64,
    dropout: float = 0.0,
) -> Model:
    """BERT for masked language modeling, of `transformers`."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=max(64, sequence),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _language_model(BertForMaskedLM(config).train(), vocabulary, batch, sequence)
