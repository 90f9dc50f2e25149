"""Collect and restore the state of a model, its optimizer and the random generators, as tensors.

Keys are `model.<name>`, `optimizer.<parameter name>.<key>` and `random.<device type>`. Keys do not
depend on the plan, the number of devices or the pipeline stages: a stage has the keys of its own
parameters, and the key of a tied parameter is its first name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from shardwright.core.agreement.collective import values_of_ranks
from shardwright.core.checkpoint.group_settings import restored_groups
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.core.parallel.uninitialized import is_of_other_stage
from shardwright.core.runtime.accelerator import generator_states, set_generator_states
from shardwright.errors import CheckpointError, DamagedCheckpointError

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"

SavedMetadata = Mapping[str, TensorStorageMetadata]
"""Shapes and dtypes of the tensors of a checkpoint, by key."""


def model_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parameters and persistent buffers by key, without copying."""
    first = first_names(net)
    state = net.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    # Parameters of other pipeline stages are on the meta device.
    return {f"{MODEL}.{first[name]}": value for name, value in tensors.items() if not value.is_meta}


def optimizer_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state of this rank's parameters by key, without copying.

    Raises:
        CheckpointError: if the optimizer has a parameter that is not in the model, or state that is
            not a tensor.
    """
    tensors = {}
    for _, name, parameter in _iterate_optimizer_parameters(net, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            # None stands for an entry that the optimizer does not use.
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"cannot save the state {key!r} of {name!r} in {type(optimizer).__name__}: it "
                    f"is a {type(value).__name__}, not a tensor\n"
                    "store the state as a tensor: torch.tensor(value)"
                )
            tensors[f"{OPTIMIZER}.{name}.{key}"] = value
    return tensors


def drop_tied_duplicates(
    tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Drop tied tensors that another pipeline stage saves. Collective.

    Each stage stores its own copy of a parameter that is tied across stages, possibly with
    different sharding. The stage with the lowest rank saves the parameter.

    Args:
        tensors: the tensors of this rank, by key.
        group: process group of the saving ranks; None for all ranks.
    """

    def lowest_rank(tensor: Tensor) -> int:
        # Each stage has a mesh of its own ranks. Of ordinary tensors, which all ranks keep here,
        # DCP writes one copy.
        return int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else 0

    lowest_ranks = {key: lowest_rank(tensor) for key, tensor in tensors.items()}
    all_ranks = values_of_ranks(lowest_ranks, group)
    return {
        key: tensor
        for key, tensor in tensors.items()
        if lowest_ranks[key] == min(ranks[key] for ranks in all_ranks if key in ranks)
    }


def allocate_optimizer_state(
    net: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedMetadata, folder: Path
) -> dict[str, Tensor]:
    """Allocate tensors for the saved optimizer state of this rank's parameters, by key.

    State with the shape of its parameter, such as Adam's moments, is sharded like the parameter.

    Args:
        net: the model, parallelized or not.
        optimizer: the optimizer.
        saved: shapes and dtypes of all saved tensors, by key.
        folder: the folder of the checkpoint.

    Raises:
        DamagedCheckpointError: if the checkpoint lacks a part of the state.
    """
    keys_of_parameter: dict[str, list[str]] = {}
    for key in saved:
        section, _, suffix = key.partition(".")
        if section == OPTIMIZER:
            # Names of parameters contain dots, keys of the state do not.
            keys_of_parameter.setdefault(suffix.rpartition(".")[0], []).append(key)
    tensors = {}
    for _, name, parameter in _iterate_optimizer_parameters(net, optimizer):
        for key in keys_of_parameter.get(name, ()):
            size, dtype = saved[key].size, saved[key].properties.dtype
            is_sharded = size == parameter.shape
            if not is_sharded and size.numel() > sum(c.sizes.numel() for c in saved[key].chunks):
                raise DamagedCheckpointError(
                    f"{folder} is damaged: it lacks shards of {key!r}\nload an earlier checkpoint"
                )
            tensor = (
                torch.zeros_like(parameter, dtype=dtype)
                if is_sharded
                # A state of another shape is replicated, such as Adam's `step`, a scalar.
                else torch.zeros(size).to(dtype)
            )
            tensors[key] = tensor.detach()
    return tensors


def restore_optimizer(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    groups: list[dict[str, Any]] | None,
) -> None:
    """Load the saved state into the optimizer.

    Args:
        net: the model, parallelized or not.
        optimizer: the optimizer, changed in place.
        tensors: the saved state of the parameters, by key.
        groups: the saved settings of each parameter group, checked by `check_group_settings`; None
            to keep the optimizer's settings.
    """
    state_of_parameter: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, leaf = key.removeprefix(f"{OPTIMIZER}.").rpartition(".")
        state_of_parameter.setdefault(name, {})[leaf] = value
    # `Optimizer.load_state_dict` identifies parameters by their index.
    state = {
        index: state_of_parameter[name]
        for index, name, _ in _iterate_optimizer_parameters(net, optimizer)
        if name in state_of_parameter
    }
    current = optimizer.state_dict()["param_groups"]
    restored = current if groups is None else restored_groups(optimizer, current, groups)
    optimizer.load_state_dict({"state": state, "param_groups": restored})


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """Return the states of PyTorch's default random generators of the CPU and `device`, by key."""
    return {
        f"{RANDOM}.{device_type}": state for device_type, state in generator_states(device).items()
    }


def restore_random(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the states of PyTorch's default random generators of the CPU and `device`.

    Args:
        tensors: the saved states as byte tensors, by key.
        device: the device whose generator is restored besides the CPU's.
    """
    states = {key.removeprefix(f"{RANDOM}."): state for key, state in tensors.items()}
    set_generator_states(states, device)


def device_of(net: nn.Module) -> torch.device:
    """Return the device on which `net` runs on this rank."""
    if isinstance(net, ParallelModule):
        return net.execution.devices.device
    return next((p.device for p in net.parameters()), torch.device("cpu"))


def _iterate_optimizer_parameters(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield (index in the optimizer, first name, tensor) of each parameter of the optimizer.

    Raises:
        CheckpointError: if the optimizer has a parameter that is not in the model.
    """
    first = first_names(net)
    names = {parameter: first[name] for name, parameter in net.named_parameters()}
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, parameter in enumerate(parameters):
        # Counted in `index` nevertheless: indices are those of the optimizer, whatever the rank
        # stores.
        if is_of_other_stage(parameter):
            continue
        if parameter not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} has a parameter of shape "
                f"{tuple(parameter.shape)} that the model does not have\n"
                "construct the optimizer with parameters of the module that is saved or loaded: "
                f"{type(optimizer).__name__}(net.parameters())"
            )
        yield index, names[parameter], parameter


def first_names(net: nn.Module) -> dict[str, str]:
    """Map each name in the original model's state dict to the first name of the same tensor.

    The names differ for tied tensors only.
    """
    first_by_id: dict[int, str] = {}
    # `keep_vars`, as `state_dict` otherwise detaches each tensor, so that tied ones have different
    # ids.
    state = original_module(net).state_dict(keep_vars=True)
    return {name: first_by_id.setdefault(id(value), name) for name, value in state.items()}


def original_module(net: nn.Module) -> nn.Module:
    """Return the original model of a parallelized model, with the parameters of all stages."""
    net = wrapped_model(net)
    return net.execution.template if isinstance(net, ParallelModule) else net
