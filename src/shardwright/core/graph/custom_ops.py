"""Shardwright's own operators, which replace ATen operators whose form prevents sharding.

All are pure functions of tensors and run in eager mode and under `torch.compile`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.core.graph.blockwise_attention import blockwise_attention
from shardwright.core.graph.segment_matmul import segment_matmul
from shardwright.core.torch_internals.operators import OpOverload

MEAN = 1
"""`reduction` of the losses, as ATen numbers it: 0 none, 1 mean, 2 sum."""

_REDUCTIONS = {0: "none", MEAN: "mean", 2: "sum"}


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross entropy of `torch.nn.functional`, but always with the class dimension last.

    Args:
        logits: `[..., classes]`.
        target: class indices `[...]`, or probabilities `[..., classes]` of a floating dtype.
        weight: of each class, `[classes]`.
        reduction: 0 none (the result is `[...]`), 1 mean, 2 sum.
    """
    rows = logits.shape[:-1]
    classes = logits.shape[-1]
    probabilities = target.is_floating_point()
    loss = F.cross_entropy(
        logits.reshape(-1, classes),
        target.reshape(-1, classes) if probabilities else target.reshape(-1),
        weight,
        reduction=_REDUCTIONS[reduction],
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return loss if reduction else loss.reshape(rows)


_BAG_MODES = ("sum", "mean", "max")


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    mode: int = 0,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """The first result of ATen's `embedding_bag`; bags of one size are the rows of `indices`.

    Args:
        weight: `[rows, features]`.
        indices: `[bags, size]` without `offsets`; else `[count]`, of all bags in a row.
        offsets: where each bag begins, `[bags]`, and where the last one ends if asked for.
        per_sample_weights: as `indices`.
        mode: of the rows of a bag 0 the sum, 1 the mean, 2 the maximum.
    """
    return F.embedding_bag(
        indices,
        weight,
        offsets,
        mode=_BAG_MODES[mode],
        scale_grad_by_freq=scale_grad_by_freq,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:
    """Batch normalization with batch statistics that does not modify the running ones.

    Args:
        x: `[n, c, ...]`, normalized over all dimensions but `c`.
        weight, bias, running_mean, running_var: `[c]` each or None.

    Returns:
        The normalized `x`, and the new running statistics (without gradient) if there are any.
    """
    if running_mean is None or running_var is None:
        return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)
    mean, variance = running_mean.detach().clone(), running_var.detach().clone()
    y = F.batch_norm(x, mean, variance, weight, bias, True, momentum, eps)
    return y, mean, variance


def instance_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Instance normalization of `x` `[n, c, ...]` that does not modify the running statistics.

    Returns:
        The normalized `x` and the new running statistics `[c]` (without gradient).
    """
    mean, variance = running_mean.detach().clone(), running_var.detach().clone()
    y = F.instance_norm(x, mean, variance, weight, bias, True, momentum, eps)
    return y, mean, variance


class _Assigned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def assigned(parameter: Tensor, value: Tensor) -> Tensor:
    """What a parameter is after a change that autograd did not record: `value`, whose gradient is
    the parameter's. All have the same shape."""
    result: Tensor = _Assigned.apply(parameter, value)  # type: ignore[no-untyped-call]
    return result


Steps = tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
"""A function of one tensor: the ATen operators (or `getitem`) that it calls, by name, each with its
arguments and keywords. `"%0"` is the tensor itself, `"%1"` the result of the first step."""


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate: Steps | Callable[[Tensor], Tensor],
    interleaved: bool = False,
    first: int | torch.SymInt = 0,
    total: int | None = None,
) -> Tensor:
    """The weighted sum of what the experts that a router chose make of each token.

    Every token reaches every expert that it chose, be they few or many.

    Args:
        x: tokens, `[..., hidden]`.
        ids: the experts of each token, `[..., chosen]`. Of others than those that are here, nothing
            is added.
        weights: what each is weighed with, `[..., chosen]`.
        gate_up: `[experts, 2, inner, hidden]`, or `[experts, inner, 2, hidden]` if `interleaved`;
            1 in place of 2 if there is no gate.
        down: `[experts, hidden, inner]`.
        gate_up_bias, down_bias: as `gate_up` without `hidden`; `[experts, hidden]`.
        gate: from a projection's gate and value (the last dimension) to the input of `down`.
        first, total: the number of the first of these experts, a `SymInt` where many ranks are
            simulated at once, and of how many experts these are; by default of all.
    """
    here, top_k, hidden = gate_up.shape[0], ids.shape[-1], x.shape[-1]
    slots = ids.reshape(-1) - first  # type: ignore[operator]
    absent = (slots < 0) | (slots >= here)
    scale = weights.reshape(-1, 1).masked_fill(absent.unsqueeze(-1), 0)
    slots, order = slots.masked_fill(absent, here).sort(stable=True)
    ends = torch.searchsorted(slots, torch.arange(here, device=x.device), right=True)
    shared = total is not None and here < total
    # Where numbers cannot be read, absent rows stay as a tail.
    tail = shared and (isinstance(first, torch.SymInt) or torch.compiler.is_compiling())
    count = _rows_here(ends, slots.shape[0], total or here) if shared and not tail else None
    slots, order = slots[:count].clamp(max=here - 1), order[:count]
    if not shared:
        # An expert that there is not is the last one, with weight 0.
        ends = torch.cat([ends[:-1], ends.new_full((1,), slots.shape[0])])
    ends, tokens, scale = ends.to(torch.int32), order // top_k, scale[order]
    rows = x.reshape(-1, hidden)[tokens].to(gate_up.dtype)
    rows = segment_matmul(rows, gate_up.flatten(1, 2).mT, ends, tail)
    if gate_up_bias is not None:
        rows = rows + gate_up_bias.flatten(1)[slots]
    rows = rows.view(-1, *gate_up.shape[1:3])
    rows = rows if interleaved else rows.transpose(1, 2)
    rows = (gate(rows) if callable(gate) else run_steps(gate, rows)).squeeze(-1)
    # Weighed before the last product, so that not its result but the smaller input is kept.
    rows = segment_matmul((rows * scale).to(down.dtype), down.mT, ends, tail)
    if down_bias is not None:
        rows = rows + down_bias[slots] * scale
    # Not `index_add`, whose order of summation differs between devices that must stay equal.
    zeros = x.new_zeros(ids.numel() // top_k, hidden)
    result: Tensor = zeros.index_put((tokens,), rows.to(x.dtype), accumulate=True).view_as(x)
    return result


def _rows_here(ends: Tensor, rows: int, total: int) -> int:
    """How many rows are of the experts that are here; on the meta device as many as with balanced
    routing."""
    if ends.is_meta:
        return -(-rows * ends.shape[0] // total)
    return int(ends[-1])


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    scale: float | None = None,
    start: int | torch.SymInt = 0,
) -> Tensor:
    """Attention in which a position reads the last `window` positions, its own included.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`, with as many heads or fewer, each for a group of
            adjacent query heads. The last key stands where the last query does.
        scale: multiplies the scores, by default `size ** -0.5`.
        start: the position of the first query; keys before position 0 are not read.

    Returns:
        `[batch, heads, queries, size]`, with the size of the values.
    """
    first_key = start - (key.shape[-2] - query.shape[-2])
    options = ((), "", True, window, scale, start, first_key)
    result: Tensor = blockwise_attention(query, key, value, *options)[0]
    return result


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vectors: tuple[Tensor, ...],
    terms: str,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    start: int | torch.SymInt = 0,
) -> Tensor:
    """Attention with a mask that is made where it is read, of numbers of queries and of keys.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`, as those of `windowed_attention`; the first key
            has position 0.
        vectors: numbers of the queries, `[..., queries, 1]`, and of the keys, `[..., 1, keys]`.
        terms: what must hold of them: `"eq 0 1, all 2"` if vectors 0 and 1 must be equal, and
            vector 2 true.
        causal: whether only keys up to a query's own position are read.
        window: of how many positions at most, if not of all.
        scale: multiplies the scores, by default `size ** -0.5`.
        start: the position of the first query.

    Returns:
        `[batch, heads, queries, size]`, with the size of the values.
    """
    options = (vectors, terms, causal, window, scale, start, 0)
    result: Tensor = blockwise_attention(query, key, value, *options)[0]
    return result


def run_steps(steps: Steps, x: Tensor) -> Tensor:
    """What the function that consists of `steps` makes of `x`."""
    results: list[Any] = [x]
    for name, args, kwargs in steps:
        taken = tuple(results[int(a[1:])] if _is_result(a) else a for a in args)
        results.append(_step(name)(*taken, **dict(kwargs)))
    result: Tensor = results[-1]
    return result


def _is_result(argument: Any) -> bool:
    return isinstance(argument, str) and argument.startswith("%")


def _step(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    _, packet, overload = name.split(".")
    step = getattr(getattr(torch.ops.aten, packet), overload)
    if not isinstance(step, OpOverload):  # Names may come from a file.
        raise ValueError(f"{name} is not an operator")
    return step
