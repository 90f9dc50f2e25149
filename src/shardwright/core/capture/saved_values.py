"""Check that no gradient needs a tensor that is changed in place without autograd.

If autograd has saved the tensor, eager code raises an error in the backward pass or, after a change
through `.data`, computes gradients from the new values. The functional graph would compute them
from the old ones.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from shardwright.core.capture.fx_nodes import is_tensor
from shardwright.core.capture.naming import line_of
from shardwright.core.capture.views import LIST_VIEWS, view_base
from shardwright.core.graph.saved_tensors import SavedTensors, saved_by_call
from shardwright.core.torch_internals.operators import OpOverload
from shardwright.errors import CaptureError

aten = torch.ops.aten


def check_is_unsaved(base: fx.Node, by: fx.Node) -> None:
    """Check that no operator so far saves `base`, or a view of it, for its gradient.

    Args:
        base: tensor that is changed in place without autograd; not a view.
        by: node of the change.

    Raises:
        CaptureError: if an operator saves it.
    """
    for node in _operators_that_save(base):
        raise CaptureError(
            f"{line_of(by)}: this changes a tensor in place without autograd, but the gradient of"
            f" an earlier operator needs it ({line_of(node)})\ncompute a new tensor instead, such"
            " as `x = x + 1`"
        )


def _operators_that_save(base: fx.Node) -> Iterator[fx.Node]:
    if _saves_output(base):
        yield base
    views = [base]
    # Extended in the loop.
    for view in views:
        for user in view.users:
            if user.target is aten.detach.default or user.meta.get("no_grad"):
                continue
            if user.target in LIST_VIEWS:
                views.extend(user.users)
            elif view_base(user) is view:
                views.append(user)
            elif _saves_input(user, view):
                yield user


def _saves_output(node: fx.Node) -> bool:
    index = 0
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        index = node.args[1]  # type: ignore[assignment]
        node = node.args[0]
    return node.op == "call_function" and index in _find_saved(node).outputs


def _saves_input(node: fx.Node, source: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    # The operators of other functions are unknown.
    if not isinstance(node.target, OpOverload):
        return True
    saved = _find_saved(node).inputs
    inputs = _tensor_arguments(node)
    return any(inputs[index] is source for index in saved)


def _find_saved(node: fx.Node) -> SavedTensors:
    if not isinstance(node.target, OpOverload):
        return SavedTensors()
    arguments = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return saved_by_call(node.target, *arguments)


def _tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments in order, as often as they occur."""
    arguments: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), arguments.append)
    return [each for each in arguments if is_tensor(each)]
