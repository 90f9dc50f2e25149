"""Operators of optimizers that PyTorch's DTensors lack: an error says what to do instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwright.errors import PlanError
from shardwright.torch_internals.dtensor import handle
from shardwright.torch_internals.operators import OpOverload

aten = torch.ops.aten

REMEDIES: dict[OpOverload, str] = {
    aten._fused_sgd_.default: "leave out `fused=True` of `SGD`",
    aten._fused_sgd_.tensor_lr: "leave out `fused=True` of `SGD`",
    aten._fused_adagrad_.default: "leave out `fused=True` of `Adagrad`",
    aten._fused_adagrad_.tensor_lr: "leave out `fused=True` of `Adagrad`",
    aten.pow_.Scalar: "`Adafactor` does so: use another optimizer, in code of your own `pow`",
    aten.index_put_.default: (
        "`Rprop` does so: use another optimizer, in code of your own `masked_fill_` or `where`"
    ),
}


def explain_unsupported_operators() -> None:
    """Lets DTensors of this process refuse operators that they lack with what to do instead."""
    for operator, remedy in REMEDIES.items():
        handle(operator, partial(_explained, operator, remedy))


def _explained(
    operator: OpOverload, remedy: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return operator(*args, **kwargs)
    except RuntimeError as error:
        raise PlanError(
            f"{operator} cannot change parameters that are DTensors ({error}): {remedy}"
        ) from error
