"""`transformers.Trainer` on planned models."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import wraps
from itertools import islice
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from shardwright.core.agreement.collective import is_rank_0, value_of_rank
from shardwright.core.api.parallelize import parallelize
from shardwright.core.api.plan import plan as plan_model
from shardwright.core.api.pretrained import unchanged_configurations
from shardwright.core.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from shardwright.core.checkpoint.parameter_names import trained_but_not_in
from shardwright.core.checkpoint.position import Position
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.whole import whole
from shardwright.core.plan import Plan
from shardwright.core.torch_internals import pytree
from shardwright.errors import ConfigError, PlanError
from shardwright.integrations.fused_lm_head import without_fused_lm_heads

try:
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import RNGType
    from transformers import trainer, trainer_pt_utils
except ImportError as error:
    raise ConfigError(
        f"ShardwrightTrainer needs transformers and accelerate ({error}): pip install "
        "'shardwright[transformers]'"
    ) from None

log = logging.getLogger("shardwright")

Trainer: Any = trainer.Trainer
"""Of any version of transformers, whose types differ."""

batch_size_of: Any = trainer_pt_utils.find_batch_size

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
        self._batch_rows: int | None = None
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
        if plan.arrivals:
            raise PlanError(
                f"{type(self).__name__} gives every process the whole batch, which the plan's "
                "dataset_strategy would take for a part of it: plan with "
                "dataset_strategy='full_batch'"
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
                samples = _first_samples(dataset, count)
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
        """The size of a batch of all processes, which `split_batches` divides among them."""
        if self.args.accelerator_config.split_batches:
            return batch_size
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
        self.accelerator.gather = lambda data, *_, **__: data
        self.accelerator.gather_for_metrics = self._rows_of_batch
        self.gather_function = self._rows_of_batch

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is until it is split."""

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        """One that gives every process the batches of a single process, the last one incomplete."""
        batch_size = self._global(batch_size)
        with self._as_single_process():
            return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)

    @contextmanager
    def _as_single_process(self) -> Iterator[None]:
        """A context in which samplers and dataloaders are those of a single process.

        For several, accelerate gives each its own part, and repeats samples to fill the last batch.
        """
        ranks, args = self.args, copy(self.args)
        args.distributed_state = SimpleNamespace(
            num_processes=1, process_index=0, local_process_index=0
        )
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            setattr(args, name, self._global(getattr(args, name)))
        self.args = args
        self.accelerator.prepare_data_loader = self._prepared_for_single_process
        try:
            yield
        finally:
            self.args = ranks
            del self.accelerator.prepare_data_loader

    def _prepared_for_single_process(self, loader: DataLoader[Any], **_: Any) -> Any:
        accelerator = self.accelerator
        config = accelerator.dataloader_config
        rng_types = {str(RNGType(kind).value) for kind in accelerator.rng_types or ()}
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement,
            # Samplers without a generator of their own draw from that of torch.
            rng_types=sorted({*rng_types, "torch"} if dist.is_initialized() else rng_types),
            dispatch_batches=False,
            even_batches=False,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )

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
        per_device = self.args.per_device_eval_batch_size
        # The loss of a batch is repeated for as many samples.
        self.args.per_device_eval_batch_size = self._global(per_device)
        try:
            with whole(self.model) if generates else nullcontext():
                return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.args.per_device_eval_batch_size = per_device

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch_rows = batch_size_of(inputs)
        return _whole_tensors(super().prediction_step(model, inputs, *args, **kwargs))

    def _rows_of_batch(self, data: Any, *_: Any, **__: Any) -> Any:
        """In place of accelerate's `gather_for_metrics`: every process has the whole batch. As
        there, what is computed of the last batch has as many rows as it has."""
        rows = self._batch_rows
        if rows is None or not self.accelerator.gradient_state.end_of_dataloader:
            return data
        return pytree.tree_map(lambda x: x[:rows] if isinstance(x, Tensor) and x.ndim else x, data)

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


def _first_samples(dataset: IterableDataset[Any], count: int) -> list[Any]:
    """Samples at the beginning of a stream, which training reads once more.

    Raises:
        ConfigError: if it can be read once only.
    """
    stream = iter(dataset)
    if stream is iter(dataset):
        raise ConfigError(
            f"{type(dataset).__name__}.__iter__ returns the same iterator each time, so training "
            "would miss the samples that the model is planned for: return a new iterator, or give "
            "the trainer a plan (`plan=sw.plan(...)`)"
        )
    generator = getattr(dataset, "generator", None)
    state = generator.get_state() if isinstance(generator, torch.Generator) else None
    samples = list(islice(stream, count))
    if state is not None:
        dataset.generator.set_state(state)  # type: ignore[attr-defined]
    return samples


def _names_in_files(folder: Path) -> set[str]:
    """What rank 0 sees in the safetensors files of a folder, on all ranks."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors") if is_rank_0() else ():
        with safe_open(file, "pt") as content:
            names.update(content.keys())
    return value_of_rank(names)


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
