"""Prepare a model, its optimizer, loaders and schedulers for an Accelerate training loop.

    accelerator = Accelerator()
    net, optimizer, loader, schedule = prepare(accelerator, net, optimizer, loader, schedule)

A loader keeps its batch size, which is the global batch size of a step under every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from shardwright.core.agreement.collective import has_other_ranks, is_rank_0
from shardwright.core.api.parallelize import parallelize
from shardwright.core.checkpoint.state_dict_file import load_state_dict
from shardwright.core.checkpoint.torch_file import unwritable_error
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.runtime.adopt_optimizer import adopt_parameters_of_model
from shardwright.core.torch_internals import pytree
from shardwright.errors import CheckpointError, PlanError
from shardwright.integrations.full_state import (
    full_model_state,
    full_optimizer_state,
    load_full_optimizer_state,
)
from shardwright.integrations.plan_on_call import (
    plan_on_first_call,
    read_plan,
    run_forward_in,
    train_stages_in_calls,
)
from shardwright.integrations.rank_data import DataShards
from shardwright.integrations.unplanned_parameters import (
    check_gradients,
    take_unplanned_tensors_of_rank_0,
)
from shardwright.integrations.versions import require_version
from shardwright.plain_data import parse_json, short_repr
from shardwright.text_files import read_text, write_text

require_version("accelerate", "shardwright.integrations.accelerate")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.scheduler import AcceleratedScheduler  # noqa: E402
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME, DistributedType  # noqa: E402

from shardwright.integrations.accelerate_loaders import (  # noqa: E402
    divide_loader,
    find_distributed_samplers,
    prepare_divided_loader,
)
from shardwright.integrations.accelerate_metrics import (  # noqa: E402
    drop_repeated_samples,
    gather_distinct_objects,
    has_only_tensors,
)

RANDOM_FILE = "shardwright_random.json"
"""File in a `save_state` folder with the random seed and step of each planned model."""

SUPPORTED_TYPES = {
    name for name in DistributedType.__members__ if name == "NO" or name.startswith("MULTI_")
}
"""Accelerate's `distributed_type` values under which it neither shards nor wraps models."""


def prepare(
    accelerator: Any, *objects: Any, plan: Plan | str | Path | None = None, **options: Any
) -> Any:
    """Plan, shard and prepare a model and its training objects; replaces `accelerator.prepare`.

    Afterwards `accelerator.backward`, `accumulate`, `clip_grad_norm_`, `gather_for_metrics`,
    `save_state`, `load_state`, `save_model` and `autocast` behave as on one process. The plan's
    `dataset_strategy` decides how loaders are divided over the ranks; every batch is one step of a
    scheduler. `save_state` writes the files of a one-process run, which any plan can load.

    Args:
        accelerator: the `Accelerator`.
        objects: one model, and its optimizers, loaders and schedulers, in any order. Optimizers are
            created from the model's parameters before this call.
        plan: the plan of the model, or the path of a plan file; None plans the model in its first
            call, with the arguments of that call.
        options: options of `sw.plan`, such as `dataset_strategy`; only if `plan` is None.

    Returns:
        A tuple of the prepared objects in the order of `objects`; a single object without a tuple.

    Raises:
        PlanError: if there is not exactly one model, or the accelerator shards models itself.
        DataError: if a loader's sampler divides samples over the ranks differently than the plan.
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
            f"`prepare` needs exactly one model, but got {len(models)}\ncall `prepare` once for"
            " each model: `net, optimizer = prepare(accelerator, net, optimizer, plan=plan)`"
        )
    (net,) = models
    loaded_plan = read_plan(plan, options)
    shards = _choose_data_shards(net, loaded_plan, options)
    _replace_accelerator_methods(accelerator, shards)
    for loader in objects:
        if isinstance(loader, DataLoader):
            # Before the model is changed.
            shards.check_loader(loader)
    optimizers = [
        _unwrap_optimizer(each) for each in objects if isinstance(each, torch.optim.Optimizer)
    ]
    _prepare_model(accelerator, net, optimizers, loaded_plan, options)
    # After `_prepare_model`, which may replace the parameters of optimizers.
    prepared = [_prepare_optimizer_or_loader(accelerator, each, shards) for each in objects]
    # A scheduler counts the steps of its optimizer, which is prepared only now.
    prepared = [_prepare_scheduler(accelerator, each) for each in prepared]
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def _choose_data_shards(
    net: nn.Module, plan: Plan | None, options: Mapping[str, Any]
) -> DataShards:
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
    """Shard `net` in place: at once with a plan, otherwise in its first call."""

    def planned(parallel: ParallelModule) -> None:
        for optimizer in optimizers:
            adopt_parameters_of_model(optimizer, parallel)
        train_stages_in_calls(parallel)
        # Autocast is the outer wrapper, so that the schedule of pipeline stages runs in it too.
        if accelerator.native_amp:
            run_forward_in(parallel, accelerator.autocast)

    if isinstance(net, ParallelModule):
        planned(net)
    elif plan is not None:
        # Captured as it will be called, under autocast.
        with accelerator.autocast():
            parallel = parallelize(net, plan, accelerator.device)
        assert isinstance(parallel, ParallelModule)
        planned(parallel)
    else:
        plan_on_first_call(net, options, accelerator.device, planned, accelerator.autocast)
    take_unplanned_tensors_of_rank_0(net, accelerator.device)
    # `save_state` and `load_state` go through this list.
    accelerator._models.append(net)
    vars(net)["_is_accelerate_prepared"] = True


def _prepare_optimizer_or_loader(accelerator: Any, value: Any, shards: DataShards) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        optimizer = PlannedOptimizer(
            _unwrap_optimizer(value), accelerator.device_placement, accelerator.scaler
        )
        optimizer.check_gradients = partial(check_gradients, accelerator._models, shards)
        return _append_prepared(optimizer, accelerator._optimizers)
    if isinstance(value, DataLoader):
        return _prepare_loader(accelerator, value, shards)
    return value


def _append_prepared(value: Any, prepared: list[Any]) -> Any:
    """Append `value` to `prepared`, a list of prepared objects of Accelerate, and return it."""
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
    return _append_prepared(schedule, accelerator._schedulers)


def _prepare_loader(accelerator: Any, loader: DataLoader[Any], shards: DataShards) -> Any:
    """Divide a loader over the ranks as planned, or check a loader that Accelerate has prepared."""
    if getattr(loader, "_is_accelerate_prepared", False):
        shards.check_divided_loader(loader)
        return loader
    shards.check_loader(loader)
    # A `DistributedSampler` has divided the samples already.
    if shards.count > 1 and not find_distributed_samplers(loader):
        loader = divide_loader(loader, shards, accelerator.dataloader_config.even_batches)
    prepared = prepare_divided_loader(accelerator, loader)
    return _append_prepared(prepared, accelerator._dataloaders)


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside an `AcceleratedOptimizer`; other optimizers unchanged."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


class PlannedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's optimizer wrapper, whose `state_dict` is the full, unsharded state."""

    check_gradients: Callable[[], None]
    """Checks that local batches gave gradients only to planned parameters."""

    def step(self, closure: Any = None) -> Any:
        self.check_gradients()
        return super().step(closure)

    def state_dict(self) -> Any:
        """Gather the full optimizer state on rank 0; other ranks get None in place of each tensor.

        Collective.
        """
        return full_optimizer_state(self.optimizer)

    def load_state_dict(self, state_dict: Any) -> None:
        load_full_optimizer_state(self.optimizer, state_dict)


# The accelerator


def _replace_accelerator_methods(accelerator: Any, shards: DataShards) -> None:
    """Replace the accelerator's methods that reduce, gather or save tensors over all ranks.

    Raises:
        PlanError: if a model prepared earlier divides batches over the ranks differently.
    """
    earlier = vars(accelerator).get("shardwright_shards")
    if earlier is not None and earlier != shards:
        raise PlanError(
            "two models of one `Accelerator` have different values of `dataset_strategy`, but"
            " `gather_for_metrics` supports one\nplan both models with the same value, for example"
            " dataset_strategy='full_batch', or use one `Accelerator` for each model"
        )
    # An earlier call of `prepare` has replaced the methods.
    if earlier is not None:
        return
    accelerator.shardwright_shards = shards
    methods: dict[str, Callable[..., Any]] = {
        "gather": _gather_distinct_samples,
        "gather_for_metrics": _gather_distinct_samples_for_metrics,
        "reduce": _reduce_distinct_samples,
        "clip_grad_norm_": _clip_grad_norm,
        "get_state_dict": _get_state_dict,
        "unwrap_model": _unwrap_model,
    }
    # On the instance, so that other accelerators of the process keep theirs.
    for name, method in methods.items():
        setattr(accelerator, name, MethodType(method, accelerator))
    accelerator.register_save_state_pre_hook(_save_random_states)
    accelerator.register_load_state_pre_hook(_load_model_shards)


def _gather_full_tensors(data: Any) -> Any:
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, data)


def _drop_repeated_shards(data: Any, shards: DataShards) -> Any:
    """Keep one copy of each data shard in tensors that were gathered from all ranks."""
    world = dist.get_world_size()
    if shards.count == world:
        return data

    def distinct(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.cat(shards.select_distinct(value.chunk(world)))
        return value

    return pytree.tree_map(distinct, data)


def _gather_distinct_samples(accelerator: Any, tensor: Any) -> Any:
    shards, tensor = accelerator.shardwright_shards, _gather_full_tensors(tensor)
    # Every rank has the values of all samples.
    if shards.count == 1:
        return tensor
    return _drop_repeated_shards(type(accelerator).gather(accelerator, tensor), shards)


def _gather_distinct_samples_for_metrics(
    accelerator: Any, input_data: Any, use_gather_object: bool = False
) -> Any:
    shards, state = accelerator.shardwright_shards, accelerator.gradient_state
    full = _gather_full_tensors(input_data)
    if shards.count == 1:
        return full
    last = state.active_dataloader if state.in_dataloader and state.end_of_dataloader else None
    if use_gather_object or not has_only_tensors(full):
        return gather_distinct_objects(full, shards, last, state.remainder)
    gathered = _gather_distinct_samples(accelerator, full)
    return gathered if last is None else drop_repeated_samples(gathered, last, state.remainder)


def _reduce_distinct_samples(
    accelerator: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0
) -> Any:
    shards, tensor = accelerator.shardwright_shards, _gather_full_tensors(tensor)
    copies = accelerator.num_processes // shards.count
    reduced = type(accelerator).reduce(accelerator, tensor, reduction, scale)
    # A mean over equal copies is the mean over distinct samples.
    if reduction != "sum" or copies == 1:
        return reduced

    def of_distinct_samples(value: Any) -> Any:
        """Divide a sum over ranks by the number of ranks with equal samples."""
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point() or value.is_complex():
            return value / copies
        # Away from zero: a flag of one rank, such as that of `set_trigger`, remains a flag.
        return torch.div(value + value.sign() * (copies - 1), copies, rounding_mode="trunc")

    return pytree.tree_map(of_distinct_samples, reduced)


def _clip_grad_norm(
    accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2
) -> Tensor:
    # Unscaled first: gradients of a scaled loss would be clipped at a scaled norm.
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


def _save_random_states(models: list[nn.Module], weights: list[Any], folder: str) -> None:
    states = [
        (model.execution.random_seed, model.execution.random_step)
        for model in models
        if isinstance(model, ParallelModule)
    ]
    # Seeds and steps are equal on all ranks.
    if is_rank_0():
        file = Path(folder, RANDOM_FILE)
        try:
            # The `repr` of lists of integers is JSON.
            write_text(file, repr([list(state) for state in states]))
        except OSError as error:
            raise unwritable_error(file, error) from None


def _load_model_shards(models: list[nn.Module], folder: str) -> None:
    """Load this rank's shards and the random states of planned models from a folder."""
    # `save_state` returns on other ranks before rank 0 has written its files.
    if has_other_ranks():
        dist.barrier()
    file = Path(folder, RANDOM_FILE)
    if file.is_file():
        content = parse_json(read_text(file, CheckpointError), str(file), CheckpointError)
        try:
            states = TypeAdapter(list[tuple[int, int]]).validate_python(content)
        except ValidationError:
            raise CheckpointError(
                f"{file}: not the random states of models: {short_repr(content)}\n"
                "delete the file to go on with other random numbers"
            ) from None
        planned = [model for model in models if isinstance(model, ParallelModule)]
        for parallel, (seed, step) in zip(planned, states, strict=False):
            parallel.execution.random_seed, parallel.execution.random_step = seed, step
    # Accelerate loads ordinary models itself.
    if not any(isinstance(model, ParallelModule) for model in models):
        return
    for number, model in enumerate(models):
        # As Accelerate numbers the files: the first model has no suffix.
        file_suffix = f"_{number}" if number else ""
        path = Path(folder, f"{SAFE_MODEL_NAME}{file_suffix}.safetensors")
        load_state_dict(
            model, path if path.is_file() else Path(folder, f"{MODEL_NAME}{file_suffix}.bin")
        )
    # Accelerate would load the models that are still in this list once more.
    models.clear()
