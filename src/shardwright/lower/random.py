"""Random operators on shards: seeded, so that a plan gives the same numbers at every run.

Devices that hold the same block of the output draw the same numbers, others draw their own. The
numbers are not those that one device would draw for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.lower.devices import Index

_STRIDE = 1_000_003
"""Prime, larger than any number of devices: operators of one step draw from distinct seeds."""


@dataclass(frozen=True)
class Seeded:
    """A random operator with its own stream of numbers.

    Args:
        function: draws from the global generators.
        ordinal: number of the operator in its graph.
        shard: which block of the output this rank computes.
    """

    function: Callable[..., Any]
    ordinal: int
    shard: Index

    def __call__(self, seed: int, *args: Any, **kwargs: Any) -> Any:
        stream = (seed * _STRIDE + self.ordinal) * _STRIDE % 2**62
        with torch.random.fork_rng():
            torch.manual_seed(self.shard + stream)
            return self.function(*args, **kwargs)
