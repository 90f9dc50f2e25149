"""Replacements of the `forward` of PyTorch modules that branch on values."""

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
    """Replace methods that branch on values of tensors in `twin`, a copy of a model, in place.

    Raises:
        CaptureError: if a fake quantizer observes its inputs, or a `SyncBatchNorm` has a process
            group of only some of the ranks.
    """
    # Not imported: without this module the model has no fake quantizers.
    quantization: Any = sys.modules.get("torch.ao.quantization.fake_quantize")
    originals = dict(module.named_modules())
    for path, submodule in twin.named_modules():
        # Not subclasses, which may have another `forward`.
        if type(submodule) is nn.AdaptiveLogSoftmaxWithLoss:
            vars(submodule)["forward"] = MethodType(_compute_adaptive_log_softmax, submodule)
        if isinstance(submodule, nn.SyncBatchNorm):
            group = submodule.process_group
            if group is not None and group.size() < dist.get_world_size():
                raise CaptureError(
                    f"{path or 'the model'} is a SyncBatchNorm over {group.size()} of"
                    f" {dist.get_world_size()} ranks, but batch norm of a planned model takes the"
                    " statistics of the global batch\nconvert it without `process_group`"
                )
            # Batch norm of a planned model takes the statistics of the global batch anyway, and
            # `SyncBatchNorm` runs only on accelerators and in process groups.
            vars(submodule)["forward"] = MethodType(nn.BatchNorm1d.forward, submodule)
        if quantization is None or not isinstance(submodule, quantization.FakeQuantizeBase):
            continue
        # Of the original, as the flag of the copy is a fake tensor. Its initial value is 1.
        enabled = originals[path].get_buffer("observer_enabled")
        if enabled.is_meta or enabled.any():
            raise CaptureError(
                f"{path or 'the model'}, a {type(submodule).__name__}, observes its inputs and "
                "branches on their values\nrun the model on batches before `plan`, and then call "
                "`net.apply(torch.ao.quantization.disable_observer)`"
            )
        if type(submodule) is quantization.FusedMovingAvgObsFakeQuantize:
            # A fused operator that changes buffers; without an observer it equals `FakeQuantize`.
            vars(submodule)["forward"] = MethodType(quantization.FakeQuantize.forward, submodule)


def _compute_adaptive_log_softmax(
    self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute adaptive log-softmax of all samples in all clusters, then select by target.

    Targets, which decide a sample's cluster, are unknown during capture.
    """
    # PyTorch's own `forward` reports wrong shapes.
    if target_.ndim > 1 or input_.ndim != target_.ndim + 1:
        return type(self).forward(self, input_, target_)
    rows, target = input_.reshape(-1, input_.shape[-1]), target_.reshape(-1)
    column, output = target, rows.new_zeros(len(target))
    for number, (low, high) in enumerate(zip(self.cutoffs[:-1], self.cutoffs[1:], strict=True)):
        inside = (target >= low) & (target < high)
        scores = functional.log_softmax(self.tail[number](rows), dim=1)
        # Targets in other clusters read any score, which `torch.where` drops.
        of_target = scores.gather(1, (target - low).clamp(0, high - low - 1)[:, None])[:, 0]
        output = output + torch.where(inside, of_target, 0.0)
        column = torch.where(inside, self.shortlist_size + number, column)
    head = functional.log_softmax(self.head(rows), dim=1)
    output = output + head.gather(1, column[:, None])[:, 0]
    return AdaptiveSoftmaxOutput(output.reshape(target_.shape), -output.mean())
