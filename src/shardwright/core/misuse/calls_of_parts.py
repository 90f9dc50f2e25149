"""Calls of a submodule of a planned model by itself."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from shardwright.errors import MixedTensorsError, PlanError


def explain_calls_of_parts(net: nn.Module) -> None:
    """Lets submodules explain the error of DTensors when the user's own code calls them."""
    for part in net.modules():
        if part is not net:
            vars(part).setdefault("forward", MethodType(_forward_of_part, part))


def leave_calls_of_parts(net: nn.Module) -> None:
    """Undoes `explain_calls_of_parts`."""
    for part in net.modules():
        if getattr(vars(part).get("forward"), "__func__", None) is _forward_of_part:
            del vars(part)["forward"]


def _forward_of_part(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a submodule of a parallel module, which only the user's own code calls.

    Raises:
        PlanError: if that mixes sharded parameters with plain tensors.
    """
    try:
        return type(part).forward(part, *args, **kwargs)
    except MixedTensorsError:
        raise PlanError(
            f"a {type(part).__name__} inside of a planned model was called by itself: its "
            "parameters are sharded, and only calls of the whole model run as planned. Call it "
            "with whole parameters, inside `with shardwright.whole(net):`, or let `forward` of "
            "the model call it"
        ) from None
