"""Random operators on shards: seeded, so that a plan gives the same numbers at every run.

Devices that hold the same block of the output draw the same numbers, others draw their own. The
numbers are not those that one device would draw for the whole tensor. Operators that are recomputed
in the backward pass must draw what they drew before: seeded ones do, and on one device, where
nothing is seeded, checkpoints restore the state of PyTorch's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from shardwright.core.runtime.devices import Index

_STRIDE = 1_000_003
"""Prime, larger than any number of devices: operators of one step draw from distinct seeds."""

_SEEDS = 1_099_511_627_791
"""Prime, larger than any operator's number."""


def number_of(name: str) -> int:
    """A number for an operator, from its name: the same in every chunk and mode of a model."""
    return int.from_bytes(blake2b(name.encode(), digest_size=5).digest())


def seed_of(step: int, micro_batch: int) -> int:
    """The seed of one micro-batch in the step with the seed `step`."""
    return step * 65_537 + micro_batch


@dataclass(frozen=True)
class Seeded:
    """A random operator with its own stream of numbers.

    Args:
        function: draws from the global generators.
        number: of the operator; see `number_of`.
        shard: which block of the output this rank computes.
    """

    function: Callable[..., Any]
    number: int
    shard: Index

    def __call__(self, seed: int, *args: Any, **kwargs: Any) -> Any:
        stream = (seed * _SEEDS + self.number) * _STRIDE % 2**62
        with torch.random.fork_rng():
            torch.manual_seed(self.shard + stream)
            return self.function(*args, **kwargs)


def recompute_segment(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`. Random operators inside must draw the same numbers by themselves."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_drawing_segment(function: Callable[..., Any], *args: Any) -> Any:
    """Likewise where operators inside draw from PyTorch's own generator: its state is restored."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)
