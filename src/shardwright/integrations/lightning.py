"""A strategy of Lightning's `Trainer` that plans and shards the models of a `LightningModule`.

trainer = Trainer(devices=8, strategy=ShardwrightStrategy())
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from shardwright.errors import PlanError
from shardwright.integrations.full_state import (
    full_model_state,
    full_optimizer_state,
    has_stages,
    load_full_optimizer_state,
)
from shardwright.integrations.lightning_folder import (
    is_distributed_checkpoint,
    load_folder,
    save_folder,
)
from shardwright.integrations.versions import require_version

require_version("lightning", "shardwright.integrations.lightning")

from lightning.fabric.utilities.optimizer import _optimizers_to_device  # noqa: E402
from lightning.pytorch import strategies  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities.seed import isolate_rng  # noqa: E402

from shardwright.integrations.lightning_common import PlannedModelsStrategy  # noqa: E402

DDPStrategy: Any = strategies.DDPStrategy
"""Lightning's `DDPStrategy`, untyped because its types differ between versions."""


class ShardwrightStrategy(PlannedModelsStrategy, DDPStrategy):  # type: ignore[misc]
    """Trainer strategy that plans the models of a `LightningModule` and shards them over all ranks.

    Losses, gradient clipping, accumulation and metrics have the results of a one-process run.
    Without a plan, the module itself (if a step calls `self(x)`) or the submodules that a step
    calls are planned in their first calls. By default every rank loads the global batch, so a
    loader's `batch_size` is the global batch size. If the plan's `dataset_strategy` shards the
    batch, `batch_size` counts the samples of one rank, as under `DDPStrategy`.

    Args:
        plan: the plan of a submodule or of the module itself, or the path of a plan file. None
            plans the models with the first batch.
        save_distributed_checkpoint: whether each rank saves its shards to a folder, which any plan
            can load. By default a checkpoint is one file, as saved by
            one process.
        options: options of `sw.plan`, such as `mem_coeff`; only if `plan` is None.
    """

    strategy_name = "shardwright"
    model: Any

    # Setup

    def setup_environment(self) -> None:
        # `DDPStrategy` repeats the user's `seed_everything`, after which a shuffled loader would
        # draw another order than on one process.
        with isolate_rng(include_cuda=False):
            super().setup_environment()

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        with self.precision_plugin.forward_context():
            self._planned_models.shard(self.model, self.root_device, self._unwrap_optimizers)
        self.model_to_device()
        self._planned_models.count_once(self.model)
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging) and callback._average_model:
                # Lightning copies the averages into the parameters while autograd records, which
                # sharded parameters allow only for tensors without gradients.
                callback._average_model.requires_grad_(False)
        if self._planned_models.shards.count == 1:
            # The order of one process: `process_dataloader` makes it equal on all ranks.
            trainer._accelerator_connector.use_distributed_sampler = False
        # Evaluation has no optimizers.
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def model_to_device(self) -> None:
        """Move modules without parameters; `parallelize` moves the shards of planned modules."""
        self._planned_models.move_modules_without_parameters(self.model, self.root_device)

    def _unwrap_optimizers(self) -> list[Optimizer]:
        return [_unwrap_optimizer(optimizer) for optimizer in self.optimizers]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._sampler_arguments

    def post_backward(self, closure_loss: Any) -> None:
        super().post_backward(closure_loss)
        self._planned_models.check_gradients()
        self._refuse_averages_of_stages()

    def _refuse_averages_of_stages(self) -> None:
        """Refuse callbacks that average parameters, which they pair by position, under stages."""
        for callback in self.lightning_module.trainer.callbacks:
            averages = isinstance(callback, StochasticWeightAveraging | WeightAveraging)
            if averages and has_stages(self.lightning_module):
                raise PlanError(
                    f"{type(callback).__name__} pairs the parameters of a model with those of a"
                    " copy, but with pipeline stages a rank has only the parameters of its own"
                    " stage\nremove the callback, or plan without stages"
                )

    def teardown(self) -> None:
        """Tear down the strategy as `ModelParallelStrategy` does: shards stay on their devices."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Metrics

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduce_over_distinct_samples(tensor, reduce_op)

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        # Checkpoints are loaded into shards, which exist only after `setup`.
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        # `load_checkpoint` has already restored them, as shards.
        return not self._loaded_folder

    _loaded_folder = False
    """Whether `load_checkpoint` has read a distributed checkpoint, optimizer states included."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # The folder has the shards; the metadata file must not have full tensors beside them.
        if self._distributed_checkpoints:
            return {}
        return full_model_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._distributed_checkpoints:
            return {}
        return full_optimizer_state(_unwrap_optimizer(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        if not self._distributed_checkpoints:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        # Lightning leaves the states out if it saves weights only.
        optimizers = self._get_optimizers_by_name() if "optimizer_states" in checkpoint else {}
        metadata = {k: v for k, v in checkpoint.items() if k not in _SHARDED_KEYS}
        save_folder(path, self.lightning_module, "state_dict", optimizers, metadata)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        path = Path(self.broadcast(checkpoint_path))
        self._loaded_folder = is_distributed_checkpoint(path)
        if not self._loaded_folder:
            return super().load_checkpoint(path, weights_only=weights_only)
        return load_folder(
            path,
            self.lightning_module,
            "state_dict",
            self._get_optimizers_by_name(),
            strict=self.lightning_module.strict_loading,
            weights_only=weights_only,
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self._unwrap_optimizers(), states, strict=False):
            load_full_optimizer_state(optimizer, state)
            _optimizers_to_device([optimizer], self.root_device)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._loaded_folder:
            super().load_model_state_dict(checkpoint, strict=strict)

    def _get_optimizers_by_name(self) -> dict[str, Optimizer]:
        """Return the unwrapped optimizers by their names in Lightning's distributed checkpoints."""
        return {f"optimizer_{n}": each for n, each in enumerate(self._unwrap_optimizers())}


_SHARDED_KEYS = {"state_dict", "optimizer_states"}
"""Checkpoint keys whose tensors are saved as shards, not in the metadata file."""


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a `LightningOptimizer`; other optimizers unchanged."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
