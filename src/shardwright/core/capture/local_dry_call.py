"""Call of a `local_map` target on fake tensors, to infer its results and side effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.core.graph.local_body import Body
from shardwright.core.graph.local_gradients import ShapesAndDtypes, reached_by_gradients
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.autograd import functions_applied_by
from shardwright.core.torch_internals.dispatch import TorchDispatchMode
from shardwright.core.torch_internals.operators import operator_name
from shardwright.core.torch_internals.tensors import FakeTensorMode, version


@dataclass(frozen=True)
class DryResult:
    """Results and side effects of a `local_map` target's call on fake tensors.

    Args:
        results: shapes and dtypes of the returned tensors.
        output: function from the returned tensors to the return value of the call.
        changed: indices of the parameters and buffers that the call changes in place.
        constant: indices of the tensor arguments, parameters and buffers that get no gradient.
        random: whether the call draws random numbers.
        changes_arguments: whether the call changes a tensor argument in place.
    """

    results: ShapesAndDtypes
    output: Callable[[Sequence[Tensor]], Any]
    changed: tuple[int, ...]
    constant: frozenset[int]
    random: bool
    changes_arguments: bool


@dataclass(frozen=True)
class DryCall:
    """A call of a `local_map` target on fake tensors, without computation.

    Args:
        target: the module or function to run.
        structure: pytree structure of the arguments of the call.
        constants: (index, value) of each leaf of the arguments that is not a tensor.
        autocast: dtype of the autocast region around the call; None outside of regions.
    """

    target: Body
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    autocast: torch.dtype | None

    def run(self, tensors: Sequence[Tensor], with_backward: bool = False) -> DryResult | None:
        """Call the target on fake copies of `tensors`: arguments, parameters and buffers.

        Returns None if the target cannot run on fake tensors.

        Args:
            with_backward: whether to look for random draws in the backward pass too.
        """
        like = [
            (tuple(size_of(size) for size in t.shape), t.dtype, t.requires_grad) for t in tensors
        ]
        # Restored below: the user's code runs here once more than in eager training.
        before = random.getstate(), np.random.get_state()
        # The dispatch modes of a capture are not active in a new thread.
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(self._run_on_fakes, like, with_backward).result()
        random.setstate(before[0])
        np.random.set_state(before[1])
        return result

    def _run_on_fakes(
        self, like: Sequence[tuple[tuple[int, ...], torch.dtype, bool]], with_backward: bool
    ) -> DryResult | None:
        given = self.structure.num_leaves - len(self.constants)
        try:
            with (
                # The capture's handler of autograd functions is global: here they run as PyTorch
                # runs them.
                functions_applied_by(lambda _, args, kwargs, original: original()),
                FakeTensorMode(),
                _EffectRecorder() as effects,
                torch.autocast("cpu", self.autocast, enabled=self.autocast is not None),
            ):
                tensors = [
                    torch.empty(shape, dtype=dtype).requires_grad_(trained)
                    for shape, dtype, trained in like
                ]
                leaves: list[Any] = tensors[:given]
                # In ascending order of position, so each constant lands at its own.
                for position, constant in self.constants:
                    leaves.insert(position, size_of(constant))
                args, kwargs = pytree.tree_unflatten(leaves, self.structure)
                result, after = self.target.run(args, kwargs, tensors[given:])
                if with_backward:
                    _run_backward(result, tensors)
        except Exception:  # The user's code, which may need values.
            return None
        result_leaves, structure = pytree.tree_flatten(result)
        returned = [leaf for leaf in result_leaves if isinstance(leaf, Tensor)]
        if any(not isinstance(size, int) for leaf in returned for size in leaf.shape):
            return None  # A size that depends on values.

        def output(made: Sequence[Tensor]) -> Any:
            remaining = (
                # Detached like the results of the dry call.
                result if x.requires_grad else result.detach()
                for x, result in zip(returned, made, strict=True)
            )
            filled = [next(remaining) if isinstance(x, Tensor) else x for x in result_leaves]
            return pytree.tree_unflatten(filled, structure)

        results = [(tuple(leaf.shape), leaf.dtype) for leaf in returned]
        state = enumerate(tensors[given:])
        changed = tuple(n for n, t in state if n in after or id(t) in effects.statistics)
        # The tensors are new, so their version counters started at 0.
        in_place = any(version(tensor) > 0 for tensor in tensors[:given])
        constant = _find_inputs_without_gradient(tensors, returned)
        return DryResult(results, output, changed, constant, effects.random, in_place)


def _run_backward(result: Any, tensors: Sequence[Tensor]) -> None:
    """Compute the gradients of `tensors`; an error of the user's code ends the backward pass."""
    roots = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    with suppress(Exception):
        torch.autograd.grad(roots, trained, list(map(torch.ones_like, roots)), allow_unused=True)


def _find_inputs_without_gradient(
    tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> frozenset[int]:
    """Return the indices of the tensors that require a gradient and get none from `results`."""
    trained = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
    reached = reached_by_gradients(results, [tensors[number] for number in trained])
    return frozenset(n for n, is_reached in zip(trained, reached, strict=True) if not is_reached)


_NORMALIZATIONS = frozenset(
    (
        *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
        *("cudnn_batch_norm", "miopen_batch_norm"),
    )
)
"""Batch norms, which change their running statistics (arguments 4 and 5) without incrementing the
version counters."""


class _EffectRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records draws of random numbers, and the ids of running statistics."""

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
    """Return the value of a symbolic size in this call; return other values unchanged."""
    return size.node.hint if isinstance(size, torch.SymInt) else size
