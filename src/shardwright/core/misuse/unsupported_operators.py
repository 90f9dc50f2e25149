"""Explain errors of DTensors: operators that DTensor does not support, and arithmetic with ordinary
tensors."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from shardwright.core.torch_internals.dtensor import (
    explain_mixing,
    set_operator_handler,
)
from shardwright.core.torch_internals.operators import OpOverload
from shardwright.errors import MixedTensorsError, PlanError

aten = torch.ops.aten

REMEDIES: dict[OpOverload, str] = {
    aten._fused_sgd_.default: "remove `fused=True` from `SGD`",
    aten._fused_sgd_.tensor_lr: "remove `fused=True` from `SGD`",
    aten._fused_adagrad_.default: "remove `fused=True` from `Adagrad`",
    aten._fused_adagrad_.tensor_lr: "remove `fused=True` from `Adagrad`",
    aten.pow_.Scalar: "`Adafactor` calls it: use another optimizer; in your own code, use `pow`",
    aten.index_put_.default: (
        "`Rprop` calls it: use another optimizer; in your own code, use `masked_fill_` or `where`"
    ),
}

OPTIMIZER_STEP_OPERATORS = frozenset({"add_", "addcdiv_", "addcmul_", "lerp_", "mul_"})
"""Operators that optimizers apply to each parameter in each step.

Explaining their errors would take a quarter of the time of an optimizer step, so errors are
explained only if the operator is called as a method of a DTensor. If it modifies an ordinary
tensor, PyTorch's own error is clear enough."""


COLLECTIVES = tuple(
    getattr(torch.ops.c10d, name).default
    for name in (
        "broadcast_",
        "allreduce_",
        "allreduce_coalesced_",
        "reduce_",
        "allgather_",
        "send",
    )
)
"""Operators of `torch.distributed` collectives, which `DistributedDataParallel` and reductions in
user code call."""


def explain_unsupported_operators() -> None:
    """Add remedies to errors of unsupported operators on DTensors, for all DTensors of this
    process."""
    for operator, remedy in REMEDIES.items():
        set_operator_handler(operator, partial(_explain_errors, operator, remedy))
    for operator in COLLECTIVES:
        set_operator_handler(operator, partial(_refuse_collective, operator))
    explain_mixing(_mixed_tensors_error, except_in=OPTIMIZER_STEP_OPERATORS)


def _explain_errors(
    operator: OpOverload, remedy: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return operator(*args, **kwargs)
    except RuntimeError as error:
        raise PlanError(
            f"{operator} cannot modify parameters that are DTensors ({error})\n{remedy}"
        ) from error


def _mixed_tensors_error(operator: OpOverload | str) -> MixedTensorsError:
    return MixedTensorsError(
        f"{operator}: got mixed torch.Tensor and DTensor; the parameters of a planned model, their"
        " gradients and tensors computed from them are DTensors\nuse the full parameter"
        " (`p.full_tensor()`, which is differentiable), or shard the ordinary tensor like the"
        " parameter"
        " (`torch.distributed.tensor.distribute_tensor(tensor, p.device_mesh, p.placements)`);"
        " write `loss = loss + penalty` instead of `loss += penalty`; inside"
        " `with sw.whole(net):` all tensors are ordinary"
    )


def _refuse_collective(operator: OpOverload, *_: object) -> NoReturn:
    raise PlanError(
        f"collective `{operator}` was called on parameters or gradients that are DTensors, but a"
        " planned model reduces its gradients itself\nremove `DistributedDataParallel` and your own"
        " reductions of gradients (`mode='data_parallel'` plans them); pass `p.full_tensor()` to"
        " other collectives"
    )
