"""`sw.rehearse`: dry-run training steps of some ranks of a plan in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.api.parallelize import parallelize
from shardwright.core.api.rehearsal import STEPS, Rehearsal, first_and_last_ranks, rehearse_rank
from shardwright.core.capture.capturable import check_arguments
from shardwright.core.checkpoint.checkpoint import Checkpoints
from shardwright.core.checkpoint.position import Position
from shardwright.core.cost.optimizer_state import OPTIMIZERS
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.planner.pipeline import Pipeline
from shardwright.core.torch_internals import pytree


def rehearse(
    net: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    plan: Plan,
    *,
    ranks: Sequence[int] = (),
    device: str | torch.device = "meta",
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = OPTIMIZERS[
        "adamw"
    ].example,
    clip_norm: float | None = 1.0,
) -> Rehearsal:
    """Dry-run three training steps of some ranks of a plan, one after another, in this process.

    Each rank runs at full size: process groups, parameter shards, forward and backward passes,
    gradient clipping, the optimizer and, on the CPU, a checkpoint. Bytes sent are counted and
    compared with the plan. Results are meaningless, as there are no other ranks.

    Args:
        net: the model that was planned.
        args, kwargs: arguments of a rank's call: the global batch or, with a `dataset_strategy`,
            its local batch; on the meta device only shapes and dtypes matter.
        plan: a plan of `net`.
        ranks: ranks to run; by default the first and the last of each stage.
        device: `meta` (no computation, for models of any size), `cpu`, or an accelerator (whose
            allocated memory is measured).
        optimizer: function that creates the optimizer from the parameters.
        clip_norm: maximum total norm of the gradients; None does not clip.

    Returns:
        For each rank, the CPU seconds of each phase, bytes sent, and memory.

    Raises:
        CaptureError: if `args` is not a tuple, or `kwargs` not a mapping of names.
        PlanError: if a rank or the device does not exist, the plan is for another model, the model
            returns no loss, or a process group is running.
    """
    check_arguments(args, kwargs)
    net = net.net if isinstance(net, Pipeline) else net
    leaves, spec = pytree.tree_flatten((args, kwargs or {}))

    def prepare(rank_device: torch.device) -> _SameBatchTrainee:
        # A copy for each rank, as the next rank takes other shards of the same parameters.
        parallel = parallelize(net, plan, rank_device, copy=True)
        assert isinstance(parallel, ParallelModule)
        # Made of the sharded parameters, which are other objects than those of `net`.
        return _SameBatchTrainee(
            parallel, optimizer(parallel.parameters()), plan, leaves, spec, clip_norm
        )

    # Each rank once, in the order given.
    chosen_ranks = dict.fromkeys(ranks or first_and_last_ranks(plan))
    rank_device = torch.device(device)
    return Rehearsal(
        plan.devices,
        tuple(rehearse_rank(rank, plan, rank_device, prepare) for rank in chosen_ranks),
    )


@dataclass
class _SameBatchTrainee:
    """A `Trainee` that trains on the same batch in every step.

    Args:
        net, optimizer, plan: the planned model, its optimizer and its plan.
        leaves, spec: leaves and tree structure of the arguments of each call.
        clip_norm: maximum total norm of the gradients; None does not clip.
    """

    net: ParallelModule
    optimizer: torch.optim.Optimizer
    plan: Plan
    leaves: list[Any]
    spec: pytree.TreeSpec
    clip_norm: float | None

    def train(self, checkpoints: Checkpoints | None, on_step: Callable[[], None]) -> None:
        # The user's batch may be on any device, often the CPU.
        device = self.net.execution.devices.device
        leaves = [each.to(device) if isinstance(each, Tensor) else each for each in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        for _ in range(STEPS):
            self.net.train_step(*args, **kwargs)
            if self.clip_norm is not None:
                self.net.clip_grad_norm_(self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            on_step()
        if checkpoints is not None:
            checkpoints.save(self.net, self.optimizer, Position(STEPS), self.plan)
