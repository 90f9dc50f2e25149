"""Modules of PyTorch whose `forward` looks at values, in the form in which they do not."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwright.core.torch_internals.modules import AdaptiveSoftmaxOutput
from shardwright.errors import CaptureError


def make_static(module: nn.Module, twin: nn.Module) -> None:
    """Prepares `twin`, a copy of a model, for the trace.

    Raises:
        CaptureError: for quantizers that observe their inputs, and for a `SyncBatchNorm` over some
            of the ranks.
    """
    quantization: Any = sys.modules.get("torch.ao.quantization.fake_quantize")
    originals = dict(module.named_modules())
    for path, part in twin.named_modules():
        if type(part) is nn.AdaptiveLogSoftmaxWithLoss:
            vars(part)["forward"] = MethodType(_adaptive_log_softmax, part)
        if isinstance(part, nn.SyncBatchNorm):
            group = part.process_group
            if group is not None and group.size() < dist.get_world_size():
                raise CaptureError(
                    f"{path or 'the model'} is a SyncBatchNorm over {group.size()} of"
                    f" {dist.get_world_size()} ranks, but batch norm of a planned model takes the"
                    " statistics of the whole batch. Convert it without `process_group`"
                )
            # A batch norm of a planned model takes the statistics of the whole batch anyway, and
            # `SyncBatchNorm` runs on accelerators and in process groups only.
            vars(part)["forward"] = MethodType(nn.BatchNorm1d.forward, part)
        if quantization is None or not isinstance(part, quantization.FakeQuantizeBase):
            continue
        enabled = originals[path].get_buffer("observer_enabled")
        if enabled.is_meta or enabled.any():
            raise CaptureError(
                f"{path or 'the model'}, a {type(part).__name__}, observes its inputs, by whose "
                "values it branches: let the model see batches before `plan`, and then call "
                "`net.apply(torch.ao.quantization.disable_observer)`"
            )
        if type(part) is quantization.FusedMovingAvgObsFakeQuantize:
            # One operator that would change its buffers; without observing it does this.
            vars(part)["forward"] = MethodType(quantization.FakeQuantize.forward, part)


def _adaptive_log_softmax(
    self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor
) -> tuple[Tensor, Tensor]:
    """Each cluster computes all rows, and its own are taken, as which these are is not known."""
    if target_.ndim > 1 or input_.ndim != target_.ndim + 1:
        return type(self).forward(self, input_, target_)
    rows, target = input_.reshape(-1, input_.shape[-1]), target_.reshape(-1)
    place, output = target, rows.new_zeros(len(target))
    for number, (low, high) in enumerate(zip(self.cutoffs[:-1], self.cutoffs[1:], strict=True)):
        inside = (target >= low) & (target < high)
        scores = functional.log_softmax(self.tail[number](rows), dim=1)
        of_target = scores.gather(1, (target - low).clamp(0, high - low - 1)[:, None])[:, 0]
        output = output + torch.where(inside, of_target, 0.0)
        place = torch.where(inside, self.shortlist_size + number, place)
    head = functional.log_softmax(self.head(rows), dim=1)
    output = output + head.gather(1, place[:, None])[:, 0]
    return AdaptiveSoftmaxOutput(output.reshape(target_.shape), -output.mean())
