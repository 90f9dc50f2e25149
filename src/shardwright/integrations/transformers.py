"""`transformers.Trainer` on planned models."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from shardwright.api.parallelize import parallelize
from shardwright.api.plan import plan as plan_model
from shardwright.api.pretrained import unchanged_configurations
from shardwright.errors import ConfigError, PlanError
from shardwright.integrations.fused_lm_head import without_fused_lm_heads
from shardwright.parallel.module import ParallelModule
from shardwright.parallel.whole import whole
from shardwright.plan import Plan
from shardwright.runtime.devices import from_rank_0, is_rank_0
from shardwright.torch_internals import pytree
from shardwright.train.checkpoint import load_checkpoint, save_checkpoint
from shardwright.train.parameter_names import trained_but_not_in
from shardwright.train.position import Position

try:
    from transformers import trainer
    from transformers.trainer_utils import seed_worker
except ImportError as error:
    raise ConfigError(
        f"ShardwrightTrainer needs transformers and accelerate ({error}): pip install "
        "'shardwright[models]'"
    ) from None

log = logging.getLogger("shardwright")

Trainer: Any = trainer.Trainer
"""Of any version of transformers, whose types differ."""

if not hasattr(Trainer, "_prepare_for_training"):
    raise ConfigError(
        "ShardwrightTrainer needs transformers 5 or newer: pip install -U transformers"
    )

STATE = "shardwright"
"""The folder of the optimizer's sharded state in a checkpoint of `Trainer`, and of what is trained
but not in its files under the model's names: all else is held once."""

SCHEDULER = "scheduler.pt"
"""The file of the learning rate's schedule, as `Trainer` names it."""


class ShardwrightTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` that trains its model as planned, on all processes of the run.

    The batch of a step has `per_device_train_batch_size` samples for each process, and every
    process is given all of them. The model is planned for the first batch before it is trained or
    evaluated. Checkpoints are `Trainer`'s, with the optimizer's state in a folder of their own, and
    resume on any plan.

    Other trainers become planned ones by a class: `class Planned(ShardwrightTrainer, SFTTrainer)`.

    Args:
        plan: a plan, the path of one, or options of `shardwright.plan`, such as `mem_coeff`.

    Raises:
        ConfigError: for training arguments that another way of distribution needs.
    """

    model: Any
    args: Any
    optimizer: Any

    def __init__(
        self, *args: Any, plan: Plan | str | Path | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        super().__init__(*args, **kwargs)

    # What is planned

    def _planned(self, dataloader: DataLoader[Any]) -> None:
        """Splits the model, if it is not, for a batch like the dataloader's first."""
        if isinstance(self.model, ParallelModule):
            return
        without_fused_lm_heads(self.model)
        if self.args.bf16:
            self.model.forward = _in_bfloat16(self.model, self.args.device.type)
        plan = self._plan
        if not isinstance(plan, Plan):
            args, kwargs = self._example(dataloader)
            options = {"devices": self.args.world_size, **(plan or {})}
            plan = plan_model(self.model, args, kwargs, **options)
            log.info("planned %s:\n%s", type(self.model).__name__, plan)
        if plan.pipeline.stages > 1:
            raise PlanError(
                "Trainer calls a model and its backward pass apart, which pipeline stages cannot: "
                "plan without stages, or train with `train_step` in a loop of your own"
            )
        planned = parallelize(self.model, plan, self.args.device, release=True)
        self.model = self.model_wrapped = planned
        self.callback_handler.model = self.model

    def _example(self, dataloader: DataLoader[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How `compute_loss` calls the model for a batch like the dataloader's first."""
        dataset, count = dataloader.dataset, self._global(self.args.per_device_train_batch_size)
        before = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            if isinstance(dataset, IterableDataset):
                samples = list(islice(iter(dataset), count))
            else:
                length = len(dataset)  # type: ignore[arg-type]
                samples = [dataset[index % length] for index in range(count)]
            batch = dataloader.collate_fn(samples)
        random.setstate(before[0])
        np.random.set_state(before[1])
        number = self._get_num_items_in_batch([batch], self.args.device)
        self.model.train()
        try:
            self.compute_loss(
                _Recorder(self.model), self._prepare_inputs(batch), num_items_in_batch=number
            )
        except _FirstCallError as call:
            return call.call
        raise PlanError(f"{type(self).__name__}.compute_loss does not call the model it is given")

    def _global(self, batch_size: int) -> int:
        return batch_size * int(self.args.world_size)

    # How it is trained

    def create_accelerator_and_postprocess(self) -> None:
        for name in ("fp16", "fsdp", "deepspeed", "torch_compile", "auto_find_batch_size"):
            if getattr(self.args, name, None):
                raise ConfigError(
                    f"TrainingArguments({name}=...): {type(self).__name__} plans and splits the "
                    "model itself: remove it (bf16=True is mixed precision, "
                    "`trainer.model.compile()` compiles the planned model)"
                )
        self.args.average_tokens_across_devices = False  # A rank has all tokens of a batch.
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, *_, **__: model
        self.accelerator.gather = self.accelerator.gather_for_metrics = lambda data, *_, **__: data
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is until it is split."""

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        """One that gives the whole batch to every process."""
        loader = super()._get_dataloader(
            dataset, description, self._global(batch_size), *args, **kwargs
        )
        for part in (loader, loader.batch_sampler, loader.dataset):
            if hasattr(part, "num_processes"):
                part.num_processes, part.process_index = 1, 0
        if loader.worker_init_fn is not None:
            loader.worker_init_fn = partial(
                seed_worker, num_workers=self.args.dataloader_num_workers, rank=0
            )
        return loader

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        self._planned(train_dataloader)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """With whole outputs where a class of trainers computes with them."""
        computes = super().compute_loss
        if computes.__func__ is not Trainer.compute_loss and isinstance(model, ParallelModule):
            model = _WithWholeOutputs(model)
        return computes(model, inputs, *args, **kwargs)

    def _clip_grad_norm(self, model: ParallelModule) -> Tensor:
        return model.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: ParallelModule, grad_norm: Tensor | None = None) -> Tensor:
        return model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # How it is evaluated

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self._planned(dataloader)
        # `Seq2SeqTrainer` generates with parts of the model.
        generates = getattr(self.args, "predict_with_generate", False)
        with whole(self.model) if generates else nullcontext():
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        return _whole_tensors(super().prediction_step(*args, **kwargs))

    # What is saved

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        saved = whole(self.model, rank0_only=True, device="cpu")
        with saved as model, unchanged_configurations(model):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        position = Position(step=self.state.global_step)
        names = trained_but_not_in(self.model, _names_in_files(Path(output_dir)))
        state = Path(output_dir, STATE)
        save_checkpoint(state, self.model, self._optimizer, position=position, only=names)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        # Trainer has loaded the parameters from its own files.
        load_checkpoint(Path(checkpoint, STATE), self.model, self._optimizer, strict=False)
        scheduler = torch.load(Path(checkpoint, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """Without what accelerate wraps it in."""
        bare: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return bare


def _names_in_files(folder: Path) -> set[str]:
    """What rank 0 sees in the safetensors files of a folder, on all ranks."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors") if is_rank_0() else ():
        with safe_open(file, "pt") as content:
            names.update(content.keys())
    return from_rank_0(names)


def _in_bfloat16(model: nn.Module, device_type: str) -> MethodType:
    """The `forward` of a model as accelerate calls it in mixed precision: floating-point outputs
    are of float32."""
    set_forward = vars(model).get("forward")
    original = type(model).forward if set_forward is None else set_forward.__func__

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, torch.bfloat16):
            outputs = original(self, *args, **kwargs)
        return pytree.tree_map(
            lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, outputs
        )

    return MethodType(forward, model)


class _FirstCallError(Exception):
    """Carries the arguments of a call that is not made."""

    def __init__(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.call = call


class _Recorder:
    """Has the attributes of a model, and raises its first call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _FirstCallError((args, kwargs))


class _WithWholeOutputs(_Recorder):
    """Has the attributes of a model, and returns what it returns as ordinary tensors."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _whole_tensors(self._model(*args, **kwargs))


def _whole_tensors(outputs: Any) -> Any:
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, outputs)
