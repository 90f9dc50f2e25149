"""Capture of each mixture of experts (MoE) as one operator, `custom_ops.experts`.

Expert modules of `transformers` select their dispatch by an interface; in the traced copy of a
model they call this operator instead. Models define different gates between the projections: the
gate is traced on one column of the projection, and its operators become an argument of the MoE
operator. Users call `mixture_of_experts` in their models.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from shardwright.core.capture.canonicalize import rewrites
from shardwright.core.capture.fx_nodes import insert
from shardwright.core.capture.naming import line_of
from shardwright.core.graph import custom_ops
from shardwright.errors import CaptureError

aten = torch.ops.aten

_REPLACED = (None, "eager", "batched_mm", "grouped_mm")
"""Names of the dispatch implementations of `transformers` that capture replaces; all others call
kernels of other libraries."""

_OF_COLUMNS = {
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int),
    *(aten.slice.Tensor, aten.select.int, aten.to.dtype, aten.zeros_like.default),
    *(aten.ones_like.default, aten.full_like.default, operator.getitem),
}


def mixture_of_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor] = functional.silu,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Compute a mixture of experts: for each token, the weighted sum of the outputs of its experts.

    An expert computes `down(activation(up(x)))`, or with a gate
    `down(activation(gate(x)) * up(x))`. No token is dropped. The function runs with and without a
    plan. Capture makes it one operator, which can be sharded by tokens (data parallel), experts
    (expert parallel) and the inner dimension (tensor parallel).

    Args:
        x: tokens, `[..., hidden]`.
        ids: expert indices of each token (top-k), `[..., k]`; out-of-range indices add nothing.
        weights: routing weights, `[..., k]`.
        up: up projections, `[experts, inner, hidden]`; with a gate `[experts, 2, inner, hidden]`,
            the gate projection first.
        down: down projections, `[experts, hidden, inner]`.
        activation: activation function; elementwise under a plan, may read full rows without one.
        up_bias: `[experts, inner]`, or with a gate `[experts, 2, inner]`.
        down_bias: `[experts, hidden]`.

    Returns:
        The outputs, `[..., hidden]`.

    Raises:
        ValueError: if `ids` is not an integer tensor or shapes do not agree.

    >>> import torch
    >>> import shardwright as sw
    >>> x, router = torch.randn(16, 8), torch.randn(4, 8)
    >>> weights, ids = (x @ router.T).softmax(-1).topk(2)
    >>> up, down = torch.randn(4, 32, 8), torch.randn(4, 8, 32)
    >>> sw.mixture_of_experts(x, ids, weights, up, down, torch.relu).shape
    torch.Size([16, 8])
    """
    tensors = (x, ids, weights, up, down, up_bias, down_bias)
    # A capture handles the call in its mode (`RecordedEffects`), by `dispatched`.
    if has_torch_function(tensors):
        biases: Any = {"up_bias": up_bias, "down_bias": down_bias}
        given: Any = (x, ids, weights, up, down, activation)
        result: Tensor = handle_torch_function(mixture_of_experts, tensors, *given, **biases)
        return result
    # `custom_ops.experts` passes gate and value in the last dimension. Transposed, that dimension
    # is the full row, which an activation that is not elementwise reads.
    return custom_ops.experts(
        *_check_operands(*tensors), lambda x: _apply_activation(activation, x.mT, -2).mT
    )


def dispatched(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Call the placeholder operator for `mixture_of_experts` during tracing; same arguments."""
    operands = _check_operands(x, ids, weights, up, down, up_bias, down_bias)
    # One column of the projection is enough for an elementwise gate; its operators are recorded.
    column = up.new_zeros(1, 1, operands[3].shape[1])
    result: Tensor = torch.ops.shardwright.experts(
        *operands, column, _apply_activation(activation, column, -1), False
    )
    return result


def _apply_activation(activation: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """Return `activation(x)`; with a gate, `activation(gate) * value`, where `x` stacks both along
    `dim`."""
    first, *value = torch.split(x, 1, dim)
    return activation(first) * value[0] if value else activation(first)


def _check_operands(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check and return the operands of `custom_ops.experts`; without a gate, `up` gets a dimension
    of size 1 in place of 2.

    Raises:
        ValueError: if `ids` is not an integer tensor or shapes do not agree.
    """
    if up.ndim not in (3, 4) or (up.ndim == 4 and up.shape[1] != 2):
        raise ValueError(
            f"`up` has shape {list(up.shape)}, which is not supported\n"
            "pass [experts, inner, hidden], or with a gate [experts, 2, inner, hidden]"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"`ids` must be integers, not {ids.dtype}\n"
            "pass the expert indices of `topk`: `weights, ids = probabilities.topk(2)`"
        )
    number, inner, hidden = up.shape[0], *up.shape[-2:]
    expected = {
        "x": (x, (*ids.shape[:-1], hidden)),
        "weights": (weights, tuple(ids.shape)),
        "down": (down, (number, hidden, inner)),
        "up_bias": (up_bias, tuple(up.shape[:-1])),
        "down_bias": (down_bias, (number, hidden)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"`{name}` has shape {list(tensor.shape)}, expected {list(shape)}\n"
                f"pass a tensor that matches `ids` of {list(ids.shape)} and `up` of "
                f"{list(up.shape)}"
            )
    # Without a gate there is one projection instead of two.
    if up.ndim == 3:
        up, up_bias = up.unsqueeze(1), None if up_bias is None else up_bias.unsqueeze(1)
    return x, ids, weights, up, down, up_bias, down_bias


def hint_of_experts(model: nn.Module) -> str:
    """Return a hint for errors about loops over experts; `""` if no module name suggests MoE."""
    names = [f"{path} {type(module).__name__}" for path, module in model.named_modules()]
    if any(word in name.lower() for name in names for word in ("expert", "moe", "mixture")):
        return " Replace a loop over experts by one call of `sw.mixture_of_experts`."
    return ""


def dispatch_in_one_operator(model: nn.Module) -> None:
    """Make all expert modules of `transformers` in `model` call `custom_ops.experts`.

    Args:
        model: the copy that will be traced; modified in place.
    """
    for module in model.modules():
        if _is_experts_operator(module):
            module.forward = MethodType(_forward_in_one_operator, module)


def is_one_operator(module: nn.Module) -> bool:
    """Return whether `dispatch_in_one_operator` has replaced the `forward` of a module."""
    return getattr(vars(module).get("forward"), "__func__", None) is _forward_in_one_operator


def _is_experts_operator(module: nn.Module) -> bool:
    """Whether `custom_ops.experts` computes the same result as the module.

    The module must use the MoE interface of `transformers`, and its gate must be the same function
    of each column.
    """
    file = getattr(type(module).forward, "__globals__", {}).get("__name__")
    # An instance with a `forward` of its own computes something else.
    if file != "transformers.integrations.moe" or "forward" in vars(module):
        return False
    implementation = getattr(module.config, "_experts_implementation", None)
    # Modules that already shard their experts, or normalize the outputs of each.
    special = ("_is_expert_parallel", "has_post_expert_norm")
    if implementation not in _REPLACED or any(getattr(module, each, False) for each in special):
        return False
    tensors = (_get_up_projection_weight(module), getattr(module, "down_proj", None))
    if not all(isinstance(t, Tensor) and t.ndim == 3 for t in tensors):
        return False
    return _has_columnwise_gate(module)


def _get_up_projection_weight(module: Any) -> Any:
    return getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)


def _interleaves_gate(module: Any) -> bool:
    """Whether columns of gate and value alternate in the projection; otherwise they are halves."""
    return not getattr(module, "is_concatenated", True)


def _run_gate(module: Any, x: Tensor) -> Tensor:
    result: Tensor = (module._apply_gate if module.has_gate else module.act_fn)(x)
    return result


def _has_columnwise_gate(module: Any) -> bool:
    count, width = 1 + module.has_gate, module.down_proj.shape[1 if module.is_transposed else 2]
    # Numbers of both signs up to 12, beyond limits at which gates clamp, such as 7 in GPT-OSS.
    rows = torch.arange(4.0 * count * width).mul(0.7).sin().mul(12).view(4, -1)
    columns = (
        rows.view(4, width, count) if _interleaves_gate(module) else rows.view(4, count, width).mT
    )
    try:
        with torch.no_grad():
            joint, single = (
                _run_gate(module, rows),
                _run_gate(module, columns).squeeze(-1),
            )
            # The gate of full rows must equal the gate of each column alone.
            return joint.shape == single.shape and torch.allclose(joint, single)
    except Exception:  # Code of the model, with a tensor of another shape than it expects.
        return False


@torch.library.custom_op("shardwright::experts", mutates_args=())
def _experts_placeholder(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    column: Tensor,
    gate_output: Tensor,
    interleaved: bool,
) -> Tensor:
    """Placeholder for an MoE layer during tracing.

    Args:
        column: one column of the up projection.
        gate_output: the gate's result on `column`.
    """
    raise NotImplementedError


@_experts_placeholder.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _forward_in_one_operator(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    projection, down = _get_up_projection_weight(self), self.down_proj
    num_projections = 1 + self.has_gate
    sizes = (-1, num_projections) if _interleaves_gate(self) else (num_projections, -1)
    if self.is_transposed:
        # From [experts, hidden, inner of gate and value] to [experts, ..., hidden], as
        # `custom_ops.experts` expects.
        gate_up, down = projection.unflatten(-1, sizes).permute(0, 2, 3, 1), down.mT
    else:
        gate_up = projection.unflatten(1, sizes)
    gate_up_bias = down_bias = None
    if self.has_bias:
        name = "gate_up_proj_bias" if self.has_gate else "up_proj_bias"
        gate_up_bias, down_bias = getattr(self, name).unflatten(-1, sizes), self.down_proj_bias
    column = projection.new_zeros(1, 1, num_projections)
    result: Tensor = torch.ops.shardwright.experts(
        *(hidden_states, top_k_index, top_k_weights, gate_up, down, gate_up_bias, down_bias),
        *(column, _run_gate(self, column), _interleaves_gate(self)),
    )
    return result


@rewrites(torch.ops.shardwright.experts.default)
def _rewrite_experts(node: fx.Node) -> fx.Node:
    *tensors, column, gate_output, interleaved = node.args
    return insert(
        node, custom_ops.experts, (*tensors, _trace_gate_steps(column, gate_output), interleaved)
    )


def _trace_gate_steps(column: Any, gate_output: Any) -> custom_ops.Steps:
    """Return the operators that compute `gate_output` from `column`.

    Raises:
        CaptureError: if an operator is not elementwise, or reads other tensors.
    """
    numbers: dict[fx.Node, str] = {column: "%0"}
    steps: list[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]] = []

    def written(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return visit(argument)
        return tuple(map(written, argument)) if isinstance(argument, (list, tuple)) else argument

    def visit(node: fx.Node) -> str:
        if node not in numbers:
            is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
            if not is_pointwise and node.target not in _OF_COLUMNS:
                raise CaptureError(
                    f"{line_of(node)}: the gate of these experts is not elementwise, or reads "
                    "other tensors\ncompute the gate from the up projection alone by elementwise "
                    "operators, such as `silu(gate) * value`"
                )
            args = tuple(map(written, node.args))
            kwargs = tuple((key, written(value)) for key, value in node.kwargs.items())
            is_item = node.target is operator.getitem
            # After `written` has appended the steps of the operands: steps are in order of
            # evaluation.
            steps.append(("getitem" if is_item else str(node.target), args, kwargs))
            numbers[node] = f"%{len(steps)}"
        return numbers[node]

    visit(gate_output)
    return tuple(steps)
