"""What PyTorch's pipeline schedules are made of."""

from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = [
    "PipelineStageBase",
    "get_schedule_ops",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]
