"""Prepare a model, its optimizer, loaders and schedulers for a training loop of Accelerate.

    accelerator = Accelerator()
    net, optimizer, loader, schedule = prepare(accelerator, net, optimizer, loader, schedule)

Loaders keep their batch size, which is that of a step of all processes, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from shardwright.core.agreement.collective import is_rank_0
from shardwright.core.api.parallelize import parallelize
from shardwright.core.checkpoint.state_dict_file import load_state_dict
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.runtime.adopt_optimizer import adopt_part
from shardwright.core.torch_internals import pytree
from shardwright.errors import CheckpointError, DataError, PlanError
from shardwright.integrations.full_state import (
    check_one_stage,
    full_model_state,
    full_optimizer_state,
)
from shardwright.integrations.plan_on_call import (
    call_in,
    plan_on_first_call,
    read_plan,
    train_stages_in_calls,
)
from shardwright.integrations.rank_data import DataShards
from shardwright.integrations.versions import require_version
from shardwright.text_files import parse_json, read_text

OLDEST_VERSION = "1.0"
require_version("accelerate", OLDEST_VERSION, "shardwright.integrations.accelerate")

from accelerate.data_loader import BatchSamplerShard, prepare_data_loader  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.scheduler import AcceleratedScheduler  # noqa: E402
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME, DistributedType, RNGType  # noqa: E402

RANDOM_FILE = "shardwright_random.json"
"""File of a folder of `save_state` with the seed and step of the draws of planned models."""

SUPPORTED_TYPES = {
    name for name in DistributedType.__members__ if name == "NO" or name.startswith("MULTI_")
}
"""Kinds of processes of Accelerate that do not shard or wrap models by themselves."""


def prepare(
    accelerator: Any, *objects: Any, plan: Plan | str | Path | None = None, **options: Any
) -> Any:
    """Plan and shard a model, and prepare what trains it, in place of `accelerator.prepare`.

    Afterwards `accelerator.backward`, `accumulate`, `clip_grad_norm_`, `gather_for_metrics`,
    `save_state`, `load_state`, `save_model` and `autocast` do what they do on one process. Loaders
    are divided over the ranks as the plan's `dataset_strategy` says; every batch counts as one step
    of a scheduler. The folders of `save_state` are those of one process, and load under any plan.

    Args:
        accelerator: the `Accelerator`.
        objects: one model, and its optimizers, loaders and schedulers, in any order. Optimizers may
            have been created before.
        plan: the plan of the model, or the path of a plan file. None plans the model when it is
            first called, with the arguments of that call.
        options: options of `sw.plan` without a plan, such as `dataset_strategy`.

    Returns:
        The prepared objects in the order in which they were passed; a single one by itself.

    Raises:
        PlanError: if there is not exactly one model, or the accelerator shards models itself.
        DataError: if a loader is divided over the ranks in another way than planned.
    """
    distributed_type = str(accelerator.distributed_type.value)
    if distributed_type not in SUPPORTED_TYPES:
        raise PlanError(
            f"Accelerate is configured for {distributed_type}, which shards models itself\nset"
            " `distributed_type` to MULTI_GPU (MULTI_CPU) in `accelerate config`"
        )
    models = [each for each in objects if isinstance(each, nn.Module)]
    if len(models) != 1:
        raise PlanError(
            f"`prepare` got {len(models)} models, but prepares one with its plan\ncall it once for"
            " each: `net, optimizer = prepare(accelerator, net, optimizer, plan=plan)`"
        )
    (net,) = models
    read = read_plan(plan, options)
    shards = _shards_of(net, read, options)
    _take_over(accelerator, shards)
    for loader in objects:
        if isinstance(loader, DataLoader):
            # Before the model is changed.
            shards.check_loader(loader)
    optimizers = [_inner(each) for each in objects if isinstance(each, torch.optim.Optimizer)]
    _prepare_model(accelerator, net, optimizers, read, options)
    prepared = [_prepare_object(accelerator, each, shards) for each in objects]
    # A scheduler counts the steps of its optimizer, which is prepared only now.
    prepared = [_prepare_scheduler(accelerator, each) for each in prepared]
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def _shards_of(net: nn.Module, plan: Plan | None, options: Mapping[str, Any]) -> DataShards:
    if plan is not None:
        return DataShards.of_plan(plan)
    if isinstance(net, ParallelModule):
        return DataShards.of_model(net)
    return DataShards.of_options(options)


def _prepare_model(
    accelerator: Any,
    net: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    plan: Plan | None,
    options: Mapping[str, Any],
) -> None:
    """Shard `net` in place, now or in its first call."""

    def planned(parallel: ParallelModule) -> None:
        for optimizer in optimizers:
            adopt_part(optimizer, parallel)
        train_stages_in_calls(parallel)
        if accelerator.native_amp:
            call_in(parallel, accelerator.autocast)

    if isinstance(net, ParallelModule):
        planned(net)
    elif plan is not None:
        with accelerator.autocast():
            parallel = parallelize(net, plan, accelerator.device)
        assert isinstance(parallel, ParallelModule)
        planned(parallel)
    else:
        plan_on_first_call(net, options, accelerator.device, planned, accelerator.autocast)
    accelerator._models.append(net)
    vars(net)["_is_accelerate_prepared"] = True


def _prepare_object(accelerator: Any, value: Any, shards: DataShards) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        optimizer = PlannedOptimizer(
            _inner(value), accelerator.device_placement, accelerator.scaler
        )
        return _registered(optimizer, accelerator._optimizers)
    if isinstance(value, DataLoader):
        return _prepare_loader(accelerator, value, shards)
    return value


def _registered(value: Any, prepared: list[Any]) -> Any:
    """Add an object to the accelerator's list, so that a second `prepare` returns it."""
    value._is_accelerate_prepared = True
    prepared.append(value)
    return value


def _prepare_scheduler(accelerator: Any, value: Any) -> Any:
    if not isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return value
    optimizers = [o for o in accelerator._optimizers if o.optimizer is value.optimizer]
    schedule = AcceleratedScheduler(
        value,
        optimizers or accelerator._optimizers,
        step_with_optimizer=accelerator.step_scheduler_with_optimizer,
        # Loaders keep the batch size of a step, so one step is one step.
        split_batches=True,
    )
    return _registered(schedule, accelerator._schedulers)


def _prepare_loader(accelerator: Any, loader: DataLoader[Any], shards: DataShards) -> Any:
    """Divide a loader over the ranks as planned; one that Accelerate has prepared is checked."""
    if getattr(loader, "_is_accelerate_prepared", False):
        shards.check_whole_loader(loader)
        return loader
    shards.check_loader(loader)
    config = accelerator.dataloader_config
    rng_types = {str(RNGType(rng_type).value) for rng_type in accelerator.rng_types or ()}
    # Samplers without a generator draw from torch's, whose state must be equal on all ranks.
    rng_types |= {"torch"} if dist.is_initialized() else set()
    batches = loader.batch_sampler
    divided = shards.count == 1 or bool(_distributed_samplers(loader))
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        # A stream has no batches that could be divided below.
        num_processes=1 if divided or batches is not None else shards.count,
        process_index=0 if divided or batches is not None else shards.index,
        split_batches=not divided and batches is None,
        put_on_device=accelerator.device_placement,
        rng_types=sorted(rng_types),
        dispatch_batches=False,
        even_batches=config.even_batches,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )
    if not divided and batches is not None:
        base = getattr(prepared, "base_dataloader", prepared)
        batches_of_rank = PartsOfBatches(base.batch_sampler, shards, config.even_batches)
        # Not by assignment, which `DataLoader` refuses.
        object.__setattr__(base, "batch_sampler", batches_of_rank)
    return _registered(prepared, accelerator._dataloaders)


class PartsOfBatches(BatchSamplerShard):  # type: ignore[misc]
    """This rank's part of each batch of a batch sampler, in the order of one process.

    Accelerate fills a last batch that is smaller with the first samples of the epoch; here only as
    many are added as make the parts equal, so that most epochs have each sample once.
    """

    def __init__(self, batches: Any, shards: DataShards, even_batches: bool) -> None:
        size = getattr(batches, "batch_size", None)
        if not isinstance(size, int) or size % shards.count:
            raise DataError(
                f"a loader with batch_size={size} cannot be divided into {shards.count} equal"
                f" parts, as the plan's `dataset_strategy` does\nuse a multiple of {shards.count};"
                " `batch_size` is the number of samples of a step on all processes"
            )
        super().__init__(batches, shards.count, shards.index, True, even_batches)
        self.sampler = getattr(batches, "sampler", None)

    def __iter__(self) -> Iterator[list[Any]]:
        first: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            missing = -len(batch) % self.num_processes
            if missing and not self.even_batches:
                raise DataError(
                    f"the last batch of {len(batch)} samples cannot be divided into"
                    f" {self.num_processes} equal parts\nleave it out (`drop_last=True`), or let"
                    " samples be repeated (`even_batches=True`)"
                )
            filled = [*batch, *islice(cycle(first), missing)]
            size = len(filled) // self.num_processes
            yield filled[size * self.process_index : size * (self.process_index + 1)]


def _distributed_samplers(loader: DataLoader[Any]) -> list[Any]:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return [s for s in samplers if isinstance(s, torch.utils.data.DistributedSampler)]


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate has wrapped, or `optimizer` itself."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


class PlannedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Wrapper of an optimizer for Accelerate, with the full optimizer state as its `state_dict`."""

    def state_dict(self) -> Any:
        """Return the full state on rank 0, with None for tensors elsewhere. Collective."""
        return full_optimizer_state(self.optimizer)


# The accelerator


def _take_over(accelerator: Any, shards: DataShards) -> None:
    """Replace the methods of an accelerator that would gather, average or save shards.

    Raises:
        PlanError: if the accelerator has another model with other local batches.
    """
    earlier = vars(accelerator).get("shardwright_shards")
    if earlier is not None and earlier != shards:
        raise PlanError(
            "two models of one accelerator have different `dataset_strategy`, so that metrics"
            " cannot be gathered for both\nplan both with the same one, or use one `Accelerator`"
            " for each model"
        )
    if earlier is not None:
        return
    accelerator.shardwright_shards = shards
    methods: dict[str, Callable[..., Any]] = {
        "gather": _gather,
        "gather_for_metrics": _gather_for_metrics,
        "reduce": _reduce,
        "clip_grad_norm_": _clip_grad_norm,
        "get_state_dict": _get_state_dict,
        "unwrap_model": _unwrap_model,
    }
    for name, method in methods.items():
        setattr(accelerator, name, MethodType(method, accelerator))
    accelerator.register_save_state_pre_hook(_before_save)
    accelerator.register_load_state_pre_hook(_before_load)


def _full(data: Any) -> Any:
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, data)


def _of_distinct_samples(data: Any, shards: DataShards) -> Any:
    """Keep, of what was gathered from all ranks, one part for each shard of the batch."""
    world = dist.get_world_size()
    if shards.count == world:
        return data

    def distinct(value: Any) -> Any:
        if isinstance(value, Tensor):
            values_of_ranks = value.chunk(world)
            return torch.cat([values_of_ranks[ranks[0]] for ranks in shards.owners])
        return value

    return pytree.tree_map(distinct, data)


def _gather(accelerator: Any, tensor: Any) -> Any:
    shards, tensor = accelerator.shardwright_shards, _full(tensor)
    if shards.count == 1:
        return tensor
    return _of_distinct_samples(type(accelerator).gather(accelerator, tensor), shards)


def _gather_for_metrics(accelerator: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    if accelerator.shardwright_shards.count == 1:
        return _full(input_data)
    # Calls `gather` above, and leaves out the samples that fill the last batch.
    return type(accelerator).gather_for_metrics(accelerator, _full(input_data), use_gather_object)


def _reduce(accelerator: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    shards, tensor = accelerator.shardwright_shards, _full(tensor)
    copies = accelerator.num_processes // shards.count
    reduced = type(accelerator).reduce(accelerator, tensor, reduction, scale)
    if reduction != "sum" or copies == 1:
        return reduced

    def of_distinct_samples(value: Any) -> Any:
        """Divide by the number of ranks that have added the same term; counts stay whole."""
        if not isinstance(value, Tensor):
            return value
        is_count = not (value.is_floating_point() or value.is_complex())
        return torch.div(value, copies, rounding_mode="floor" if is_count else None)

    return pytree.tree_map(of_distinct_samples, reduced)


def _clip_grad_norm(
    accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2
) -> Tensor:
    accelerator.unscale_gradients()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _get_state_dict(accelerator: Any, model: nn.Module, unwrap: bool = True) -> Any:
    if not any(isinstance(module, ParallelModule) for module in model.modules()):
        return type(accelerator).get_state_dict(accelerator, model, unwrap)
    return full_model_state(model)


def _unwrap_model(accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    if isinstance(model, ParallelModule):
        return model
    unwrapped: nn.Module = type(accelerator).unwrap_model(accelerator, model, *args, **kwargs)
    return unwrapped


def _before_save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
    for model in models:
        check_one_stage(model, "`accelerator.save_state`")
    states = [
        (model.execution.random_seed, model.execution.random_step)
        for model in models
        if isinstance(model, ParallelModule)
    ]
    if is_rank_0():
        Path(folder, RANDOM_FILE).write_text(repr([list(state) for state in states]))


def _before_load(models: list[nn.Module], folder: str) -> None:
    """Load the model files of a folder, of which each rank reads its shards."""
    file = Path(folder, RANDOM_FILE)
    if file.is_file():
        states = parse_json(read_text(file, CheckpointError), str(file), CheckpointError)
        planned = [model for model in models if isinstance(model, ParallelModule)]
        for parallel, (seed, step) in zip(planned, states, strict=False):
            parallel.execution.random_seed, parallel.execution.random_step = seed, step
    if not any(isinstance(model, ParallelModule) for model in models):
        return
    for number, model in enumerate(models):
        ending = f"_{number}" if number else ""
        path = Path(folder, f"{SAFE_MODEL_NAME}{ending}.safetensors")
        load_state_dict(
            model, path if path.is_file() else Path(folder, f"{MODEL_NAME}{ending}.bin")
        )
    # Accelerate loads those that are left in its list.
    models.clear()
