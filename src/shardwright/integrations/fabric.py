"""A strategy of Lightning's `Fabric` that plans and shards the model passed to `setup`.

fabric = Fabric(devices=8, strategy=FabricStrategy())
net, optimizer = fabric.setup(net, optimizer)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.runtime.adopt_optimizer import adopt_parameters_of_model
from shardwright.errors import CheckpointError
from shardwright.integrations.full_state import (
    full_model_state,
    full_optimizer_state,
    load_full_optimizer_state,
)
from shardwright.integrations.lightning_folder import (
    is_distributed_checkpoint,
    load_folder,
    save_folder,
)
from shardwright.integrations.versions import require_version

require_version("lightning", "shardwright.integrations.fabric")

from lightning.fabric import strategies  # noqa: E402
from lightning.fabric.wrappers import _unwrap_objects  # noqa: E402

from shardwright.integrations.lightning_common import PlannedModelsStrategy  # noqa: E402

FabricDDPStrategy: Any = strategies.DDPStrategy
"""Lightning Fabric's `DDPStrategy`, untyped because its types differ between versions."""


class FabricStrategy(PlannedModelsStrategy, FabricDDPStrategy):  # type: ignore[misc]
    """Fabric strategy that plans the module passed to `fabric.setup` and shards it over all ranks.

    Losses, gradient clipping and accumulation have the results of a one-process run. By default
    every rank loads the global batch, so a loader's `batch_size` is the global batch size. If the
    plan's `dataset_strategy` shards the batch, `batch_size` counts the samples of one rank, as
    under `DDPStrategy`.

    Args:
        plan: the plan of the module or of one of its submodules, or the path of a plan file. None
            plans the module with the first batch.
        save_distributed_checkpoint: whether each rank saves its shards to a folder, which any plan
            can load. By default a checkpoint is one file, as saved by
            one process.
        options: options of `sw.plan`, such as `mem_coeff`; only if `plan` is None.
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        save_distributed_checkpoint: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(plan, save_distributed_checkpoint=save_distributed_checkpoint, **options)
        self._optimizers: list[Optimizer] = []
        self._backward_sync_control = _NoBackwardSyncControl()

    # Setup

    def setup_module(self, module: nn.Module) -> nn.Module:
        with self.precision.forward_context():
            self._planned_models.shard(module, self.root_device, lambda: self._optimizers)
        self._planned_models.move_modules_without_parameters(module, self.root_device)
        self._planned_models.count_once(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._optimizers.append(optimizer)
        # A model that is planned later replaces its parameters in `_optimizers` by itself.
        for net in self._planned_models.nets:
            for module in net.modules():
                if isinstance(module, ParallelModule):
                    adopt_parameters_of_model(optimizer, module)
        return optimizer

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._planned_models.check_gradients()
        return super().optimizer_step(optimizer, **kwargs)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `setup_module` moves only this rank's shards to the device."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        # None is the order of one process: `process_dataloader` makes it equal on all ranks.
        return None if self._planned_models.shards.count == 1 else self._sampler_arguments

    # Metrics

    def count_once(self, metric: nn.Module) -> None:
        """Make a `torchmetrics` metric count each sample once, not once per replica."""
        self._planned_models.count_once(metric)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduce_over_distinct_samples(tensor, reduce_op)

    # Checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_model_state(module)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        # Fabric passes its own wrapper of the optimizer.
        return full_optimizer_state(getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        # The path of rank 0, as a name may contain a time.
        path = Path(self.broadcast(path))
        if not self._distributed_checkpoints:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        key, net, optimizers, others = _split_checkpoint_state(_unwrap_objects(state))
        metadata = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in others.items()
        }
        save_folder(path, net, key, optimizers, metadata)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        path = Path(self.broadcast(path))
        if not is_distributed_checkpoint(path):
            return self._load_file(path, state, strict, weights_only)
        # Fabric accepts a module in place of a dict.
        state = {"model": state} if isinstance(state, nn.Module) else state
        key, net, optimizers, others = _split_checkpoint_state(_unwrap_objects(state or {}))
        metadata = load_folder(path, net, key, optimizers, strict=strict, weights_only=weights_only)
        # As Fabric does, restores the values in `state` and returns the other entries.
        for name, value in others.items():
            if name not in metadata:
                continue
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(metadata.pop(name))
            else:
                state[name] = metadata.pop(name)
        return metadata

    def _load_file(self, path: Path, state: Any, *options: Any) -> dict[str, Any]:
        """Load a file of one process, of which optimizers take the part of their stage."""
        if not isinstance(state, dict):
            state = _FullOptimizer(state) if isinstance(state, Optimizer) else state
            loaded: dict[str, Any] = super().load_checkpoint(path, state, *options)
            return loaded
        optimizers = {n: _FullOptimizer(v) for n, v in state.items() if isinstance(v, Optimizer)}
        with_optimizers = state | optimizers
        loaded = super().load_checkpoint(path, with_optimizers, *options)
        # Fabric replaces values that have no `load_state_dict`.
        state.update({n: v for n, v in with_optimizers.items() if n not in optimizers})
        return loaded


class _FullOptimizer(Optimizer):
    """Stand-in for an optimizer, which loads the full state of a run on one process."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_full_optimizer_state(self.optimizer, state_dict)


class _NoBackwardSyncControl:
    """Backward-sync control that does nothing: the plan decides when gradients are reduced."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


def _split_checkpoint_state(
    state: dict[str, Any],
) -> tuple[str, nn.Module, dict[str, Optimizer], dict[str, Any]]:
    """Split a Fabric checkpoint state into (key of the model, model, optimizers, other entries).

    Raises:
        CheckpointError: if the state does not have exactly one model.
    """
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    if len(models) != 1:
        raise CheckpointError(
            f"a distributed checkpoint needs exactly one model, but its state has {len(models)}\n"
            "pass one model and its optimizers: `fabric.save(path, {'model': net, ...})`"
        )
    ((key, net),) = models.items()
    optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    others = {n: v for n, v in state.items() if n != key and n not in optimizers}
    return key, net, optimizers, others
