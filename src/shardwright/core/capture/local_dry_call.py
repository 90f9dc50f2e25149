"""A call of a `local_map` on tensors without values, to see what it returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.core.graph.local_gradients import ShapesAndDtypes, reached_by_gradients
from shardwright.core.graph.local_map import Body
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.autograd import functions_applied_by
from shardwright.core.torch_internals.dispatch import TorchDispatchMode
from shardwright.core.torch_internals.operators import operator_name
from shardwright.core.torch_internals.tensors import FakeTensorMode, version


@dataclass(frozen=True)
class DryResult:
    """What a part returns on tensors without values.

    Args:
        results: shapes and dtypes of the tensors in it.
        output: makes what the call returns of such tensors.
        changed: which parameters and buffers, by number, it changes.
        constant: numbers of the arguments, parameters and buffers that get no gradient.
        random: whether it draws random numbers.
        changes_arguments: whether it changes a tensor argument in place.
    """

    results: ShapesAndDtypes
    output: Callable[[Sequence[Tensor]], Any]
    changed: tuple[int, ...]
    constant: frozenset[int]
    random: bool
    changes_arguments: bool


@dataclass(frozen=True)
class DryCall:
    """A run of a part on tensors without values.

    Args:
        structure, constants, autocast: as those of `LocalCall`.
    """

    sample: Body
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    autocast: torch.dtype | None

    def run(self, tensors: Sequence[Tensor]) -> DryResult | None:
        """What it returns; None if it needs values."""
        like = [
            (tuple(size_of(size) for size in t.shape), t.dtype, t.requires_grad) for t in tensors
        ]
        before = random.getstate(), np.random.get_state()
        # None of the modes of a capture is active in a thread of its own.
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(self._run, like).result()
        random.setstate(before[0])
        np.random.set_state(before[1])
        return result

    def _run(self, like: Sequence[tuple[tuple[int, ...], torch.dtype, bool]]) -> DryResult | None:
        given = self.structure.num_leaves - len(self.constants)
        try:
            with (
                functions_applied_by(lambda _, args, kwargs, original: original()),
                FakeTensorMode(),
                _Effects() as effects,
                torch.autocast("cpu", self.autocast, enabled=self.autocast is not None),
            ):
                tensors = [
                    torch.empty(shape, dtype=dtype).requires_grad_(trained)
                    for shape, dtype, trained in like
                ]
                leaves: list[Any] = tensors[:given]
                for position, constant in self.constants:
                    leaves.insert(position, size_of(constant))
                args, kwargs = pytree.tree_unflatten(leaves, self.structure)
                result, after = self.sample.run(args, kwargs, tensors[given:])
        except Exception:  # The user's code, which may need values.
            return None
        parts, structure = pytree.tree_flatten(result)
        found = [part for part in parts if isinstance(part, Tensor)]
        if any(not isinstance(size, int) for part in found for size in part.shape):
            return None  # A size that depends on values.

        def output(made: Sequence[Tensor]) -> Any:
            remaining = (
                result if part.requires_grad else result.detach()
                for part, result in zip(found, made, strict=True)
            )
            filled = [next(remaining) if isinstance(part, Tensor) else part for part in parts]
            return pytree.tree_unflatten(filled, structure)

        results = [(tuple(part.shape), part.dtype) for part in found]
        state = enumerate(tensors[given:])
        changed = tuple(n for n, t in state if n in after or id(t) in effects.statistics)
        in_place = any(version(tensor) > 0 for tensor in tensors[:given])
        constant = _constant(tensors, found)
        return DryResult(results, output, changed, constant, effects.random, in_place)


def _constant(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> frozenset[int]:
    """Numbers of the tensors that require a gradient and get none from `results`."""
    trained = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
    reached = reached_by_gradients(results, [tensors[number] for number in trained])
    return frozenset(n for n, is_reached in zip(trained, reached, strict=True) if not is_reached)


_NORMALIZATIONS = frozenset(
    (
        *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
        *("cudnn_batch_norm", "miopen_batch_norm"),
    )
)
"""Operators that change their fourth and fifth argument, of which no version tells."""


class _Effects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether random numbers are drawn, and which tensors are running statistics."""

    random = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.statistics: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if operator_name(func) in _NORMALIZATIONS:
            self.statistics.update(map(id, args[3:5]))
        return func(*args, **(kwargs or {}))


def size_of(size: Any) -> Any:
    """The size that a symbol stands for in this call."""
    return size.node.hint if isinstance(size, torch.SymInt) else size
