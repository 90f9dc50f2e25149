"""Explain errors of direct calls of a planned model's submodules."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from shardwright.errors import MixedTensorsError, PlanError


def explain_calls_of_parts(net: nn.Module) -> None:
    """Make direct calls of submodules of `net`, a planned model, raise errors that name a remedy.

    The program of a planned model never calls submodules; only the user's code does.
    """
    for submodule in net.modules():
        if submodule is not net:
            # On the instance, so that the class keeps its `forward`; a `forward` that the user has
            # set stays.
            vars(submodule).setdefault("forward", MethodType(_call_submodule_forward, submodule))


def leave_calls_of_parts(net: nn.Module) -> None:
    """Undo `explain_calls_of_parts` for the submodules of `net`."""
    for submodule in net.modules():
        if explains_calls(vars(submodule).get("forward")):
            del vars(submodule)["forward"]


def explains_calls(forward: object) -> bool:
    """Whether the `forward` of a submodule was set by `explain_calls_of_parts`."""
    return getattr(forward, "__func__", None) is _call_submodule_forward


def _call_submodule_forward(submodule: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the submodule's own `forward`.

    Raises:
        PlanError: if `forward` mixes sharded parameters with ordinary tensors.
    """
    try:
        # From the class, as the instance's `forward` is this function.
        return type(submodule).forward(submodule, *args, **kwargs)
    except MixedTensorsError:
        raise PlanError(
            f"submodule `{type(submodule).__name__}` of a planned model was called directly, but "
            "its parameters are sharded, and only calls of the full model run as planned\ncall the "
            "submodule inside `with sw.whole(net):`, or in `forward` of the model"
        ) from None
