"""A `transformers.Trainer` that plans and shards its model."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import wraps
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from shardwright.core.api.parallelize import parallelize
from shardwright.core.api.plan import plan as plan_model
from shardwright.core.api.pretrained import unchanged_configurations
from shardwright.core.checkpoint.torch_file import read_torch_file, write_torch_file
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.whole import whole
from shardwright.core.plan import Plan
from shardwright.core.runtime.adopt_optimizer import adopt_parameters_of_model
from shardwright.core.runtime.stop_signals import StopSignals
from shardwright.core.torch_internals import pytree
from shardwright.errors import ConfigError, PlanError
from shardwright.integrations.fused_lm_head import replace_fused_lm_heads
from shardwright.integrations.trainer_checkpoints import (
    SCHEDULER_FILE,
    load_optimizer,
    save_optimizer,
    share_random_state,
)
from shardwright.integrations.trainer_first_batch import (
    ModelArguments,
    ModelStandIn,
    read_first_batch,
    record_first_call,
)
from shardwright.integrations.versions import require_version

require_version("transformers", "ShardwrightTrainer")
require_version("accelerate", "ShardwrightTrainer")

from transformers import trainer, trainer_callback, trainer_pt_utils  # noqa: E402

from shardwright.integrations.accelerate_loaders import prepare_divided_loader  # noqa: E402

log = logging.getLogger("shardwright")

Trainer: Any = trainer.Trainer
"""`transformers.Trainer`, untyped because its types differ between versions."""

batch_size_of: Any = trainer_pt_utils.find_batch_size


class ShardwrightTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` that plans and shards its model over all processes of the run.

    The global batch has `per_device_train_batch_size` samples per process, and every process loads
    the full global batch. The model is planned with the first batch, before training or evaluation.
    Checkpoints have the format of `Trainer`: each class resumes checkpoints of the other, and this
    class resumes them with any plan.

    To plan the model of another trainer, derive a class from both:
    `class Planned(ShardwrightTrainer, SFTTrainer): ...`.

    Args:
        plan: a plan, the path of a plan file, or options of `shardwright.plan`, such as
            `mem_coeff`.

    Raises:
        ConfigError: if the training arguments request another kind of parallelism, such as FSDP.
    """

    model: Any
    args: Any
    optimizer: Any

    def __init__(
        self, *args: Any, plan: Plan | str | Path | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        self._batch_rows: int | None = None
        super().__init__(*args, **kwargs)

    # Planning

    def _parallelize_model(self, dataloader: DataLoader[Any]) -> None:
        """Plan and shard the model with the dataloader's first batch, unless already sharded."""
        if isinstance(self.model, ParallelModule):
            return
        # Before the capture, which refuses trl's autograd function.
        replace_fused_lm_heads(self.model)
        if self.args.bf16:
            self.model.forward = _make_bfloat16_forward(self.model, self.args.device.type)
        plan = self._plan
        if not isinstance(plan, Plan):
            args, kwargs = self._capture_model_arguments(dataloader)
            options = {"devices": self.args.world_size, **(plan or {})}
            plan = plan_model(self.model, args, kwargs, **options)
            log.info("planned %s:\n%s", type(self.model).__name__, plan)
        if plan.pipeline.stages > 1:
            raise PlanError(
                "`Trainer` runs forward and backward separately, which is not possible with"
                " pipeline stages\nplan without stages, or write a training loop with `train_step`"
            )
        if plan.arrivals:
            raise PlanError(
                f"{type(self).__name__} gives every process the global batch, but the plan's"
                " `dataset_strategy` expects each process's own shard\n"
                "plan with `dataset_strategy='full_batch'`"
            )
        if plan.pipeline.micro_batches > 1:
            log.warning(
                "the plan has %d micro-batches, but `Trainer` calls the model with the whole batch,"
                " whose activations need more memory than planned: plan with one, and set"
                " gradient_accumulation_steps",
                plan.pipeline.micro_batches,
            )
        # Released, so that no rank keeps the full model beside its shards.
        parallel_model = parallelize(self.model, plan, self.args.device, release=True)
        if self.optimizer is not None:
            # Passed as `optimizers=`, with the parameters that the planned ones have replaced.
            adopt_parameters_of_model(self._unwrapped_optimizer, parallel_model)
        # `Trainer` calls `model_wrapped`, and passes the model of the handler to callbacks.
        self.model = self.model_wrapped = parallel_model
        self.callback_handler.model = self.model

    def _capture_model_arguments(self, dataloader: DataLoader[Any]) -> ModelArguments:
        """Return (args, kwargs) of the model's call in `compute_loss` for the first batch."""
        batch_size = self._compute_global_batch_size(self.args.per_device_train_batch_size)
        batch = read_first_batch(dataloader, batch_size)
        num_items = self._get_num_items_in_batch([batch], self.args.device)
        # Planned as it trains, also if an evaluation comes first.
        self.model.train()
        # Trainers prepare the arguments of their models in different ways, so they are taken from
        # the call in `compute_loss`.
        call = record_first_call(
            self.model,
            lambda model: self.compute_loss(
                model, self._prepare_inputs(batch), num_items_in_batch=num_items
            ),
        )
        if call is not None:
            return call
        raise PlanError(
            f"{type(self).__name__}.compute_loss does not call its argument `model`\n"
            "pass a plan to the trainer (`plan=sw.plan(...)`)"
        )

    def _compute_global_batch_size(self, batch_size: int) -> int:
        """Return the global batch size; with `split_batches`, `batch_size` is already global."""
        if self.args.accelerator_config.split_batches:
            return batch_size
        return batch_size * int(self.args.world_size)

    # Training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run `Trainer.train`, with the same arguments and result.

        If checkpoints are saved, SIGTERM or Ctrl-C on any rank ends all ranks after the same step,
        with a checkpoint.

        Raises:
            SystemExit: if a rank received SIGTERM; the status is 143.
            KeyboardInterrupt: if a rank received SIGINT.
        """
        if not self._saves_at_signals:
            return super().train(*args, **kwargs)
        with StopSignals() as stop:
            callback = _StopAfterStep(stop)
            self.add_callback(callback)
            try:
                result = super().train(*args, **kwargs)
            finally:
                self.remove_callback(callback)
        # A signal during the last step has stopped nothing.
        if stop.stopped_by is None or self.state.global_step >= self.state.max_steps:
            return result
        _, number = stop.stopped_by
        # 128 + signal number, the status that shells give to a process ended by a signal.
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def create_accelerator_and_postprocess(self) -> None:
        for name in ("fp16", "fsdp", "deepspeed", "torch_compile", "auto_find_batch_size"):
            if getattr(self.args, name, None):
                raise ConfigError(
                    f"TrainingArguments({name}=...) is not supported: {type(self).__name__} shards"
                    " the model itself\nremove it; use `bf16=True` for mixed precision, and "
                    "`trainer.model.compile()` to compile the planned model"
                )
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if self.args.world_size < processes:
            raise ConfigError(
                f"{processes} processes were started, but TrainingArguments uses"
                f" {self.args.world_size} and each would train its own model\npass"
                " `use_cpu=True` on a machine without accelerators"
            )
        # Every rank has all tokens of the global batch.
        self.args.average_tokens_across_devices = False
        # `Trainer` itself would save on the rank that receives a signal only.
        saves = self.args.save_strategy != "no"
        self._saves_at_signals = saves or self.args.enable_jit_checkpoint
        self.args.enable_jit_checkpoint = False
        super().create_accelerator_and_postprocess()
        # Accelerate would wrap the model in DDP, and gather outputs that every rank already has.
        self.accelerator.prepare_model = self._register_model
        self.accelerator.gather = lambda data, *_, **__: data
        self.accelerator.gather_for_metrics = self._truncate_last_batch
        self.gather_function = self._truncate_last_batch

    def _register_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return `model` unchanged, in place of `accelerator.prepare_model`."""
        # Otherwise `Trainer` prepares the model, and reports the time, in each evaluation.
        if all(registered is not model for registered in self.accelerator._models):
            self.accelerator._models.append(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `parallelize` moves only this rank's shards to the device."""

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Create a dataloader that gives every process the global batch.

        The last batch may be incomplete.
        """
        batch_size = self._compute_global_batch_size(batch_size)
        with self._pretend_single_process():
            return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)

    @contextmanager
    def _pretend_single_process(self) -> Iterator[None]:
        """Context in which samplers and dataloaders are created as for a single process.

        For several processes, accelerate would shard each batch, and repeat samples to fill the
        last one.
        """
        original_args, args = self.args, copy(self.args)
        args.distributed_state = SimpleNamespace(
            num_processes=1, process_index=0, local_process_index=0
        )
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            setattr(args, name, self._compute_global_batch_size(getattr(args, name)))
        self.args = args
        self.accelerator.prepare_data_loader = lambda loader, **_: prepare_divided_loader(
            self.accelerator, loader
        )
        try:
            yield
        finally:
            self.args = original_args
            # The method of the class applies again.
            del self.accelerator.prepare_data_loader

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        # Before `Trainer` creates the optimizer, which then has the planned parameters.
        self._parallelize_model(train_dataloader)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; a trainer with its own `compute_loss` gets full tensors as outputs."""
        compute_loss = super().compute_loss
        if compute_loss.__func__ is not Trainer.compute_loss and isinstance(model, ParallelModule):
            model = _FullOutputModel(model)
        return compute_loss(model, inputs, *args, **kwargs)

    def _clip_grad_norm(self, model: ParallelModule) -> Tensor:
        return model.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: ParallelModule, grad_norm: Tensor | None = None) -> Tensor:
        return model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # Evaluation

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self._parallelize_model(dataloader)
        # `Seq2SeqTrainer` may generate, which calls submodules and needs full parameters.
        generates = getattr(self.args, "predict_with_generate", False)
        per_device = self.args.per_device_eval_batch_size
        # `Trainer` weights the loss of a batch by this number of samples.
        self.args.per_device_eval_batch_size = self._compute_global_batch_size(per_device)
        try:
            with whole(self.model) if generates else nullcontext():
                return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.args.per_device_eval_batch_size = per_device

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Before accelerate's padding, for `_truncate_last_batch`.
        self._batch_rows = batch_size_of(inputs)
        return _gather_full_tensors(super().prediction_step(model, inputs, *args, **kwargs))

    def _truncate_last_batch(self, data: Any, *_: Any, **__: Any) -> Any:
        """Remove the padding rows of the last batch, in place of Accelerate's `gather_for_metrics`.

        Gathers nothing, because every process has the global batch.
        """
        rows = self._batch_rows
        if rows is None or not self.accelerator.gradient_state.end_of_dataloader:
            return data
        return pytree.tree_map(lambda x: x[:rows] if isinstance(x, Tensor) and x.ndim else x, data)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Not in `_save`, which some versions call on rank 0 only: all ranks gather parameters.
        full_model = whole(self.model, rank0_only=True, device="cpu")
        with full_model as model, unchanged_configurations(model):
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step = self.state.global_step
        save_optimizer(Path(output_dir), self.model, self._unwrapped_optimizer, step)
        if self.args.should_save:
            write_torch_file(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_FILE))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.world_size > 1:
            share_random_state(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_optimizer(Path(checkpoint), self.model, self._unwrapped_optimizer)
        scheduler = read_torch_file(Path(checkpoint, SCHEDULER_FILE))
        self.lr_scheduler.load_state_dict(scheduler)

    @property
    def _unwrapped_optimizer(self) -> torch.optim.Optimizer:
        """The PyTorch optimizer inside accelerate's wrapper."""
        unwrapped: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return unwrapped


class _StopAfterStep(trainer_callback.TrainerCallback):
    """Callback that saves a checkpoint and ends training after a signal to stop on any rank."""

    def __init__(self, stop: StopSignals) -> None:
        self._stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stop.requested():
            control.should_save = control.should_training_stop = True


def _make_bfloat16_forward(model: nn.Module, device_type: str) -> MethodType:
    """Return the model's `forward` under bfloat16 autocast, with float32 outputs."""
    # An instance may have its own `forward`, for example from `replace_fused_lm_heads`.
    instance_forward = vars(model).get("forward")
    original = type(model).forward if instance_forward is None else instance_forward.__func__

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, torch.bfloat16):
            outputs = original(self, *args, **kwargs)
        return pytree.tree_map(
            lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, outputs
        )

    return MethodType(forward, model)


class _FullOutputModel(ModelStandIn):
    """Proxy of a model that returns full tensors instead of DTensors."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _gather_full_tensors(self._model(*args, **kwargs))


def _gather_full_tensors(outputs: Any) -> Any:
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, outputs)
