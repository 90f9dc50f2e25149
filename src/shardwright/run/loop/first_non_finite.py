"""Find the first operator that produces NaN or infinity, by repeating a step with checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.core.agreement.collective import has_other_ranks, values_of_ranks
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.runtime.collective_errors import ProgramLine, program_line
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.torch_internals import pytree

NO_FINDING = 2**62
"""Sort key of a rank without non-finite values; larger than every other sort key."""

NON_FINITE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan": torch.isnan,
    "inf": torch.isposinf,
    "-inf": torch.isneginf,
}
"""Elementwise test for each non-finite value, by name of the value in messages."""


def non_finite_value(tensor: Tensor) -> str | None:
    """Return "nan" if `tensor` has a NaN, else "inf" or "-inf"; None if all elements are finite."""
    # Tensors of a rehearsal on the meta device have no values.
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.numel() or bool(torch.isfinite(values).all()):
        return None
    return next(name for name, test in NON_FINITE.items() if bool(test(values).any()))


def earliest_finding(net: torch.nn.Module, order: int, finding: str) -> str | None:
    """Describe the first non-finite value of all ranks; None if all values are finite.

    Collective, unless `net` has no other ranks; the result is the same on every rank.

    Args:
        net: the trained module.
        order: sort key of this rank's first non-finite value; `NO_FINDING` without one.
        finding: description of this rank's first non-finite value.
    """
    if not (
        isinstance(net, ParallelModule)
        and net.execution.devices.is_distributed
        and has_other_ranks()
    ):
        return None if order == NO_FINDING else finding
    # The rank breaks ties between equal times, so that all ranks choose the same finding.
    order, rank, finding = min(
        (order, rank, finding)
        for rank, (order, finding) in enumerate(values_of_ranks((order, finding)))
    )
    return None if order == NO_FINDING else f"{finding} (seen by rank {rank})"


def first_non_finite(net: ParallelModule, batch: Sequence[Tensor]) -> str | None:
    """Repeat a training step and find the first non-finite value on any rank.

    The caller must have restored buffers and random generators to their state before the step.
    Afterwards parameters have the gradients of the repeated step.

    Args:
        batch: the arguments of `net.train_step`.

    Returns:
        A description of the value and of its operator; None if the repeated step is finite.
    """
    checker = _NonFiniteChecker()
    order, finding = NO_FINDING, ""
    for index, (name, tensor) in enumerate(_iterate_samples_and_parameters(net, batch)):
        value = non_finite_value(detached_local(tensor))
        if value is not None:
            order, finding = min((order, finding), (index, f"{name} contains {value}"))
    # With non-finite inputs, the first operator that reads them would be blamed.
    if order == NO_FINDING:
        with checker:
            net.train_step(*batch)
        order, finding = checker.first_finding(
            net.execution.devices.stage, net.execution.devices.stages
        )
    return earliest_finding(net, order, finding)


def _iterate_samples_and_parameters(
    net: ParallelModule, batch: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each sample of the batch, then each parameter, with its name for messages."""
    for index, tensor in enumerate(batch):
        # A tensor without dimensions cannot be iterated.
        for row, values in enumerate(tensor if tensor.ndim else tensor.view(1)):
            yield f"the batch itself: row {row} of input {index}", values
    yield from ((f"parameter {name}", p) for name, p in net.named_parameters())


@dataclass
class _NonFiniteChecker(TorchFunctionMode):
    """Mode that checks the outputs of a program's operators, and the gradients of these outputs.

    Args:
        num_checked: number of tensors checked so far.
        forward, backward: first occurrences in the forward and the backward pass, by value ("nan",
            "inf", "-inf"): (`num_checked` at the occurrence, description).
    """

    num_checked: int = 0
    forward: dict[str, tuple[int, str]] = field(default_factory=dict)
    backward: dict[str, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        line = program_line()
        # Skips asynchronous collectives, whose result may not have arrived yet, and `empty`, whose
        # uninitialized memory may contain NaN.
        if line is None or not line.computes or "empty" in getattr(function, "__name__", ""):
            return result
        # Views of arguments were checked when the arguments were computed.
        arguments = pytree.tree_leaves((args, kwargs))
        addresses = {_get_storage_address(t) for t in arguments if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and _get_storage_address(tensor) not in addresses:
                self._record_if_non_finite(self.forward, tensor, line, "the output of")
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_hook(self._make_gradient_check_hook(line))
        return result

    def _make_gradient_check_hook(self, line: ProgramLine) -> Callable[[Any, Any], None]:
        def hook(gradients: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    self._record_if_non_finite(self.backward, gradient, line, "the gradient of")

        return hook

    def _record_if_non_finite(
        self, findings: dict[str, tuple[int, str]], tensor: Tensor, line: ProgramLine, role: str
    ) -> None:
        self.num_checked += 1
        value = non_finite_value(tensor.detach())
        if value is not None and value not in findings:
            findings[value] = (self.num_checked, f"{value} first in {role} {line}")

    def first_finding(self, stage: int, stages: int) -> tuple[int, str]:
        """Return (sort key, description) of this rank's first non-finite value.

        Sort keys order the findings of all ranks by time. Returns `(NO_FINDING, "")` if all values
        are finite.

        Args:
            stage: pipeline stage of this rank.
            stages: number of pipeline stages.
        """
        for phase, findings in ((1, self.forward), (2, self.backward)):
            value = next((value for value in NON_FINITE if value in findings), None)
            # Attention masks contain -inf in every finite step.
            if value is None or (phase == 1 and value == "-inf"):
                continue
            index, finding = findings[value]
            # Makes findings comparable between ranks: the forward pass runs from the first pipeline
            # stage to the last, the backward pass in reverse.
            stage_order = stage if phase == 1 else stages - stage
            infinite = findings.get("inf")
            # An infinity before it is the likely cause: inf - inf is NaN.
            if value == "nan" and infinite is not None and infinite[0] < index:
                finding += f", after {infinite[1]}"
            # Pass, stage and index as digits of one integer: up to 2^16 stages and 2^40 tensors.
            return (phase * 2**16 + stage_order) * 2**40 + index, finding
        return NO_FINDING, ""


def _get_storage_address(tensor: Tensor) -> int:
    # Tensors without storage, such as sparse or wrapper tensors, raise here.
    with suppress(RuntimeError, NotImplementedError):
        return tensor.untyped_storage().data_ptr()
    return id(tensor)
