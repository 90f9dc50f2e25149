"""Explain the error of a direct call of a submodule of a planned model."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from shardwright.errors import MixedTensorsError, PlanError


def explain_calls_of_parts(net: nn.Module) -> None:
    """Make submodules explain the error of mixed tensors if the user's code calls them.

    The program of the planned model itself never calls submodules, only the user's code can.
    """
    for part in net.modules():
        if part is not net:
            vars(part).setdefault("forward", MethodType(_forward_of_part, part))


def leave_calls_of_parts(net: nn.Module) -> None:
    """Undo `explain_calls_of_parts`."""
    for part in net.modules():
        if getattr(vars(part).get("forward"), "__func__", None) is _forward_of_part:
            del vars(part)["forward"]


def _forward_of_part(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the submodule's own `forward`.

    Raises:
        PlanError: if it mixes sharded parameters with ordinary tensors.
    """
    try:
        return type(part).forward(part, *args, **kwargs)
    except MixedTensorsError:
        raise PlanError(
            f"submodule `{type(part).__name__}` of a planned model was called by itself: its "
            "parameters are sharded, and only calls of the full model run as planned\ncall it "
            "with full parameters, inside `with shardwright.whole(net):`, or in `forward` of the "
            "model"
        ) from None
