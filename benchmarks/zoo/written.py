"""Models as researchers write them, each with a batch to train it on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.zoo.pictures import (
    Capsules,
    Contrast,
    ConvNeXt,
    Denoiser,
    Detector,
    HashGrid,
    MaskedAutoencoder,
    Mixer,
    QuantizedAutoencoder,
    Radiance,
    RedundancyReduction,
    SelfContrast,
    Slots,
    SpatialTransformer,
    SpectralCritic,
    UNet,
    Windows,
)
from benchmarks.zoo.sequences import (
    AdditiveAttention,
    CapacityExperts,
    ConditionalField,
    Connectionist,
    DeltaRule,
    LinearScan,
    LongConvolution,
    Retention,
    SelectiveScan,
    TemporalConvolutions,
    TopExperts,
    Transducer,
    TransformerOfTorch,
    Universal,
    WaveNet,
    WeightedKeyValue,
)
from benchmarks.zoo.tables import (
    CrossNetwork,
    DeepSets,
    Equivariant,
    FactorizationMachine,
    Flow,
    FourierOperator,
    GraphAttention,
    GraphConvolutions,
    Hypernetwork,
    Interests,
    Molecules,
    NeuralOde,
    NextItems,
    PointCloud,
    Policy,
    Sinkhorn,
    Tabular,
    TwoTowers,
    Variational,
    WideAndDeep,
)

Batch = dict[str, Tensor]


def _words(length: int = 8, many: int = 32, least: int = 1) -> Tensor:
    return torch.randint(least, many, (8, length))


def _pictures(**others: Tensor) -> Batch:
    return {"x": torch.randn(8, 3, 16, 16), **others}


def _pair(first: str, second: str, *shape: int) -> Batch:
    return {first: torch.randn(8, *shape), second: torch.randn(8, *shape)}


def _of(many: int, *shape: int) -> Tensor:
    return torch.randint(many, shape or (8,))


def _graph() -> Batch:
    return {"x": torch.randn(16, 8), "edges": _of(16, 2, 40), "labels": _of(4, 16)}


WRITTEN: dict[str, dict[type[nn.Module], Callable[[], Batch]]] = {
    "sequences": {
        **dict.fromkeys(
            (
                *(SelectiveScan, Retention, WeightedKeyValue, DeltaRule, LinearScan),
                *(LongConvolution, WaveNet, TopExperts, CapacityExperts, Universal),
            ),
            lambda: {"ids": _words()},
        ),
        TemporalConvolutions: lambda: {"x": torch.randn(8, 16, 16), "labels": _of(4)},
        ConditionalField: lambda: {
            "ids": _words(),
            "tags": _of(4, 8, 8),
            "mask": torch.arange(8) < torch.randint(2, 9, (8, 1)),
        },
        Transducer: lambda: {"audio": torch.randn(8, 6, 16), "labels": _words(3)},
        Connectionist: lambda: {
            "audio": torch.randn(8, 16, 16),
            "labels": _words(3),
            "lengths": torch.randint(1, 4, (8,)),
        },
        AdditiveAttention: lambda: {"ids": _words(), "labels": _words(4)},
        TransformerOfTorch: lambda: {"ids": _words(), "labels": _words()},
    },
    "pictures": {
        **dict.fromkeys(
            (Mixer, ConvNeXt, Capsules, SpatialTransformer, Windows),
            lambda: _pictures(labels=_of(4)),
        ),
        **dict.fromkeys((QuantizedAutoencoder, Slots), _pictures),
        **dict.fromkeys(
            (SelfContrast, RedundancyReduction), lambda: _pair("first", "second", 3, 16, 16)
        ),
        UNet: lambda: _pictures(labels=_of(4, 8, 16, 16)),
        Denoiser: lambda: {**_pair("x", "noise", 3, 16, 16), "time": _of(20)},
        SpectralCritic: lambda: _pair("real", "fake", 3, 16, 16),
        Radiance: lambda: {**_pair("origins", "directions", 3), "colors": torch.rand(8, 3)},
        HashGrid: lambda: {"places": torch.rand(16, 2), "colors": torch.rand(16, 3)},
        Contrast: lambda: {"images": torch.randn(8, 3, 16, 16), "ids": _words()},
        MaskedAutoencoder: lambda: _pictures(noise=torch.rand(8, 16)),
        Detector: lambda: _pictures(labels=_of(5, 8, 4, 4) - 1, boxes=torch.rand(8, 4, 4, 4)),
    },
    "tables": {
        **dict.fromkeys((GraphConvolutions, GraphAttention), _graph),
        Molecules: lambda: {
            "kinds": _of(10, 16),
            "places": torch.randn(16, 3),
            "graph": torch.arange(16) // 2,
            "energy": torch.randn(8),
        },
        Equivariant: lambda: {**_pair("x", "wanted", 4, 3), "h": torch.randn(8, 4, 16)},
        DeepSets: lambda: {
            "x": torch.randn(8, 6, 4),
            "sizes": torch.randint(1, 7, (8,)),
            "wanted": torch.randn(8),
        },
        PointCloud: lambda: {"points": torch.randn(8, 16, 3), "labels": _of(4)},
        NeuralOde: lambda: {"x": torch.randn(8, 4), "wanted": torch.randn(4, 8, 4)},
        Flow: lambda: {"x": torch.randn(8, 8)},
        Hypernetwork: lambda: {**_pair("task", "wanted", 8), "x": torch.randn(8, 8, 4)},
        WideAndDeep: lambda: {"numbers": torch.rand(8, 4), **_clicks()},
        FactorizationMachine: lambda: _clicks(),
        TwoTowers: lambda: {
            "user": _of(64),
            "seen": _words(6, 64, 0),
            "item": _of(64),
            "often": torch.rand(8),
        },
        Interests: lambda: {"seen": _words(6, 64, 0), "item": _of(64), "clicks": torch.rand(8)},
        CrossNetwork: lambda: {**_clicks(), "seconds": torch.rand(8)},
        NextItems: lambda: {name: _words(8, 64, 0) for name in ("seen", "after", "wrong")},
        Policy: lambda: {
            "seen": torch.randn(8, 6, 8),
            "done": _of(4, 8, 6),
            "old": -torch.rand(8, 6),
            "reward": torch.randn(8, 6),
        },
        FourierOperator: lambda: {"x": torch.randn(8, 8, 8, 3), "wanted": torch.randn(8, 8, 8)},
        Tabular: lambda: {"x": torch.randn(8, 6), "wanted": torch.randn(8)},
        Variational: lambda: {"x": torch.rand(8, 32), "noise": torch.randn(8, 8)},
        Sinkhorn: lambda: _pair("first", "second", 32),
    },
}


def _clicks() -> Batch:
    return {"kinds": _of(10, 8, 3), "clicks": torch.rand(8)}


def written(kind: str, name: str) -> tuple[nn.Module, Batch]:
    """A model in training mode with random weights, and the arguments of a call."""
    torch.manual_seed(0)
    architecture = {each.__name__: each for each in WRITTEN[kind]}[name]
    return architecture().train(), WRITTEN[kind][architecture]()
