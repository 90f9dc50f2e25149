"""A `parallelize_fn` for torchtitan's `ModelSpec` that plans and shards the model.

config.model_spec.parallelize_fn = parallelize_fn()
Trainer(config).train()
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.core.api.parallelize import parallelize
from shardwright.core.api.plan import plan as plan_model
from shardwright.core.constraints.recompute import recompute
from shardwright.core.layout.layout import Layout
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.errors import PlanError
from shardwright.integrations.output_layer import OutputLayer
from shardwright.integrations.plan_on_call import read_plan
from shardwright.integrations.rank_data import DataShards
from shardwright.integrations.versions import require_version

require_version("torchtitan", "shardwright.integrations.torchtitan")

from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402

ORDINARY_TENSORS = "partial_dtensor"
"""The `spmd_backend` under which torchtitan passes ordinary tensors to models and losses."""

log = logging.getLogger("shardwright")


def parallelize_fn(
    plan: Plan | str | Path | None = None, **options: Any
) -> Callable[..., ParallelModule]:
    """Return a `parallelize_fn` that shards a model as planned, over all ranks.

    Losses of torchtitan's `Trainer` are then those of one process. Of `parallelism`, only
    `tensor_parallel_degree` has an effect: that many neighboring ranks read the same samples. The
    plan decides everything else. `training.mixed_precision_param` becomes `compute_dtype`; full
    activation checkpointing recomputes each layer.

    Args:
        plan: the plan of the model, or the path of a plan file. None plans on rank 0 with the batch
            of `training`; models must then be decoders.
        options: options of `sw.plan` without a plan, such as `cluster` and `hsdp`.

    Raises:
        PlanError: when the model is sharded, if the configuration sets pipeline stages, context
            or expert parallelism of torchtitan, CPU offload, or attention without a plan.
    """
    user_plan = read_plan(plan, options)

    def shard(
        model: nn.Module,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        compile_config: Any,
        ac_config: Any,
        dump_folder: str,
    ) -> ParallelModule:
        _check_torchtitan_settings(training, parallelism)
        # torchtitan reads the setting from both.
        for settings in (parallelism, parallel_dims):
            settings.spmd_backend = ORDINARY_TENSORS
        set_spmd_backend(ORDINARY_TENSORS)
        num_ranks = dist.get_world_size()
        # torchtitan gives each data-parallel rank a loader of its own; other ranks share it.
        loader_shards = _divide_batch_over_loaders(
            num_ranks, parallel_dims.dp_replicate * parallel_dims.dp_shard
        )
        if user_plan is None:
            # A finished plan already tells what is recomputed.
            _mark_layers_to_recompute(model, ac_config)
            plan_options = _derive_plan_options(loader_shards, training) | options
            planned = plan_model(
                model, *_make_decoder_arguments(model, loader_shards, training), **plan_options
            )
        else:
            planned = user_plan
        log.info("planned %s:\n%s", type(model).__name__, planned)
        net = parallelize(model, planned)
        assert isinstance(net, ParallelModule)
        shards = DataShards.of_model(net)
        if shards.owners != loader_shards.owners:
            raise PlanError(
                f"the plan expects {shards.count} shards of each batch, with shard {shards.index} "
                f"on this rank, but torchtitan's loader gives it shard {loader_shards.index} of "
                f"{loader_shards.count}\nplan with the `dataset_strategy` of the loader, or set "
                "`data_parallel_shard_degree` and `tensor_parallel_degree` as planned"
            )
        _scale_mean_gradients_to_sum(net, loader_shards)
        # After the model is sharded, to compile the program of this rank.
        if compile_config.enable and "model" in compile_config.components:
            net.compile(backend=compile_config.backend)
        return net

    return shard


def _check_torchtitan_settings(training: Any, parallelism: Any) -> None:
    """Raise if the configuration shards the model in ways that `parallelize_fn` does not support.

    Raises:
        PlanError: for the first unsupported setting.
    """
    remedies = {
        "pipeline_parallel_degree": "torchtitan runs the stages itself",
        "context_parallel_degree": "a plan shards the sequence of whole samples",
        "expert_parallel_degree": "a plan shards experts by itself",
    }
    for name, reason in remedies.items():
        if (degree := getattr(parallelism, name)) > 1:
            raise PlanError(
                f"`parallelism.{name}={degree}`: {reason}\nset it to 1; the plan chooses how to "
                "shard the model over all ranks"
            )
    if training.enable_cpu_offload:
        raise PlanError(
            "`training.enable_cpu_offload=True`: planned models keep their parameters on the"
            " device\nset it to False, and plan with `memory_limit`"
        )


def _divide_batch_over_loaders(num_ranks: int, num_loaders: int) -> DataShards:
    """Return the shards into which torchtitan's loaders divide a batch over the ranks.

    Args:
        num_ranks: number of ranks.
        num_loaders: number of loaders with different samples; neighboring ranks share a loader's
            samples.
    """
    ranks_per_loader = num_ranks // num_loaders
    owners = tuple(
        tuple(range(loader * ranks_per_loader, (loader + 1) * ranks_per_loader))
        for loader in range(num_loaders)
    )
    return DataShards(num_loaders, dist.get_rank() // ranks_per_loader, owners)


def _derive_plan_options(shards: DataShards, training: Any) -> dict[str, Any]:
    """Return `devices`, `dataset_strategy` and `compute_dtype` for torchtitan's configuration."""
    ranks_per_loader = len(shards.owners[0])
    # Replicated over `tp`, whose neighboring ranks read the same samples.
    by_ranks = Layout((shards.count, ranks_per_loader), ("dp", "tp"))("dp", "None")
    strategy: Any = (by_ranks, by_ranks)
    if shards.count == 1:
        strategy = "full_batch"
    elif ranks_per_loader == 1:
        strategy = "data_parallel"
    options = {"devices": shards.count * ranks_per_loader, "dataset_strategy": strategy}
    if training.mixed_precision_param != training.dtype:
        options["compute_dtype"] = training.mixed_precision_param
    return options


def _mark_layers_to_recompute(model: nn.Module, ac_config: Any) -> None:
    if isinstance(ac_config, FullAC.Config):
        for layer in getattr(model, "layers", nn.ModuleDict()).values():
            recompute(layer)


def _make_decoder_arguments(
    model: nn.Module, shards: DataShards, training: Any
) -> tuple[tuple[Tensor], dict[str, Any]]:
    """Return the positional and keyword arguments of a decoder for the batch of all ranks.

    Raises:
        PlanError: if the arguments of the model are not known before its first batch.
    """
    if not isinstance(model, Decoder):
        raise PlanError(
            f"{type(model).__name__} is not a decoder of token ids, so its arguments are not known"
            " before the first batch\npass its plan: `parallelize_fn(sw.plan(net, batch, ...))`"
        )
    inner = getattr(model.config.first_attention, "inner_attention", None)
    if not isinstance(inner, ScaledDotProductAttention.Config | None):
        raise PlanError(
            f"`inner_attention` is {type(inner).__qualname__}, which needs a mask for each"
            " batch\nset `layer.attention.inner_attention = ScaledDotProductAttention.Config()`"
            " for each of `model_spec.model.layers`: causal, without boundaries of documents"
        )
    shape = (training.local_batch_size * shards.count, training.seq_len)
    ids = torch.empty(shape, dtype=torch.long, device="meta")
    # Meta tensors, since only shapes and dtypes matter; positions have those of token ids.
    return (ids,), {"positions": ids}


def _scale_mean_gradients_to_sum(net: ParallelModule, shards: DataShards) -> None:
    """Make `net` multiply its gradients by the number of data shards.

    torchtitan expects gradients of the sum of the ranks' losses, since each rank divides its loss
    by the number of tokens of all ranks. A planned model computes gradients of their mean. If the
    loss calls the output layer itself (`_skip_lm_head`), the backward pass of the hidden states
    adds the layer's gradients.
    """
    planned_class: Any = type(net)
    forward_as_planned = planned_class.forward
    layer = OutputLayer.of(getattr(net, "lm_head", None), shards)

    @wraps(forward_as_planned)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        outputs = forward_as_planned(self, *args, **kwargs)
        # Left by a forward pass without a backward pass, such as an evaluation.
        if layer is not None:
            layer.free()
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            return outputs
        apply: Any = _ScaleMeanGradientsToSum.apply
        return apply(outputs, shards.count, layer)

    # Each planned model has a class of its own, which `sw.whole` exchanges for the user's.
    planned_class.forward = forward


class _ScaleMeanGradientsToSum(torch.autograd.Function):
    """Identity whose backward pass multiplies gradients by the number of data shards."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, count: int, layer: OutputLayer | None) -> Tensor:
        ctx.count, ctx.layer = count, layer
        # A view, since autograd treats an input that is returned unchanged as modified in place.
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.layer is not None:
            ctx.layer.add_gradients()
        return gradient * ctx.count, None, None
