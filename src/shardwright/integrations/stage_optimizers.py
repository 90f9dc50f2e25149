"""Optimizer states of one process, for optimizers whose parameters are in pipeline stages.

A state dict identifies parameters by their position. A rank has the parameters of its own stage, at
positions other than those in a run on one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.core.agreement.collective import is_rank_0, values_of_ranks
from shardwright.core.runtime.adopt_optimizer import (
    ParameterOrigin,
    order_in_one_process,
    origin_of,
    origins_of_model,
)
from shardwright.core.runtime.sent_dtypes import broadcast
from shardwright.core.runtime.total_norms import stage_models
from shardwright.core.torch_internals.distributed import device_of_objects
from shardwright.errors import CheckpointError

Names = list[list[str]]
"""Names of the parameters of each group."""

PARAMETER_NAMES = "param_names"
"""PyTorch's optional entry of a group, with a name for each parameter of this rank."""


def has_stages_on_any_rank(optimizer: Optimizer) -> bool:
    """Whether an optimizer has parameters in pipeline stages on any rank. Collective."""
    of_stages = {id(p) for model in stage_models().values() for p in model.parameters.values()}
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    # A rank has none of them if its stage has no parameter of the optimizer.
    return any(values_of_ranks(any(id(parameter) in of_stages for parameter in parameters)))


def gather_stages(optimizer: Optimizer) -> dict[str, Any]:
    """Gather the `state_dict` of an optimizer on one process; other ranks get None as tensors.

    Collective. Each tensor is gathered in its stage, then broadcast to all ranks.

    Raises:
        CheckpointError: if the order of parameters on one process is not known, or a state is
            neither a tensor nor a number.
    """
    names, states = _names_of_all_stages(optimizer), _state_by_name(optimizer)
    described = {
        name: {key: _describe(name, key, value) for key, value in state.items()}
        for name, state in states.items()
    }
    of_ranks, device = values_of_ranks(described), device_of_objects(None)
    gathered: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(chain.from_iterable(names)):
        owners = [rank for rank, entries in enumerate(of_ranks) if name in entries]
        # A parameter without state, such as a frozen one.
        if not owners:
            continue
        gathered[index] = {}
        for key, description in of_ranks[owners[0]][name].items():
            if not isinstance(description, list):
                gathered[index][key] = description
                continue
            shape, dtype = description
            tensor = states.get(name, {}).get(key)
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if tensor is None:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            tensor = tensor.detach().to(device).contiguous()
            broadcast(tensor, None, owners[0])
            gathered[index][key] = tensor.cpu().clone() if is_rank_0() else None
    groups: list[dict[str, Any]] = []
    for group, names_of_group in zip(optimizer.param_groups, names, strict=True):
        first = sum(len(earlier["params"]) for earlier in groups)
        settings = {name: value for name, value in group.items() if name != PARAMETER_NAMES}
        groups.append({**settings, "params": [*range(first, first + len(names_of_group))]})
    return {"state": gathered, "param_groups": groups}


def select_stage(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a one-process `state_dict` for the parameters of this rank's stage.

    Collective.

    Args:
        optimizer: optimizer of this rank's stage.
        state: `state_dict` of the optimizer on one process.

    Raises:
        CheckpointError: if the state has other numbers of parameters than the optimizer on one
            process, or their order there is not known.
    """
    names = _names_of_all_stages(optimizer)
    counts, saved_groups = [*map(len, names)], state["param_groups"]
    saved_counts = [len(group["params"]) for group in saved_groups]
    if counts != saved_counts:
        raise CheckpointError(
            f"the state of {type(optimizer).__name__} has groups of {saved_counts} parameters, but"
            f" this optimizer of all pipeline stages has {counts}\nload the state of an optimizer"
            " with the same groups"
        )
    indices = chain.from_iterable(group["params"] for group in saved_groups)
    index_of = dict(zip(chain.from_iterable(names), indices, strict=True))
    groups = [
        {**group, "params": [index_of[name] for name in names_of_group]}
        for group, names_of_group in zip(saved_groups, _names_on_rank(optimizer), strict=True)
    ]
    selected = {*chain.from_iterable(group["params"] for group in groups)}
    states = {index: value for index, value in state["state"].items() if index in selected}
    return {**state, "state": states, "param_groups": groups}


def _names_of_all_stages(optimizer: Optimizer) -> Names:
    """Return the parameters of each group in the order of a run on one process. Collective.

    An optimizer created from a planned model has them in the order of the model.
    """
    on_rank = _names_on_rank(optimizer)
    of_ranks: list[Names] = values_of_ranks(on_rank)
    in_groups = [{*chain.from_iterable(groups)} for groups in zip(*of_ranks, strict=True)]
    adopted = _name_groups(order_in_one_process(optimizer))
    model_order = [
        origin.name
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for origin in origins_of_model(parameter)
    ]
    # From a rank with parameters, as a stage may have none of them.
    model_order = max(values_of_ranks([*dict.fromkeys(model_order)]), key=len)
    names = []
    for number, in_group in enumerate(in_groups):
        ordered = adopted[number] if number < len(adopted) else []
        if {*ordered} != in_group:
            ordered = [name for name in model_order if name in in_group]
        names.append(ordered)
        of_group = [groups[number] for groups in of_ranks]
        if {*ordered} != in_group or any(
            [name for name in ordered if name in {*of_stage}] != of_stage for of_stage in of_group
        ):
            raise CheckpointError(
                f"the order of the parameters of {type(optimizer).__name__} on one process is not"
                " known, as it was created from the parameters of a pipeline stage in another"
                " order than the model's\ncreate the optimizer before the model is planned"
            )
    return names


def _names_on_rank(optimizer: Optimizer) -> Names:
    return _name_groups([group["params"] for group in optimizer.param_groups])


def _name_groups(groups: Sequence[Sequence[ParameterOrigin | Tensor]]) -> Names:
    """Name parameters or their origins, by numbers where the parameter is not planned.

    Raises:
        CheckpointError: if two parameters have one name, in different models.
    """
    unplanned = 0
    names: Names = []
    for group in groups:
        names.append([])
        for each in group:
            origin = each if isinstance(each, ParameterOrigin) else origin_of(each)
            # Parameters that are not planned are the same on all ranks, in one order.
            names[-1].append(origin.name if origin is not None else f"#{unplanned}")
            unplanned += origin is None
    flat = [*chain.from_iterable(names)]
    if len({*flat}) < len(flat):
        raise CheckpointError(
            "an optimizer has parameters of one name in several models with pipeline stages\n"
            "use one optimizer for each model"
        )
    return names


def _state_by_name(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names = chain.from_iterable(_names_on_rank(optimizer))
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in zip(names, parameters, strict=True)
        if parameter in optimizer.state
    }


def _describe(name: str, key: str, value: object) -> Any:
    """Describe a tensor as [shape, dtype], and return other values unchanged.

    Raises:
        CheckpointError: if the value cannot be sent.
    """
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype).removeprefix("torch.")]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"cannot save the state {key!r} of {name!r}: it is a {type(value).__name__}, neither a"
        " tensor nor a number\nstore the state as a tensor: torch.tensor(value)"
    )
