"""Last line of each CaptureError: the `sw.local_map` call that avoids capture of a module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from shardwright.core.capture.explanation import OWN_ERROR
from shardwright.core.capture.fx_nodes import module_calls, module_path
from shardwright.core.capture.local_trace import example_entries
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError

_NAMES = "hwdefgijklmnop"
"""Dimension names, after the first, in a suggested notation."""

REMEDY = "or leave it as it is, on shards of the batch, before `plan`"

AS_UNDER_DDP = "the loss is then the mean of the shards' losses, as under DDP"
"""Note for a suggested `sw.local_map` of a full model whose loss may select samples by value: the
divisor of its mean then differs between shards."""


@contextmanager
def naming_local_map(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Return a context that appends a suggested call of `sw.local_map` to each CaptureError.

    The suggestion is for the innermost module whose `forward` raises the error, or for the model.
    """
    try:
        yield
    except CaptureError as error:
        if OWN_ERROR in str(error):  # `local_map` would raise it too.
            raise
        inner = _find_failing_module(error, module)
        if inner is None:
            remedy = f"{REMEDY}: `{_format_call_for_model(args, kwargs)}`; {AS_UNDER_DDP}"
        else:
            remedy = f"{REMEDY}: `{_format_call_for_module(*inner)}`"
        raise type(error)(f"{error}\n{remedy}") from error


def _find_failing_module(
    error: BaseException, model: nn.Module
) -> tuple[str, list[Tensor], Tensor | None] | None:
    """Find the innermost submodule in whose `forward` an error was raised.

    Returns:
        The path of the submodule, its tensor arguments, and its result if the trace has one; None
        if there is no submodule.
    """
    paths: dict[str, str] = {}
    for path, module in model.named_modules():
        # By class, because the frames refer to modules of the traced copy.
        paths.setdefault(_get_class_name(module), path)
    innermost: tuple[str, list[Tensor], Tensor | None] | None = None
    cause: BaseException | None = error
    while cause is not None and innermost is None:
        trace = cause.__traceback__
        while trace is not None:
            local_variables, is_forward = (
                trace.tb_frame.f_locals,
                trace.tb_frame.f_code.co_name == "forward",
            )
            path = (
                paths.get(_get_class_name(local_variables["self"]))
                if is_forward and "self" in local_variables
                else None
            )
            if path:
                arguments = _find_tensor_arguments(local_variables["self"], local_variables)
                innermost = path, arguments, None
            elif isinstance(node := local_variables.get("node"), fx.Node) and (
                path := module_path(node)[0]
            ):
                # An error after the trace, about this node.
                innermost = path, *_find_traced_tensors(node)
            trace = trace.tb_next
        cause = cause.__cause__ or cause.__context__
    return innermost


def _find_traced_tensors(node: fx.Node) -> tuple[list[Tensor], Tensor | None]:
    """Return the tensor arguments of the module call that contains a traced operator, and its
    result; None for several results."""
    calls = module_calls(node)
    depth = len(calls) - 1
    nodes = node.graph.nodes
    # A dict, as a set has no order.
    inside = dict.fromkeys(n for n in nodes if module_calls(n)[depth : depth + 1] == calls[depth:])
    entering = dict.fromkeys(each for n in inside for each in n.all_input_nodes)
    arguments = [
        each.meta["val"]
        for each in entering
        if each not in inside
        and isinstance(each.meta.get("val"), Tensor)
        and not _is_parameter_or_buffer(each)
    ]
    leaving = [n.meta.get("val") for n in inside if n.users.keys() - inside.keys()]
    result = leaving[0] if len(leaving) == 1 else None
    return arguments, result if isinstance(result, Tensor) else None


def _is_parameter_or_buffer(node: fx.Node) -> bool:
    # `torch.export` names placeholders by what they are; arguments have the names of the user.
    return node.op == "placeholder" and node.name.startswith(("p_", "b_", "c_"))


def _get_class_name(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _find_tensor_arguments(module: object, local_variables: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensor arguments of `forward` that are still in its local variables.

    Args:
        local_variables: values of the local variables of `forward`, by name.
    """
    forward: Any = vars(type(module)).get("forward", nn.Module.forward)
    names = inspect.signature(forward).parameters
    leaves = pytree.tree_leaves([local_variables.get(name) for name in names if name != "self"])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _format_call_for_module(path: str, tensors: list[Tensor], result: Tensor | None) -> str:
    if tensors and result is not None:
        shape = [str(size) if isinstance(size, int) else "_" for size in result.shape]
        # The batch is the first dimension, as in the notation of the arguments.
        if tensors[0].ndim and result.shape[:1] == tensors[0].shape[:1]:
            shape[0] = "b"
        notation = f"{example_entries(tensors)} -> {' '.join(shape) or '()'}"
        return f'sw.local_map(net.get_submodule({path!r}), "{notation}")'
    # Without known arguments: a batch of vectors.
    rank = tensors[0].ndim if tensors else 2
    # Assumes that the result has the shape of the first tensor.
    first = " ".join(("b", *(f"_{name}" for name in _NAMES[: rank - 1]))) if rank else "()"
    _, comma, others = example_entries(tensors).partition(",")
    return f'sw.local_map(net.get_submodule({path!r}), "{first}{comma}{others} -> {first}")'


def _format_call_for_model(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    entries = example_entries([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    return f'sw.local_map(net, "{entries} -> ()", partial="mean")'
