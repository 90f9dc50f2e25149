"""Stages and backward functions for `torch.distributed.pipelining` schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
)
from torch.distributed.pipelining.schedules import _Action as TorchAction
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = [
    "SENDS_ONLY_GRADIENTS",
    "PipelineStageBase",
    "pipeline_stage",
    "planned_actions",
    "schedule_class",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]

SENDS_ONLY_GRADIENTS = not hasattr(PipelineStage, "get_outputs_meta")
"""Whether `PipelineStage` supports tensors without gradient at stage boundaries, also with separate
backward passes for inputs and weights. True in PyTorch 2.13, false in 2.11."""


TorchSchedule = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]


class SequentialDualPipeV(ScheduleDualPipeV):
    """DualPipeV that runs its overlapped pairs of passes one after the other.

    PyTorch runs a pair as one action: the outputs of the forward pass are sent only after the
    backward pass, and evaluation cannot skip the backward pass.
    """

    def _calculate_single_rank_operations(self, rank: int) -> list[TorchAction | None]:
        return list(_split_overlapped_actions(super()._calculate_single_rank_operations(rank)))


def _split_overlapped_actions(
    actions: Iterable[TorchAction | None],
) -> Iterator[TorchAction | None]:
    for action in actions:
        # Only a pair of a forward and a backward pass has sub-actions.
        yield from (action,) if action is None or not action.sub_actions else action.sub_actions


OWN_SCHEDULES: dict[str, TorchSchedule] = {"ScheduleDualPipeV": SequentialDualPipeV}
"""Classes used instead of those of `torch.distributed.pipelining.schedules`, or in addition to
them, by name."""


def schedule_class(name: str) -> TorchSchedule:
    """Return the schedule class called `name`: one of `OWN_SCHEDULES`, or else PyTorch's."""
    own_or_torch: TorchSchedule = OWN_SCHEDULES.get(name) or getattr(schedules, name)
    return own_or_torch


def planned_actions(
    schedule: TorchSchedule, stages: int, micro_batches: int, chunks: int
) -> list[list[TorchAction | None]]:
    """Return the actions of each stage in order, without sends and receives."""
    return get_schedule_ops(_skip_message_planning(schedule), stages, micro_batches, chunks)


@cache
def _skip_message_planning(schedule: TorchSchedule) -> TorchSchedule:
    """Return a subclass of `schedule` without sends and receives, which is faster to construct."""
    if not issubclass(schedule, PipelineScheduleMulti):
        return schedule
    subclass: Any = type(schedule.__name__, (schedule,), {})
    subclass._prepare_schedule_with_comms = lambda *_, **__: None
    without_messages: TorchSchedule = subclass
    return without_messages


def pipeline_stage(
    module: nn.Module,
    stage_index: int,
    num_stages: int,
    device: torch.device,
    arriving: tuple[Tensor, ...],
    leaving: tuple[Tensor, ...],
    group: dist.ProcessGroup | None,
    dw_builder: Callable[[], Callable[..., None]] | None,
) -> PipelineStage:
    """Make the `PipelineStage` of a model chunk.

    Args:
        module: the model chunk.
        stage_index: index of the chunk in the model.
        num_stages: number of chunks of the model.
        device: device on which the chunk runs.
        arriving, leaving: meta tensors with the shapes and dtypes of the tensors received and sent;
            gradients are exchanged only for tensors that require a gradient.
        group: process group of the pipeline.
        dw_builder: `dw_builder` of `PipelineStage`, which returns the function that computes weight
            gradients; None lets PyTorch split the backward pass.
    """
    stage = (InFlightStage if SENDS_ONLY_GRADIENTS else SelectiveStage)(
        module,
        stage_index,
        num_stages,
        device,
        input_args=arriving,
        output_args=leaving,
        group=group,
        dw_builder=dw_builder,
    )
    if isinstance(stage, SelectiveStage):
        stage.arriving, stage.leaving = arriving, leaving
    return stage


class InFlightStage(PipelineStage):
    """Stage whose receive buffers exist only for the micro-batches in flight.

    `PipelineStage` allocates the buffers of all micro-batches, and keeps them between steps. This
    stage allocates the buffers of a micro-batch when it is received, and releases them after its
    backward pass, or after its forward pass in evaluation. Released buffers are `_ReleasedBuffer`s.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # PyTorch would allocate the buffers of all micro-batches before the step.
        with _create_buffers_on_meta(self):
            result = super()._prepare_forward_infra(*args, **kwargs)
        for messages in self.args_recv_info.values():
            _release_receive_buffers(messages)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with _create_buffers_on_meta(self):
            result = super()._prepare_backward_infra(*args, **kwargs)
        for messages in self.grad_recv_info.values():
            _release_receive_buffers(messages)
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _allocate_receive_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward:
            _allocate_receive_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        # PyTorch fills the buffer of a missing gradient with zeros.
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            _allocate_receive_buffers(self.grad_recv_info[mb_index], self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        # Without a backward pass nothing reads the received tensors again.
        if not self.has_backward:
            _release_receive_buffers(self.args_recv_info[fwd_chunk_id])
        return result

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.has_backward:
            # The schedule keeps the losses of all micro-batches, whose graphs reference inputs.
            if loss is not None:
                loss.detach_()
            # The tensors that a pass of weight gradients still reads are referenced by that pass.
            _release_receive_buffers(
                (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id])
            )


@dataclass
class _ReleasedBuffer:
    """Placeholder of a receive buffer that is not allocated.

    Args:
        grad: always None; PyTorch resets it before a step.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: None = None

    def size(self) -> torch.Size:
        """Return the shape, which PyTorch logs."""
        return self.shape


@contextmanager
def _create_buffers_on_meta(stage: PipelineStage) -> Iterator[None]:
    """Context manager in which PyTorch creates the receive buffers of `stage` as meta tensors."""
    # PyTorch creates the buffers on `stage.device`.
    device, stage.device = stage.device, torch.device("meta")
    try:
        yield
    finally:
        stage.device = device


def _allocate_receive_buffers(messages: Iterable[Any], device: torch.device) -> None:
    for message in messages:
        released = getattr(message, "buffer", None)
        if isinstance(released, _ReleasedBuffer):
            message.buffer = torch.empty_strided(
                released.shape, released.stride, dtype=released.dtype, device=device
            )


def _release_receive_buffers(messages: Iterable[Any]) -> None:
    for message in messages:
        # Placeholders of the arguments of the first stage have no buffer in PyTorch 2.11.
        buffer = getattr(message, "buffer", None)
        if isinstance(buffer, Tensor):
            message.buffer = _ReleasedBuffer(buffer.shape, buffer.stride(), buffer.dtype)


class SelectiveStage(InFlightStage):
    """Stage for PyTorch 2.11 that supports tensors without gradient, like `PipelineStage` of 2.13.

    `PipelineStage` of 2.11 makes all received tensors, even integers, require gradients, and fails
    if one of them gets no gradient.
    """

    arriving: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        previous = self.stage_index - 1
        # The stage to which the gradient of each input goes; None sends nothing.
        self.grad_send_info = [previous if value.requires_grad else None for value in self.arriving]
        # With `has_backward`, PyTorch sets `requires_grad` on all receive buffers.
        has_backward, self.has_backward = self.has_backward, False
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = has_backward

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Consecutive stages may be on one rank, and gloo cannot send from a rank to itself.
        messages: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [message for message in messages if message.peer != dist.get_rank()]

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        for tensor, value in zip(args, self.arriving, strict=True):
            tensor.requires_grad_(self.has_backward and value.requires_grad)
        return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            # The cache has the gradients of received values first, then those of other arguments.
            # Send zeros for a missing gradient, since the previous stage waits for it.
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(value, device=self.device)
                if value.requires_grad and gradient is None
                else gradient
                for value, gradient in zip(self.arriving, gradients, strict=False)
            )

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        messages = super().get_bwd_recv_ops(bwd_chunk_id)
        return [
            message
            for message, value in zip(messages, self.leaving, strict=False)
            if value.requires_grad
        ]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        outputs = prev_stage_outputs
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        for received, tensor in zip(self.args_recv_info[mb_index], tensors, strict=True):
            # Detached, as if it had been sent: each stage has an autograd graph of its own.
            received.buffer = tensor.detach()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        gradients = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        for received, gradient in gradients:
            if gradient is not None:
                received.buffer = gradient
