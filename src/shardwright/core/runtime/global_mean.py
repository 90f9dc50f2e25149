"""The mean over the samples of all ranks, for losses outside a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.errors import DataError


def global_mean(total: Tensor, count: Tensor | float) -> Tensor:
    """Return the mean over the samples of all ranks, equal on every rank. Collective.

    The mean of the ranks' means, which `DistributedDataParallel` trains, differs from the mean over
    all samples if ranks count different numbers of samples, tokens or weights. If ranks pass local
    batches (`dataset_strategy`), the gradients of this mean are those of one device:

        total = F.cross_entropy(net(x), y, ignore_index=-100, reduction="sum")
        loss = sw.global_mean(total, (y != -100).sum())

    Args:
        total: sum over the local batch of this rank, of any shape and dtype; float32 represents
            sums of integers, such as numbers of correct predictions.
        count: number of samples, or sum of weights, of the local batch; no gradient flows into it.

    Returns:
        The sum of `total` over all ranks divided by the sum of `count` over all ranks, in the shape
        of `total`; NaN if the counts of all ranks are 0.

    Raises:
        DataError: if `count` has several values.
    """
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise DataError(
                f"`count` of `global_mean` is a tensor of shape {tuple(count.shape)}\npass one"
                " number for all samples of this rank, such as `(y != -100).sum()`"
            )
        count = count.detach().reshape(())
    else:
        # A Python number would otherwise be rounded to the default dtype.
        count = torch.tensor(count, dtype=torch.float64)
    if not (total.is_floating_point() or total.is_complex()):
        # A mean of integers is not an integer.
        total = total.float()
    if not has_other_ranks():
        return (total.to(_get_accumulation_dtype(total)) / count).to(total.dtype)
    mean: Tensor = _GlobalMeanFunction.apply(total, count)  # type: ignore[no-untyped-call]
    return mean


class _GlobalMeanFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor) -> Tensor:
        dtype = _get_accumulation_dtype(total)
        # One collective for sum and count.
        # Converted before it is moved, as some accelerators have no float64.
        addends = count.to(dtype).to(total.device).reshape(1)
        sums = torch.cat([total.detach().reshape(-1).to(dtype), addends])
        # Also on a rank with a count of 0, which the others wait for.
        dist.all_reduce(sums)
        # The ranks' losses are averaged, but this one is a sum over all ranks.
        ctx.factor = dist.get_world_size() / sums[-1]
        return (sums[:-1] / sums[-1]).to(total.dtype).reshape(total.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient.to(ctx.factor.dtype) * ctx.factor).to(gradient.dtype), None


def _get_accumulation_dtype(total: Tensor) -> torch.dtype:
    """Return the dtype in which sums and counts are divided: at least float32."""
    # In float16 a count above 65,504 is infinite, and bfloat16 rounds counts above 256.
    return torch.promote_types(total.dtype, torch.float32)
