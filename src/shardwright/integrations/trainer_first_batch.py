"""The first batch of a Trainer, and the model's call for it, from which the model is planned."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from shardwright.errors import ConfigError

ModelArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def read_first_batch(loader: DataLoader[Any], batch_size: int) -> Any:
    """Collate the first `batch_size` samples of a loader's dataset, which training reads again.

    Raises:
        ConfigError: if the dataset can be iterated only once.
    """
    dataset = loader.dataset
    # Restored below, so that the draws of datasets and collators are repeated in training.
    random_states = random.getstate(), np.random.get_state()
    # Without devices: samplers and collators draw from the CPU's generator.
    with torch.random.fork_rng(devices=[]):
        if isinstance(dataset, IterableDataset):
            samples = _peek_samples(dataset, batch_size)
        else:
            length = len(dataset)  # type: ignore[arg-type]
            # A dataset smaller than a batch repeats its samples, as only shapes matter.
            samples = [dataset[index % length] for index in range(batch_size)]
        batch = loader.collate_fn(samples)
    random.setstate(random_states[0])
    np.random.set_state(random_states[1])
    return batch


def _peek_samples(dataset: IterableDataset[Any], count: int) -> list[Any]:
    stream = iter(dataset)
    # An iterator returns itself; a dataset that can be read again returns a new iterator.
    if stream is iter(dataset):
        raise ConfigError(
            f"{type(dataset).__name__}.__iter__ returns the same iterator each time, so training "
            "would miss the samples with which the model is planned\n"
            "return a new iterator, or pass a plan to the trainer (`plan=sw.plan(...)`)"
        )
    generator = getattr(dataset, "generator", None)
    state = generator.get_state() if isinstance(generator, torch.Generator) else None
    samples = list(islice(stream, count))
    if state is not None:
        dataset.generator.set_state(state)  # type: ignore[attr-defined]
    return samples


def record_first_call(model: nn.Module, step: Callable[[Any], Any]) -> ModelArguments | None:
    """Return the arguments of the first call that `step(model)` makes of the model, which does not
    run; None if it makes none."""
    try:
        step(_FirstCallRecorder(model))
    except _FirstCallError as error:
        return error.call
    return None


class ModelStandIn:
    """Stand-in for a model, with the model's attributes; its class defines what a call does."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _FirstCallError(Exception):
    """Exception that ends a step at its first call of a model."""

    def __init__(self, call: ModelArguments) -> None:
        super().__init__()
        self.call = call


class _FirstCallRecorder(ModelStandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _FirstCallError((args, kwargs))
