"""Last line of each CaptureError: the `sw.local_map` call that avoids capture of a module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from shardwright.core.capture.explanation import OWN_ERROR
from shardwright.core.capture.fx_nodes import module_path
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


def _find_failing_module(error: BaseException, model: nn.Module) -> tuple[str, list[Tensor]] | None:
    """Find the innermost submodule in whose `forward` an error was raised.

    Returns:
        The path of the submodule, and its tensor arguments; None if there is no submodule.
    """
    paths: dict[str, str] = {}
    for path, module in model.named_modules():
        # By class, because the frames refer to modules of the traced copy.
        paths.setdefault(_get_class_name(module), path)
    innermost: tuple[str, list[Tensor]] | None = None
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
                innermost = path, _find_tensor_arguments(local_variables["self"], local_variables)
            elif isinstance(node := local_variables.get("node"), fx.Node) and (
                path := module_path(node)[0]
            ):
                innermost = path, []  # An error after the trace, about this node.
            trace = trace.tb_next
        cause = cause.__cause__ or cause.__context__
    return innermost


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


def _format_call_for_module(path: str, tensors: list[Tensor]) -> str:
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
