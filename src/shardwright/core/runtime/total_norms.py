"""Norms by `torch.nn.utils` over pipeline stages, and over tensors on several meshes.

A rank has the parameters of its own stage, so the norm of its tensors is not the norm of the model.
This module computes the norm over all stages. Tensors of several planned models, or of planned and
ordinary models, cannot be arguments of one operator, so norms are computed for each mesh and then
combined.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.runtime.adopt_optimizer import is_planned_parameter, origin_of
from shardwright.core.runtime.clip_grad import norm_over_devices
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.runtime.training_record import are_planned_for_all_ranks, training_record
from shardwright.core.torch_internals.norms import extend_norms
from shardwright.core.torch_internals.tensors import storage_id
from shardwright.errors import PlanError


@dataclass(frozen=True)
class StageParameters:
    """The parameters of one stage of a planned model.

    Args:
        parameters: the parameters of this rank, by name.
        stages: indices of the stages that own each parameter of the full model, by name; a tied
            parameter has an entry for each of its names.
        devices: this rank's view of the devices.
        dtype: dtype of norms, equal on all ranks.
    """

    parameters: Mapping[str, nn.Parameter]
    stages: Mapping[str, tuple[int, ...]]
    devices: Devices
    dtype: torch.dtype

    @staticmethod
    def of(
        module: nn.Module, full: nn.Module, stages: Mapping[str, tuple[int, ...]], devices: Devices
    ) -> StageParameters:
        """Return the parameters of this rank's stage.

        Args:
            module: this rank's stage of the model.
            full: the full model, on the meta device.
            stages: indices of the stages that own each parameter, by the parameter's first name in
                `full`; a missing parameter is owned by the first stage.
            devices: this rank's view of the devices.
        """
        # `stages` knows a tied parameter by its first name only.
        first = {id(parameter): name for name, parameter in full.named_parameters()}
        stages_of_names = {
            name: stages.get(first[id(parameter)], (0,))
            for name, parameter in full.named_parameters(remove_duplicate=False)
        }
        dtypes = [parameter.dtype for parameter in full.parameters()]
        # bfloat16 promotes to every wider dtype; parameters in float16 give float32.
        dtype = reduce(torch.promote_types, dtypes, torch.bfloat16)
        return StageParameters(dict(module.named_parameters()), stages_of_names, devices, dtype)

    def counted_memory(self) -> dict[Hashable, bool]:
        """Map each parameter and gradient of this stage to whether the stage counts it in norms.

        A tied parameter is counted only by the first of its stages. Keys are storage locations
        (`_make_storage_key`).
        """
        result: dict[Hashable, bool] = {}
        for name, parameter in self.parameters.items():
            counts = min(self.stages[name]) == self.devices.stage
            result[_make_storage_key(parameter)] = counts
            if parameter.grad is not None:
                result[_make_storage_key(parameter.grad)] = counts
        return result

    def stages_below(self, path: str) -> set[int]:
        """Return the stages that own parameters of the submodule at `path`."""
        prefix = f"{path}." if path else ""
        return {
            stage
            for name, stages in self.stages.items()
            if name.startswith(prefix)
            for stage in stages
        }


@cache
def stage_models() -> WeakKeyDictionary[nn.Module, StageParameters]:
    """Return the stage parameters of each pipelined model of this process."""
    return WeakKeyDictionary()


@cache
def extend_total_norms() -> None:
    """Make norms of `torch.nn.utils` include all stages and meshes, for the rest of the process."""
    extend_norms(TotalNorms())


class TotalNorms:
    """Replacement of the norms of `torch.nn.utils` that includes all stages and meshes."""

    def total(
        self,
        function: str,
        listed: Sequence[Tensor],
        measured: Sequence[Tensor],
        source: nn.Module | None,
        norm_type: float,
    ) -> Tensor | None:
        """Return the norm over all stages and meshes; None if PyTorch can compute it.

        Collective if `listed` has parameters or gradients of a stage, or is empty, as on a stage
        without the requested parameters: then every rank must call the function.

        Args:
            function: name of the function of `torch.nn.utils`, for errors.
            listed: the tensors that the user passed.
            measured: the tensors whose norm is computed, e.g. gradients of `listed`.
            source: the module whose parameters `listed` are; None if unknown.
            norm_type: order of the norm.

        Raises:
            PlanError: if the order is not positive, or a tensor is a local shard of a stage.
        """
        models = _find_models_in_norm_call(listed, source)
        groups = self.groups(measured)
        # PyTorch itself computes the norm of tensors on one mesh.
        if not models and len(groups) < 2:
            return None
        # Negated, so that NaN is refused too.
        if not norm_type > 0:
            raise PlanError(
                f"`torch.nn.utils.{function}` with norm_type={norm_type} is not supported for "
                "models in pipeline stages, or for several models\nuse a positive `norm_type`, or "
                "`math.inf`"
            )
        counts = {key: n for model in models for key, n in model.counted_memory().items()}
        stage_tensors = [tensor for tensor in measured if _make_storage_key(tensor) in counts]
        for tensor in stage_tensors:
            if models[0].devices.mesh is not None and not isinstance(tensor, DTensor):
                raise PlanError(
                    f"`torch.nn.utils.{function}` was called with local shards of a model in"
                    " pipeline stages\npass the DTensors of parameters or gradients, whose norm is"
                    " computed over all devices and stages"
                )
        other_tensors = [tensor for tensor in measured if _make_storage_key(tensor) not in counts]
        norms = [_compute_norm_on_mesh(group, norm_type) for group in self.groups(other_tensors)]
        dtypes = [norm.dtype for norm in norms] + [model.dtype for model in models]
        if models:
            counted = [tensor for tensor in stage_tensors if counts[_make_storage_key(tensor)]]
            # The all-reduce is over the default process group, which all models share.
            norms.append(norm_over_devices(counted, models[0].devices, norm_type))
        # In float64, so that combining the norms loses no digits.
        stacked_norms = torch.stack([norm.double().to(norms[-1].device) for norm in norms])
        # The norm of the parts' norms is the norm of all elements.
        norm: Tensor = torch.linalg.vector_norm(stacked_norms, norm_type)
        return norm.to(reduce(torch.promote_types, dtypes))

    def clipped(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        """Record clipping, which ranks compare, unless it is of models with stages."""
        if math.isfinite(max_norm) and are_planned_for_all_ranks(parameters):
            training_record().max_norm += max_norm

    def groups(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Group tensors by device mesh; ordinary tensors form one group."""
        groups: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
            groups.setdefault(mesh, []).append(tensor)
        return list(groups.values())

    def trained(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Replace parameters of the original model by planned parameters that have gradients.

        A list made before planning has parameters of the original model, which get no gradients.
        Parameters of other stages are omitted.
        """
        trained: list[Tensor] = []
        for parameter in parameters:
            origin = origin_of(parameter)
            if parameter.grad is not None or origin is None or is_planned_parameter(parameter):
                trained.append(parameter)
                continue
            planned = [p for p in origin.parameters_of_models() if is_planned_parameter(p)]
            if not planned and any(model in stage_models() for model in origin.models):
                continue
            with_gradient = (p for p in planned if p.grad is not None)
            trained.append(next(with_gradient, parameter))
        return trained


def _find_models_in_norm_call(
    listed: Sequence[Tensor], source: nn.Module | None
) -> list[StageParameters]:
    """Return the models over whose stages the norm of a call is computed.

    Args:
        listed: the tensors that the user passed to the norm function.
        source: the module whose parameters `listed` are; None if unknown.
    """
    models = stage_models()
    if source is not None:
        for module, model in models.items():
            for path, child in module.named_modules():
                if child is source:
                    # On one stage PyTorch's own norm is right, and ranks of other stages do not
                    # call it.
                    return [model] if len(model.stages_below(path)) > 1 else []
        # The source may also contain planned models.
        inside = set(source.modules())
        return [model for module, model in models.items() if module in inside]
    # Perhaps a stage without the requested parameters, whose rank must join the collective.
    if not listed:
        return list(models.values())[:1]
    memory = {_make_storage_key(tensor) for tensor in listed}
    return [model for model in models.values() if not memory.isdisjoint(model.counted_memory())]


def _compute_norm_on_mesh(tensors: list[Tensor], norm_type: float) -> Tensor:
    norm = nn.utils.get_total_norm(tensors, norm_type)
    # An ordinary tensor, as norms on several meshes are combined.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _make_storage_key(tensor: Tensor) -> Hashable:
    """Return a hashable key of a tensor's memory: (storage, offset, size) of the local shard, or
    the `id` of a sparse tensor."""
    local = detached_local(tensor)
    if local.layout is not torch.strided:
        return id(tensor)
    # Gradients of a bucket share a storage.
    return storage_id(local), local.storage_offset(), local.numel()
