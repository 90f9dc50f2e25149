"""Shardwright's own operators, which replace ATen operators that cannot be sharded.

All are pure functions of tensors that run in eager mode and under `torch.compile`. Their names and
parameters appear in saved graphs and in generated programs, so these must not change.
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
from shardwright.core.torch_internals.compiled import is_compiling
from shardwright.core.torch_internals.operators import OpOverload

MEAN = 1
"""Number of the reduction "mean" in ATen, where 0 is none, 1 mean and 2 sum."""

_REDUCTIONS = {0: "none", MEAN: "mean", 2: "sum"}


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross entropy of `torch.nn.functional`, with the class dimension always last.

    Args:
        logits: `[..., classes]`.
        target: class indices `[...]`, or probabilities `[..., classes]` of a floating dtype.
        weight: weight of each class, `[classes]`.
        reduction: 0 none (the result is `[...]`), 1 mean, 2 sum.
        ignore_index: class index of targets to ignore.
        label_smoothing: fraction of the target probability that is spread over all classes.
    """
    rows = logits.shape[:-1]
    classes = logits.shape[-1]
    probabilities = target.is_floating_point()
    # `F.cross_entropy` has the classes in dimension 1: flatten all other dimensions into rows.
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
"""Reductions of `embedding_bag`, indexed by ATen's number: 0 sum, 1 mean, 2 max."""


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
    """Compute `torch.nn.functional.embedding_bag`, `[bags, features]`.

    Args:
        weight: `[rows, features]`.
        indices: rows of `weight`, `[bags, size]` without `offsets`; else `[count]`, all bags
            concatenated.
        offsets: index of the first element of each bag in `indices`, `[bags]`; `[bags + 1]` with
            the end of the last bag if `include_last_offset`.
        per_sample_weights: weight of each index, in the shape of `indices`.
        mode: reduction of the rows of a bag: 0 sum, 1 mean, 2 maximum.
        padding_idx: row of `weight` that is ignored in bags.
        include_last_offset: whether `offsets` ends with the number of indices.
        scale_grad_by_freq: whether gradients are divided by the frequency of an index.
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


def padded_convolution(
    input: Tensor,
    weight: Tensor,
    stride: list[int],
    dilation: list[int],
    groups: int,
    pad: list[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    """Compute a convolution of `input` with rows beyond its ends, `[..., channels, *space]`.

    Args:
        input: the image.
        weight: `[channels, input channels / groups, *kernel size]`.
        stride, dilation: one number for each spatial dimension.
        groups: number of groups of channels.
        pad, mode, value: arguments of `torch.nn.functional.pad`.
    """
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(stride) - 1]
    padded = F.pad(input, pad, mode, value)
    result: Tensor = convolution(padded, weight, None, stride, 0, dilation, groups)
    return result


def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:
    """Normalize `x` with the statistics of the batch, and return the new running statistics.

    Args:
        x: `[n, c, ...]`, normalized over all dimensions but `c`.
        weight, bias, running_mean, running_var: `[c]` each or None.
        momentum: weight of the batch statistics in the new running statistics.
        eps: added to the variance.

    Returns:
        The normalized `x`, and new running statistics, `[c]`, without gradient, if passed.
    """
    if running_mean is None or running_var is None:
        return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)
    # Copies, since `F.batch_norm` updates its arguments in place and this function is pure.
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
    """Normalize each instance of `x`, `[n, c, ...]`, and return the new running statistics.

    Args:
        x: normalized over all dimensions but `n` and `c`.
        weight, bias: `[c]` each or None.
        running_mean, running_var: `[c]`.
        momentum: weight of the batch statistics in the new running statistics.
        eps: added to the variance.

    Returns:
        The normalized `x`, and the new running statistics, `[c]`, without gradient.
    """
    # Copies, since `F.instance_norm` updates its arguments in place and this function is pure.
    mean, variance = running_mean.detach().clone(), running_var.detach().clone()
    y = F.instance_norm(x, mean, variance, weight, bias, True, momentum, eps)
    return y, mean, variance


class _AssignParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        # A view, since autograd treats inputs that are returned unchanged specially.
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Autograd does not record the change, so `value` gets no gradient.
        return gradients[0], None


def assigned(parameter: Tensor, value: Tensor) -> Tensor:
    """Return `value` as the new value of a parameter that the model changes under `no_grad`.

    The gradient of the result flows to `parameter` unchanged, since autograd does not record the
    change. Both tensors have the same shape.
    """
    result: Tensor = _AssignParameter.apply(parameter, value)  # type: ignore[no-untyped-call]
    return result


@torch.library.custom_op(
    "shardwright::with_gradient_of", mutates_args=(), tags=(torch.Tag.pointwise,)
)
def with_gradient_of(source: Tensor, value: Tensor) -> Tensor:
    """Return a copy of `value` whose gradient is passed to `source` unchanged.

    Traces record it as one operator. Both tensors have the same shape and dtype.
    """
    return value.clone(memory_format=torch.contiguous_format)


@with_gradient_of.register_fake
def _(source: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


with_gradient_of.register_autograd(lambda ctx, gradient: (gradient, None))


Steps = tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
"""A function of one tensor as a list of steps: (operator, arguments, keyword arguments).

Operators are ATen names such as `aten.mul.Tensor`, or `getitem`. Among the arguments, `"%0"` is the
input tensor and `"%1"` the result of the first step."""


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
    """Compute a mixture of experts: the weighted sum of the outputs of each token's experts.

    Dropless: every token reaches all of its experts, however unbalanced the routing.

    Args:
        x: tokens, `[..., hidden]`.
        ids: global indices of the experts of each token, `[..., top_k]`. Experts of other devices
            contribute 0.
        weights: routing weights, `[..., top_k]`.
        gate_up: `[experts, 2, inner, hidden]`, or `[experts, inner, 2, hidden]` if `interleaved`;
            1 in place of 2 without a gate.
        down: `[experts, hidden, inner]`.
        gate_up_bias: in the shape of `gate_up` without `hidden`.
        down_bias: `[experts, hidden]`.
        gate: the activation: maps a tensor whose last dimension is (gate, value), or has one
            element without a gate, to the input of `down`.
        interleaved: whether the rows of gate and value alternate in `gate_up`.
        first: global index of the first local expert; a `SymInt` if several ranks are simulated.
        total: global number of experts; by default all experts are local.
    """
    num_local, top_k, hidden = gate_up.shape[0], ids.shape[-1], x.shape[-1]
    # Sort the rows, which are pairs of a token and an expert, by expert; the rows of experts on
    # other devices come last.
    local_ids = ids.reshape(-1) - first  # type: ignore[operator]
    absent = (local_ids < 0) | (local_ids >= num_local)
    # Rows of experts on other devices have weight 0: no result and no gradient.
    scale = weights.reshape(-1, 1).masked_fill(absent.unsqueeze(-1), 0)
    # Stable: devices that replicate the computation must add rows in the same order.
    local_ids, order = local_ids.masked_fill(absent, num_local).sort(stable=True)
    # Number of rows up to and including each local expert, in sorted order.
    ends = torch.searchsorted(local_ids, torch.arange(num_local, device=x.device), right=True)
    sharded = total is not None and num_local < total
    # The number of local rows depends on values. Under `torch.compile` and on simulated ranks it
    # cannot be read, so the rows of other devices remain as a tail.
    tail = sharded and (isinstance(first, torch.SymInt) or is_compiling())
    count = (
        _count_local_token_copies(ends, local_ids.shape[0], total or num_local)
        if sharded and not tail
        else None
    )
    # The clamp keeps the tail, with id `num_local`, within the biases that are read below.
    local_ids, order = local_ids[:count].clamp(max=num_local - 1), order[:count]
    if not sharded:
        # Rows with an id out of range are computed by the last expert, with weight 0.
        ends = torch.cat([ends[:-1], ends.new_full((1,), local_ids.shape[0])])
    # The kernels take ends in int32. Row r of the flat ids is of token r // `top_k`.
    ends, tokens, scale = ends.to(torch.int32), order // top_k, scale[order]
    rows = x.reshape(-1, hidden)[tokens].to(gate_up.dtype)
    rows = segment_matmul(rows, gate_up.flatten(1, 2).mT, ends, tail)
    if gate_up_bias is not None:
        rows = rows + gate_up_bias.flatten(1)[local_ids]
    rows = rows.view(-1, *gate_up.shape[1:3])
    rows = rows if interleaved else rows.transpose(1, 2)
    rows = (gate(rows) if callable(gate) else run_steps(gate, rows)).squeeze(-1)
    # Apply the routing weights before the last product: autograd then saves the product's input,
    # which is smaller than its result.
    rows = segment_matmul((rows * scale).to(down.dtype), down.mT, ends, tail)
    if down_bias is not None:
        rows = rows + down_bias[local_ids] * scale
    # Not `index_add`, which is not deterministic on GPUs: devices that replicate the computation
    # must get equal results.
    zeros = x.new_zeros(ids.numel() // top_k, hidden)
    result: Tensor = zeros.index_put((tokens,), rows.to(x.dtype), accumulate=True).view_as(x)
    return result


def _count_local_token_copies(ends: Tensor, num_token_copies: int, num_experts: int) -> int:
    """Return the number of token copies routed to the local experts.

    On the meta device routing is assumed to be balanced.

    Args:
        ends: cumulative number of token copies up to each local expert, `[experts]`.
        num_token_copies: number of token copies routed to all experts.
        num_experts: number of experts on all devices.
    """
    if ends.is_meta:
        return -(-num_token_copies * ends.shape[0] // num_experts)
    return int(ends[-1])


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    scale: float | None = None,
    start: int | torch.SymInt = 0,
) -> Tensor:
    """Compute sliding window attention: a query reads the last `window` positions, its own
    included.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`; may have fewer heads, each shared by a group of
            adjacent query heads. The last key has the position of the last query.
        window: number of positions that a query reads.
        scale: factor of the scores, by default `size ** -0.5`.
        start: position of the first query; keys before position 0 are not read.

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
    """Compute attention under a mask computed block by block from vectors, e.g. document ids.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`; may have fewer heads, each shared by a group of
            adjacent query heads. The first key has position 0.
        vectors: inputs of the mask, one element per query, `[..., queries, 1]`, or per key,
            `[..., 1, keys]`.
        terms: conditions for reading a key: `"eq 0 1, all 2"` if vectors 0 and 1 must be equal,
            and the boolean vector 2 true.
        causal: whether a query only reads keys up to its own position.
        window: largest number of positions that a query reads, including its own; None for no
            limit.
        scale: factor of the scores, by default `size ** -0.5`.
        start: position of the first query.

    Returns:
        `[batch, heads, queries, size]`, with the size of the values.
    """
    options = (vectors, terms, causal, window, scale, start, 0)
    result: Tensor = blockwise_attention(query, key, value, *options)[0]
    return result


def run_steps(steps: Steps, x: Tensor) -> Tensor:
    """Apply `steps` to `x`, and return the result of the last step."""
    results: list[Any] = [x]
    for name, args, kwargs in steps:
        arguments = tuple(results[int(a[1:])] if _is_step_reference(a) else a for a in args)
        results.append(_parse_aten_operator(name)(*arguments, **dict(kwargs)))
    result: Tensor = results[-1]
    return result


def _is_step_reference(argument: Any) -> bool:
    """Whether an argument of a step, such as `"%1"`, refers to the input or an earlier result."""
    return isinstance(argument, str) and argument.startswith("%")


def _parse_aten_operator(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    _, packet, overload = name.split(".")
    step = getattr(getattr(torch.ops.aten, packet), overload)
    if not isinstance(step, OpOverload):  # names may come from a file, which must not run code
        raise ValueError(f"{name!r} is not an ATen operator\nuse for example aten.mul.Tensor")
    return step
