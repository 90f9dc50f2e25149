"""Plan and shard the models inside a Lightning module, for Fabric and for Trainer.

A `LightningModule` computes losses and logs metrics around its models. So its `training_step` is
not planned, but the modules that the step calls: itself, by `self(x)`, or some of its submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.core.api.parallelize import parallelize
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.runtime.adopt_optimizer import (
    adopt_parameters_of_model,
    origin_of,
    planned_parameters_by_origin,
)
from shardwright.errors import PlanError
from shardwright.integrations.plan_on_call import (
    USER_CLASS,
    plan_on_first_call,
    read_plan,
    train_stages_in_calls,
)
from shardwright.integrations.rank_data import DataShards, share_order
from shardwright.integrations.unplanned_parameters import (
    check_gradients,
    take_unplanned_tensors_of_rank_0,
)


class PlannedModels:
    """The planned models of a Lightning strategy, and how batches are divided over the ranks.

    Args:
        plan: a plan, the path of a plan file, or None to plan each model in its first call.
        options: options of `sw.plan`; empty if `plan` is not None.
    """

    def __init__(self, plan: Plan | str | Path | None, options: Mapping[str, Any]) -> None:
        self._plan, self._options = read_plan(plan, options), options
        self._shards: DataShards | None = None
        self._group: dist.ProcessGroup | None = None
        self._nets: list[nn.Module] = []

    @property
    def shards(self) -> DataShards:
        """The division of a batch over the ranks; needs the process group."""
        if self._shards is None:
            if self._plan is not None:
                self._shards = DataShards.of_plan(self._plan)
            else:
                self._shards = DataShards.of_options(self._options)
            # Collective: all ranks must read this property.
            self._group = self._shards.group_of_distinct_samples()
        return self._shards

    @property
    def nets(self) -> tuple[nn.Module, ...]:
        """The modules passed to `shard`."""
        return tuple(self._nets)

    def shard(
        self, net: nn.Module, device: torch.device, optimizers: Callable[[], Iterable[Optimizer]]
    ) -> None:
        """Shard the models in `net` in place: at once with a plan, otherwise in their first calls.

        Modules that the user's code has parallelized are not planned again. Other parameters and
        buffers get the values of rank 0. Collective.

        Args:
            net: the user's module.
            device: the device of this rank.
            optimizers: returns the optimizers created so far, which a sharded model adopts.

        Raises:
            PlanError: if no module of `net` has the parameters of the plan, or a planned module
                divides batches over the ranks differently than earlier models and loaders.
        """
        if all(earlier is not net for earlier in self._nets):
            self._nets.append(net)
        self._shard_models(net, device, optimizers)
        take_unplanned_tensors_of_rank_0(net, device)

    def _shard_models(
        self, net: nn.Module, device: torch.device, optimizers: Callable[[], Iterable[Optimizer]]
    ) -> None:
        planned = [module for module in net.modules() if isinstance(module, ParallelModule)]
        if planned:
            for module in planned:
                self._use_shards_of(module)
                train_stages_in_calls(module)
            return

        def adopted(parallel: ParallelModule) -> None:
            for optimizer in optimizers():
                adopt_parameters_of_model(optimizer, parallel)
            _toggle_planned_parameters(net, parallel)
            train_stages_in_calls(parallel)

        if self._plan is not None:
            parallel = parallelize(_find_module_of_plan(net, self._plan), self._plan, device)
            assert isinstance(parallel, ParallelModule)
            adopted(parallel)
            return
        # A step calls the module itself or its submodules; the first that is called is planned.
        # Fabric calls the module itself, unless it is a `LightningModule`.
        candidates = [net, *net.children()] if hasattr(net, "training_step") else [net]
        for candidate in candidates:
            has_parameters = any(True for _ in candidate.parameters())
            # The temporary class shows that the module has been prepared before.
            if has_parameters and USER_CLASS not in vars(type(candidate)):
                context = partial(_without_toggled_optimizer, net)
                plan_on_first_call(candidate, self._options, device, adopted, context)

    def _use_shards_of(self, planned: ParallelModule) -> None:
        """Divide batches as a model that the user has planned."""
        shards = DataShards.of_model(planned)
        if self._shards is None:
            self._shards, self._group = shards, shards.group_of_distinct_samples()
        elif self._shards != shards:
            raise PlanError(
                f"the plan of {type(planned).__name__} divides a batch into {shards.count} shards,"
                f" but earlier models and loaders of this strategy into {self._shards.count}\nplan"
                " all models with the same `dataset_strategy`, and set up loaders after the models"
            )

    def check_gradients(self) -> None:
        """Check that local batches gave gradients only to planned parameters of the modules."""
        check_gradients(self._nets, self.shards)

    def move_modules_without_parameters(self, net: nn.Module, device: torch.device) -> None:
        """Move modules without parameters, such as metrics, to the device of this rank."""
        # `parallelize` moves parameters, shard by shard.
        if any(True for _ in net.parameters()):
            for child in net.children():
                self.move_modules_without_parameters(child, device)
        else:
            net.to(device)

    def check_loader(self, loader: Any) -> Any:
        """Check that a loader gives each rank its planned samples, in the same order on all
        ranks."""
        self.shards.check_divided_loader(loader)
        if self.shards.count == 1:
            share_order(loader)
        return loader

    def count_once(self, module: nn.Module) -> None:
        """Make `torchmetrics` metrics in `module` count each sample once, not once per replica."""
        shards = self.shards
        for metric in module.modules():
            if hasattr(metric, "distributed_available_fn"):
                # The group has one rank of each data shard.
                metric.process_group = self._group  # type: ignore[assignment]
                if shards.count == 1:
                    # Every rank has counted all samples.
                    metric.distributed_available_fn = _is_not_distributed  # type: ignore[assignment]

    def reduce(self, value: Any, reduce_op: Any, reduce: Callable[..., Any]) -> Any:
        """Reduce a value over one rank of each data shard, so that each sample counts once.

        Args:
            value: a tensor; other values are returned unchanged.
            reduce_op: Lightning's name of the reduction, such as `mean` or `sum`.
            reduce: Lightning's function that reduces a tensor over a process group.
        """
        if not isinstance(value, Tensor):
            return value
        value = value.full_tensor() if isinstance(value, DTensor) else value
        # Every rank has the value over all samples.
        if self.shards.count == 1:
            return value
        return reduce(value, group=self._group, reduce_op=reduce_op)

    def all_gather(self, value: Tensor, gather: Callable[..., Tensor], sync_grads: bool) -> Tensor:
        """Gather a tensor from one rank of each data shard, along a new dimension 0."""
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if self.shards.count == 1:
            # Lightning stacks the tensors of ranks along dimension 0.
            return value.unsqueeze(0)
        return gather(value, group=self._group, sync_grads=sync_grads)


def _get_toggle_state(net: nn.Module) -> dict[nn.Parameter, bool]:
    """Return the `requires_grad` values that `LightningModule.untoggle_optimizer` will restore."""
    state: dict[nn.Parameter, bool] = getattr(net, "_param_requires_grad_state", {})
    return state


@contextmanager
def _without_toggled_optimizer(net: nn.Module) -> Iterator[None]:
    """Context that unfreezes the parameters of `net` that `toggle_optimizer` has frozen.

    A training step may toggle before the first call of a model, which plans the model: the plan
    must not treat these parameters as frozen.
    """
    state = _get_toggle_state(net)
    toggled = {parameter: parameter.requires_grad for parameter in state}
    for parameter, requires_grad in state.items():
        parameter.requires_grad_(requires_grad)
    try:
        yield
    finally:
        for parameter, requires_grad in toggled.items():
            parameter.requires_grad_(requires_grad)


def _toggle_planned_parameters(net: nn.Module, parallel: ParallelModule) -> None:
    """Freeze planned parameters if `toggle_optimizer` froze the parameters that they replace.

    `untoggle_optimizer` then restores the planned parameters.
    """
    planned = planned_parameters_by_origin(parallel)
    state = _get_toggle_state(net)
    for parameter in list(state):
        new = planned.get(origin_of(parameter))
        if new is not None and new is not parameter:
            new.requires_grad_(parameter.requires_grad)
            state[new] = state.pop(parameter)


def _find_module_of_plan(net: nn.Module, plan: Plan) -> nn.Module:
    """Return the outermost module of `net` with the parameters of `plan`, by name and shape."""
    planned = {name: tuple(shape) for name, (shape, _) in plan.parameters.items()}
    for module in net.modules():
        named = dict(module.named_parameters(remove_duplicate=False))
        shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        # A plan may have one or all names of a tied parameter.
        if planned.items() <= shapes.items() and dict(module.named_parameters()).keys() <= {
            *planned
        }:
            return module
    raise PlanError(
        f"no module of {type(net).__name__} has the {len(planned)} parameters of the plan:"
        f" {', '.join([*planned][:3])}, …\npass the plan of the module or of one of its"
        " submodules, for example `plan=sw.plan(module.net, batch, devices=8)`"
    )


def _is_not_distributed() -> bool:
    return False
