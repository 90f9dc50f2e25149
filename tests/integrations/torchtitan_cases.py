"""Small trainings of torchtitan's `Trainer` on CPUs, and the same ones written out on one process.

Import before torchtitan: it looks for accelerators when it is imported.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
os.environ.setdefault("LOCAL_RANK", "0")

import torchtitan.distributed.utils  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

LOCAL_BATCH, LENGTH, VOCABULARY, IGNORED = 4, 32, 2048, -100


class NoMemoryMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def sum_on_gloo(module: Any, factor: float) -> None:
    """gloo cannot multiply in a reduction, by which FSDP2 divides by other factors than ranks."""
    DIVIDE_BY(module, factor)
    module.set_force_sum_reduction_for_comms(True)


DIVIDE_BY = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = sum_on_gloo  # type: ignore[method-assign]
metrics.build_device_memory_monitor = NoMemoryMonitor
torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None


def batch(number: int, samples: int) -> tuple[Tensor, Tensor]:
    """Token ids, and labels of which samples ignore different numbers."""
    numbers = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=numbers)
    labels = tokens[:, 1:].clone()
    for sample in range(samples):
        labels[sample, LENGTH - 2 * sample :] = IGNORED
    return tokens[:, :-1].contiguous(), labels


class Batches(BaseDataLoader):
    """The part of each batch that a data-parallel rank has."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        self.parts, self.part, self.size = dp_world_size, dp_rank, local_batch_size
        self.number = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            ids, labels = batch(self.number, self.parts * self.size)
            self.number += 1
            mine = slice(self.part * self.size, (self.part + 1) * self.size)
            positions = torch.arange(LENGTH).repeat(self.size, 1)
            yield {"input": ids[mine], "positions": positions}, labels[mine]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number = state_dict["number"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any = None, **_: Any) -> None:
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def configuration(
    folder: Path, *, model: str = "llama3", local_batch: int = LOCAL_BATCH, chunked: bool = False
) -> Any:
    """Return torchtitan's own configuration of a small model, with its first two layers."""
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    config = getattr(registry, f"{model}_debugmodel")()
    config.model_spec = replace(config.model_spec, model=deepcopy(config.model_spec.model))
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if not chunked:
        config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.dump_folder = str(folder)
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Batches.Config()
    config.training = replace(
        config.training,
        local_batch_size=local_batch,
        seq_len=LENGTH,
        steps=4,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.optimizer = replace(config.optimizer, implementation="for-loop")
    config.activation_checkpoint = None
    config.debug.seed = 0
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint = replace(
        config.checkpoint, enable=True, interval=2, last_save_model_only=False, load_step=-1
    )
    config.validator = replace(config.validator, enable=True, freq=2, steps=1)
    config.validator.dataloader = Batches.Config()
    return config


Seen = list[tuple[Any, ...]]
"""Number, loss and gradient norm of each step, and the losses of validations."""


def trained(config: Any) -> tuple[Seen, nn.Module]:
    """Train, and return what torchtitan would log."""
    seen: Seen = []

    class Recorder(config.metrics._owner):  # type: ignore[misc]
        def should_log(self, step: int) -> bool:
            return True

        def log(self, step: int, loss: float, _: float, norm: float, **__: Any) -> None:
            seen.append((step, loss, norm))

        def log_validation(self, loss: float, step: int) -> None:
            seen.append((step, loss))

    owner = type(config.metrics)._owner
    type(config.metrics)._owner = Recorder
    try:
        trainer = Trainer(config)
        trainer.train()
    finally:
        type(config.metrics)._owner = owner
    trainer.close()
    return seen, trainer.model_parts[0]


def one_process(config: Any, samples: int, accumulated: int = 1) -> tuple[Seen, nn.Module]:
    """Train without torchtitan's trainer or a plan, on batches of so many samples."""
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        net = spec.model.build()
    net.to_empty(device="cpu")
    torch.manual_seed(0)
    net.init_weights()
    optimizers = config.optimizer.build(model_parts=[net])
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=4)
    if spec.post_optimizer_build_fn is not None:
        alone = SimpleNamespace(get_optional_mesh=lambda _: None, ep_enabled=False, tp=1)
        spec.post_optimizer_build_fn(optimizers, [net], alone)
    positions = torch.arange(LENGTH).repeat(samples, 1)
    seen: Seen = []

    def loss_sum(number: int) -> tuple[Tensor, Tensor]:
        ids, labels = batch(number, samples)
        scores = net(ids, positions=positions).flatten(0, 1)
        total = nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum")
        return total, (labels != IGNORED).sum()

    for step in range(1, config.training.steps + 1):
        optimizers.zero_grad()
        numbers = range((step - 1) * accumulated, step * accumulated)
        count = sum(int((batch(number, samples)[1] != IGNORED).sum()) for number in numbers)
        loss = 0.0
        for number in numbers:
            part = loss_sum(number)[0] / count
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(net.parameters(), config.training.max_norm)
        optimizers.step()
        schedulers.step()
        seen.append((step, loss, norm.item()))
        if step == 1 or step % config.validator.freq == 0:
            net.eval()
            with torch.no_grad():
                total, tokens = loss_sum(0)
            seen.append((step, (total / tokens).item()))
            net.train()
    return seen, net
