"""Mixtures of experts as one operator each: those of `transformers`, and those of users.

Modules of `transformers` that hold experts choose how they dispatch tokens by an interface, which a
copy of the model leaves for `custom_ops.experts`. The gate between the projections is whatever the
model makes of it: it is traced on a single column, and its operators become an argument.
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
"""What the experts of `transformers` compute by default or without kernels of other libraries."""

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
    """A mixture of experts, in place of a loop over them: the weighted sum of what the experts that
    a router chose make of each token.

    An expert is `down(activation(up(x)))`, or with a gate `down(activation(gate(x)) * up(x))`. No
    token is dropped. It runs anywhere, without a plan too; captured it is one operator, of which
    tokens, experts and the inner dimension can be cut.

    Args:
        x: tokens, `[..., hidden]`.
        ids: the number of each expert that a token chose, `[..., chosen]`; any other number adds
            nothing.
        weights: what each of them is weighed with, `[..., chosen]`.
        up: `[experts, inner, hidden]`; with a gate `[experts, 2, inner, hidden]`, first the gate's.
        down: `[experts, hidden, inner]`.
        activation: a function of each element, which a plan requires; without one, of whole rows.
        up_bias: as `up`, without `hidden`.
        down_bias: `[experts, hidden]`.

    Returns:
        As `x`.

    Raises:
        ValueError: if shapes do not fit together.

    >>> import torch
    >>> import shardwright as sw
    >>> x, router = torch.randn(16, 8), torch.randn(4, 8)
    >>> weights, ids = (x @ router.T).softmax(-1).topk(2)
    >>> up, down = torch.randn(4, 32, 8), torch.randn(4, 8, 32)
    >>> sw.mixture_of_experts(x, ids, weights, up, down, torch.relu).shape
    torch.Size([16, 8])
    """
    tensors = (x, ids, weights, up, down, up_bias, down_bias)
    if has_torch_function(tensors):
        biases: Any = {"up_bias": up_bias, "down_bias": down_bias}
        given: Any = (x, ids, weights, up, down, activation)
        result: Tensor = handle_torch_function(mixture_of_experts, tensors, *given, **biases)
        return result
    # Rows are whole in the last dimension, where an activation may read more than an element.
    return custom_ops.experts(*_operands(*tensors), lambda x: _gated(activation, x.mT, -2).mT)


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
    """What `mixture_of_experts` is while a model is traced."""
    operands = _operands(x, ids, weights, up, down, up_bias, down_bias)
    column = up.new_zeros(1, 1, operands[3].shape[1])
    result: Tensor = torch.ops.shardwright.experts(
        *operands, column, _gated(activation, column, -1), False
    )
    return result


def _gated(activation: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """From a gate and a value, or a value alone, along `dim` to the input of `down`."""
    first, *value = torch.split(x, 1, dim)
    return activation(first) * value[0] if value else activation(first)


def _operands(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tensors as the operator has them, which has one part where there is no gate.

    Raises:
        ValueError: if shapes do not fit together.
    """
    if up.ndim not in (3, 4) or (up.ndim == 4 and up.shape[1] != 2):
        raise ValueError(
            f"`up` is [experts, inner, hidden], or [experts, 2, inner, hidden] with a gate, and"
            f" not {list(up.shape)}"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"`ids` are numbers of experts, and not {ids.dtype}")
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
                f"`{name}` is {list(tensor.shape)}, and must be {list(shape)} with `ids` of"
                f" {list(ids.shape)} and `up` of {list(up.shape)}"
            )
    if up.ndim == 3:
        up, up_bias = up.unsqueeze(1), None if up_bias is None else up_bias.unsqueeze(1)
    return x, ids, weights, up, down, up_bias, down_bias


def hint_of_experts(model: nn.Module) -> str:
    """What to do about a loop over experts, if the name of a part of the model says that there may
    be one."""
    parts = [f"{name} {type(module).__name__}" for name, module in model.named_modules()]
    if any(word in part.lower() for part in parts for word in ("expert", "moe", "mixture")):
        return " A loop over the experts that were chosen is one call of `sw.mixture_of_experts`."
    return ""


def dispatch_in_one_operator(model: nn.Module) -> None:
    """Lets all experts in `model` call one operator in place of their own implementation."""
    for module in model.modules():
        if _is_replaceable(module):
            module.forward = MethodType(_forward, module)


def is_one_operator(module: nn.Module) -> bool:
    """Whether a module of a copy of a model dispatches in one operator."""
    return getattr(vars(module).get("forward"), "__func__", None) is _forward


def _is_replaceable(module: nn.Module) -> bool:
    """Whether the interface of `transformers` decides how it dispatches, for an implementation that
    computes the same, and its gate treats all columns alike."""
    file = getattr(type(module).forward, "__globals__", {}).get("__name__")
    if file != "transformers.integrations.moe" or "forward" in vars(module):
        return False
    implementation = getattr(module.config, "_experts_implementation", None)
    special = ("_is_expert_parallel", "has_post_expert_norm")
    if implementation not in _REPLACED or any(getattr(module, each, False) for each in special):
        return False
    tensors = (_projection(module), getattr(module, "down_proj", None))
    if not all(isinstance(t, Tensor) and t.ndim == 3 for t in tensors):
        return False
    return _treats_columns_alike(module)


def _projection(module: Any) -> Any:
    return getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)


def _interleaves(module: Any) -> bool:
    """Whether columns of gate and value alternate in the projection; else they are two halves."""
    return not getattr(module, "is_concatenated", True)


def _gate(module: Any, x: Tensor) -> Tensor:
    result: Tensor = (module._apply_gate if module.has_gate else module.act_fn)(x)
    return result


def _treats_columns_alike(module: Any) -> bool:
    parts, width = 1 + module.has_gate, module.down_proj.shape[1 if module.is_transposed else 2]
    rows = torch.arange(4.0 * parts * width).mul(0.7).sin().mul(12).view(4, -1)
    columns = rows.view(4, width, parts) if _interleaves(module) else rows.view(4, parts, width).mT
    try:
        with torch.no_grad():
            whole, single = _gate(module, rows), _gate(module, columns).squeeze(-1)
            return whole.shape == single.shape and torch.allclose(whole, single)
    except Exception:  # Code of the model, with a tensor of another shape than it expects.
        return False


@torch.library.custom_op("shardwright::experts", mutates_args=())
def _dispatch(
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
    """What stands for the experts while a model is traced: `gate_output` is what the gate makes of
    `column`."""
    raise NotImplementedError


@_dispatch.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    projection, down = _projection(self), self.down_proj
    parts = 1 + self.has_gate
    sizes = (-1, parts) if _interleaves(self) else (parts, -1)
    if self.is_transposed:
        gate_up, down = projection.unflatten(-1, sizes).permute(0, 2, 3, 1), down.mT
    else:
        gate_up = projection.unflatten(1, sizes)
    gate_up_bias = down_bias = None
    if self.has_bias:
        name = "gate_up_proj_bias" if self.has_gate else "up_proj_bias"
        gate_up_bias, down_bias = getattr(self, name).unflatten(-1, sizes), self.down_proj_bias
    column = projection.new_zeros(1, 1, parts)
    result: Tensor = torch.ops.shardwright.experts(
        *(hidden_states, top_k_index, top_k_weights, gate_up, down, gate_up_bias, down_bias),
        *(column, _gate(self, column), _interleaves(self)),
    )
    return result


@rewrites(torch.ops.shardwright.experts.default)
def _experts(node: fx.Node) -> fx.Node:
    *tensors, column, gate_output, interleaved = node.args
    return insert(node, custom_ops.experts, (*tensors, _steps(column, gate_output), interleaved))


def _steps(column: Any, gate_output: Any) -> custom_ops.Steps:
    """The operators from `column` to `gate_output`."""
    numbers: dict[fx.Node, str] = {column: "%0"}
    steps: list[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]] = []

    def written(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return visit(argument)
        return tuple(map(written, argument)) if isinstance(argument, (list, tuple)) else argument

    def visit(node: fx.Node) -> str:
        if node not in numbers:
            known = torch.Tag.pointwise in getattr(node.target, "tags", ())
            if not known and node.target not in _OF_COLUMNS:
                raise CaptureError(
                    f"{line_of(node)}: the gate of these experts is more than an operator on each "
                    "column, or reads tensors of its own"
                )
            args = tuple(map(written, node.args))
            kwargs = tuple((key, written(value)) for key, value in node.kwargs.items())
            is_item = node.target is operator.getitem
            steps.append(("getitem" if is_item else str(node.target), args, kwargs))
            numbers[node] = f"%{len(steps)}"
        return numbers[node]

    visit(gate_output)
    return tuple(steps)
