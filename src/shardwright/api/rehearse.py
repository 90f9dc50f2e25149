"""Trains a model for a few steps as some ranks of a plan, without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.api.parallelize import parallelize
from shardwright.capture.capture import check_arguments
from shardwright.cost.optimizer_state import KINDS
from shardwright.errors import PlanError
from shardwright.parallel.module import ParallelModule
from shardwright.plan import Plan
from shardwright.planner.pipeline import Pipeline
from shardwright.torch_internals import pytree
from shardwright.train.checkpoint import Checkpoints
from shardwright.train.data import Batches
from shardwright.train.loop import train
from shardwright.train.position import Position
from shardwright.train.rehearsal import STEPS, Rehearsal, first_and_last_ranks, rehearse_rank
from shardwright.train.step_log import StepRecord


def rehearse(
    net: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    plan: Plan,
    *,
    ranks: Sequence[int] = (),
    device: str | torch.device = "meta",
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = KINDS["adamw"],
    clip_norm: float | None = 1.0,
) -> Rehearsal:
    """Trains `net` for three steps as each of some ranks of the plan's devices, in this process:
    process groups, the rank's parameters, forward and backward, clipping, the optimizer, and on the
    CPU a checkpoint. Counts what the rank sends, and compares it with the plan.

    What other ranks would send is not there: numbers mean nothing.

    Args:
        args, kwargs: of a call as a rank makes it, with the whole batch or, if the plan says so,
            its own part; on the meta device only shapes matter.
        ranks: by default the first and the last of each stage.
        device: `meta`, where nothing is computed and any model fits, `cpu`, or an accelerator,
            whose memory is then measured.
        optimizer: makes it from the parameters.
        clip_norm: maximum total norm of the gradients; None to leave them.

    Raises:
        CaptureError: if `args` is not a tuple, or `kwargs` not a mapping of names.
        PlanError: there is no such rank or device, the plan is for another model, the model
            returns no loss, or a process group is running.
    """
    check_arguments(args, kwargs)
    net = net.net if isinstance(net, Pipeline) else net
    leaves, spec = pytree.tree_flatten((args, kwargs or {}))

    def prepare(where: torch.device) -> _Steps:
        parallel = parallelize(net, plan, where)
        assert isinstance(parallel, ParallelModule)
        return _Steps(parallel, optimizer(parallel.parameters()), plan, leaves, spec, clip_norm)

    chosen, where = dict.fromkeys(ranks or first_and_last_ranks(plan)), torch.device(device)
    return Rehearsal(plan.devices, tuple(rehearse_rank(n, plan, where, prepare) for n in chosen))


@dataclass
class _Steps:
    """The same batch again and again.

    Args:
        leaves, spec: of the arguments of each call.
    """

    net: ParallelModule
    optimizer: torch.optim.Optimizer
    plan: Plan
    leaves: list[Any]
    spec: pytree.TreeSpec
    clip_norm: float | None

    def __post_init__(self) -> None:
        train_step = self.net.train_step

        def call(*tensors: Tensor) -> Tensor:
            passed = iter(tensors)
            leaves = [next(passed) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, self.spec)
            return train_step(*args, **kwargs)

        vars(self.net)["train_step"] = call

    def train(self, checkpoints: Checkpoints | None, on_step: Callable[[StepRecord], None]) -> None:
        def after_step(place: Position) -> None:
            if checkpoints is not None and place.step == STEPS:
                checkpoints.save(self.net, self.optimizer, place, self.plan)

        tensors = tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))
        if not all(tensor.ndim for tensor in tensors):
            raise PlanError("a rehearsal needs inputs whose dimension 0 is the batch")
        train(
            self.net,
            self.optimizer,
            Batches(tensors, len(tensors[0])),
            epochs=STEPS,
            device=self.net.execution.devices.device,
            on_step=on_step,
            after_step=after_step,
            clip_norm=self.clip_norm,
        )
