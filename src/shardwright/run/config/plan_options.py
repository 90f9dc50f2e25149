"""Translate a configuration into options of the planner."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.options import FileOptions
from shardwright.models.expert_sharding import expert_stages
from shardwright.run.config.schema import Config


def plan_options(config: Config, model: nn.Module) -> dict[str, Any]:
    """Translate a configuration into keyword arguments of `PlanOptions`.

    Args:
        model: the built model, whose blocks are assigned to pipeline stages.
    """
    parallel = config.parallel
    expert_pins_ops = parallel.expert is not None
    options: dict[str, Any] = {
        **parallel.keywords(FileOptions),
        # Shardings propagate from the operators that the expert pins to all others.
        "mode": "sharding_propagation" if expert_pins_ops else parallel.mode,
        "hsdp": None if parallel.hsdp is None else parallel.hsdp.model_dump(),
        "recompute": "auto" if parallel.recomputes_as_needed else None,
        "optimizer": config.optimizer.name,
    }
    if _has_megatron_stages(config) and isinstance(parallel.stages, int) and parallel.stages > 1:
        layers = parallel.expert.layers if parallel.expert else None
        chunks = len(layers) // parallel.stages if layers and _sets_layers_per_chunk(config) else 1
        stage_config = expert_stages(model, parallel.stages, layers, chunks, parallel.schedule)
        # The stages are in `stage_config`, so the planner has none to choose.
        options |= {"stages": 1, "stage_config": stage_config}
    return options


def _has_megatron_stages(config: Config) -> bool:
    """Whether each stage has a fixed number of consecutive blocks, as in Megatron-LM."""
    is_manual = config.parallel.mode == "semi_auto" and config.model.is_language_model
    schedule = SCHEDULES.get(config.parallel.schedule)
    # Interleaved schedules have several chunks per stage, which the planner assigns unless the
    # configuration has the number of blocks in each.
    is_assigned = schedule is not None and (
        not schedule.allows_several_chunks or _sets_layers_per_chunk(config)
    )
    return is_manual and is_assigned


def _sets_layers_per_chunk(config: Config) -> bool:
    """Whether `parallel.expert.layers` has one number per chunk instead of one per stage."""
    parallel = config.parallel
    layers = parallel.expert.layers if parallel.expert else None
    has_several = layers is not None and isinstance(parallel.stages, int) and parallel.stages > 1
    # At least two chunks per stage; one number per stage assigns no chunks.
    return has_several and len(layers or ()) >= 2 * int(parallel.stages)
