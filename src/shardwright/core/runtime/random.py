"""Random operators on shards, seeded by step, operator and shard, so that runs are reproducible.

Replicas of a shard draw equal numbers; different shards draw independent numbers. The numbers
differ from those that one device draws for the full tensor. Recomputed operators must repeat the
numbers of the forward pass: seeded operators do. On one device operators are not seeded, so
activation checkpointing restores the state of PyTorch's generators instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from shardwright.core.runtime.accelerator import forked_generators
from shardwright.core.runtime.devices import Index
from shardwright.core.torch_internals.local_tensors import is_simulating_ranks

_STRIDE = 1_000_003
"""Difference between the seeds of consecutive streams; a prime, larger than any number of shards,
so that seeds are distinct."""

_SEEDS = 1_099_511_627_791
"""Number of streams per micro-batch; a prime, larger than any result of `stream_number`."""


def stream_number(name: str) -> int:
    """Return a hash of an operator's name, below 2^40, equal in all processes."""
    # Python's `hash` of strings differs between processes.
    return int.from_bytes(blake2b(name.encode(), digest_size=5).digest())


def micro_batch_seed(step: int, micro_batch: int) -> int:
    """Return the random seed of a micro-batch.

    Args:
        step: seed of the training step.
        micro_batch: index of the micro-batch.
    """
    # A prime, larger than any number of micro-batches, so that micro-batches of two steps have
    # distinct seeds.
    return step * 65_537 + micro_batch


@dataclass(frozen=True)
class Seeded:
    """A random operator with its own stream of random numbers.

    Args:
        function: the operator, which draws from PyTorch's default generators.
        number: hash of the operator's name (`stream_number`), which selects its random stream.
        shard: index of the output shard that this rank computes.
    """

    function: Callable[..., Any]
    number: int
    shard: Index

    def __call__(self, seed: int, *args: Any, **kwargs: Any) -> Any:
        # Below 2^62, so that the sum with a shard's index fits into 64 bits.
        stream = (seed * _SEEDS + self.number) * _STRIDE % 2**62
        # Forked, so that draws outside the program do not depend on the plan.
        with forked_generators() as seed_generators:
            shard_seed = self.shard + stream
            # Only `torch.manual_seed` knows the generators of simulated ranks.
            if isinstance(shard_seed, torch.SymInt) or is_simulating_ranks():
                torch.manual_seed(shard_seed)
            else:
                seed_generators(shard_seed)
            return self.function(*args, **kwargs)


def recompute_segment(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` with activation checkpointing; random operators must be `Seeded`."""
    # Seeded operators draw equal numbers again, so the states of generators need not be saved.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_drawing_segment(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` with activation checkpointing, and restore the state of PyTorch's
    generators for the recomputation."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)
