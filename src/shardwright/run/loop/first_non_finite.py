"""Where a number that is not finite first appears: a step runs again, each result looked at."""

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
from shardwright.core.runtime.dtensor import own_tensor
from shardwright.core.torch_internals import pytree

NOWHERE = 2**62
KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan": torch.isnan,
    "inf": torch.isposinf,
    "-inf": torch.isneginf,
}


def kind_of(tensor: Tensor) -> str | None:
    """Which of `KINDS` is in a tensor, nan before others; None if it is finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return None
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.numel() or bool(torch.isfinite(values).all()):
        return None
    return next(kind for kind, has in KINDS.items() if bool(has(values).any()))


def earliest(net: torch.nn.Module, order: int, text: str) -> str | None:
    """The text of the rank with the smallest number, on every rank; None if none has any.

    Args:
        order: of this rank's text; `NOWHERE` if it has none.
    """
    if not (
        isinstance(net, ParallelModule) and net.execution.devices.several and has_other_ranks()
    ):
        return None if order == NOWHERE else text
    order, rank, text = min(
        (order, rank, text) for rank, (order, text) in enumerate(values_of_ranks((order, text)))
    )
    return None if order == NOWHERE else f"{text} (seen by rank {rank})"


def first_non_finite(net: ParallelModule, batch: Sequence[Tensor]) -> str | None:
    """Runs the training step of a batch, which must be prepared to run as before, and says where on
    all ranks a number that is not finite first appears; None if the step is finite this time.

    Gradients are left in the parameters.
    """
    watch = _Watch()
    order, text = NOWHERE, ""
    for place, (name, tensor) in enumerate(_read(net, batch)):
        kind = kind_of(own_tensor(tensor))
        if kind is not None:
            order, text = min((order, text), (place, f"{name} holds {kind}"))
    if order == NOWHERE:
        with watch:
            net.train_step(*batch)
        order, text = watch.result(net.execution.devices.stage, net.execution.devices.stages)
    return earliest(net, order, text)


def _read(net: ParallelModule, batch: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    for number, tensor in enumerate(batch):
        for row, values in enumerate(tensor if tensor.ndim else tensor.view(1)):
            yield f"the batch itself: row {row} of input {number}", values
    yield from ((f"parameter {name}", p) for name, p in net.named_parameters())


@dataclass
class _Watch(TorchFunctionMode):
    """Looks at the results of a program's operators, forward and backward."""

    counted: int = 0
    forward: dict[str, tuple[int, str]] = field(default_factory=dict)
    backward: dict[str, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        place = program_line()
        # What is communicated may not have arrived yet.
        if place is None or not place.computes or "empty" in getattr(function, "__name__", ""):
            return result
        read = {_memory(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and _memory(tensor) not in read:
                self._look(self.forward, tensor, place, "the output of")
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_hook(self._looking_back(place))
        return result

    def _looking_back(self, place: ProgramLine) -> Callable[[Any, Any], None]:
        def look(gradients: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    self._look(self.backward, gradient, place, "the gradient of")

        return look

    def _look(
        self, seen: dict[str, tuple[int, str]], tensor: Tensor, place: ProgramLine, what: str
    ) -> None:
        self.counted += 1
        kind = kind_of(tensor.detach())
        if kind is not None and kind not in seen:
            seen[kind] = (self.counted, f"{kind} first in {what} {place}")

    def result(self, stage: int, stages: int) -> tuple[int, str]:
        """Where in time, and in words, it began on this rank."""
        for phase, seen in ((1, self.forward), (2, self.backward)):
            kind = next((kind for kind in KINDS if kind in seen), None)
            if kind is None or (phase == 1 and kind == "-inf"):  # as masks are
                continue
            number, text = seen[kind]
            turn = stage if phase == 1 else stages - stage
            infinite = seen.get("inf")
            if kind == "nan" and infinite is not None and infinite[0] < number:
                text += f", after {infinite[1]}"
            return (phase * 2**16 + turn) * 2**40 + number, text
        return NOWHERE, ""


def _memory(tensor: Tensor) -> int:
    with suppress(RuntimeError, NotImplementedError):
        return tensor.untyped_storage().data_ptr()
    return id(tensor)
