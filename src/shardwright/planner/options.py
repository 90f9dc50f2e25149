"""What a call of `plan` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from shardwright.capture.capture import capture
from shardwright.constraints import DatasetStrategy, check_dataset_strategy
from shardwright.cost.cluster import LOCAL, Cluster
from shardwright.cost.clusters import load_cluster
from shardwright.cost.units import BYTES, quantity
from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph
from shardwright.partition.decisions import BUCKET_BYTES, OptimizerParallel
from shardwright.partition.pipeline_spec import AUTO, PipelineSpec
from shardwright.planner.pipeline import PipelineRequest
from shardwright.progress import OnProgress, silent
from shardwright.search.modes import MODES
from shardwright.search.request import VISIT_ORDERS, Pricing

MB = 2**20

AUTO_RECOMPUTE = AUTO_MEM_COEFF = "auto"

MEM_COEFFS = tuple(0.1 * 4.0**power for power in range(-2, 9))
"""Values of `mem_coeff` that are tried, from 0.00625 to 6553.6. Below them even reducing the
gradients of a small layer looks too dear to cut anything; above them nothing changes any more."""

COMPUTE_DTYPES = ("float32", "bfloat16")
"""In which parameters and inputs in single precision may be computed."""


@dataclass(frozen=True)
class PlanOptions:
    """The keyword arguments of `plan`; those of stages and micro-batches are in `asked`.

    Raises:
        StrategyError: if one is not valid.
        ConfigError: if there is no such cluster.
    """

    devices: int
    mode: str = "recursive_programming"
    mem_coeff: float | str = 0.1
    cost_model: str | None = None
    cluster: Cluster | str | Path | None = None
    order: str = "weight"
    log_costs: bool = False
    dataset_strategy: DatasetStrategy = "full_batch"
    asked: PipelineRequest = field(default_factory=PipelineRequest)
    hsdp: OptimizerParallel | Mapping[str, Any] | bool | None = None
    bucket_mb: float = BUCKET_BYTES / MB
    compute_dtype: str | None = None
    memory_limit: int | str | None = None
    recompute: str | None = None
    optimizer: str | torch.optim.Optimizer = "adamw"
    on_progress: OnProgress = field(default=silent, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not _is_count(self.devices):
            raise StrategyError(f"devices={self.devices!r}: must be a whole number of at least 1")
        for what, given, valid in (
            ("mode", self.mode, tuple(MODES)),
            ("cost_model", self.cost_model or "symbolic", ("symbolic", "time")),
            ("order", self.order, VISIT_ORDERS),
            ("compute_dtype", self.compute_dtype or "float32", COMPUTE_DTYPES),
        ):
            if given not in valid:
                raise StrategyError(f"{what}={given!r}: valid are {', '.join(valid)}")
        if not self.has_auto_mem_coeff and not _is_positive(self.mem_coeff):
            raise StrategyError(
                f"mem_coeff={self.mem_coeff!r}: must be a positive number, or {AUTO_MEM_COEFF!r}"
            )
        if not _is_positive(self.bucket_mb):
            raise StrategyError(f"bucket_mb={self.bucket_mb!r}: must be a positive number")
        _check_memory(self.memory_limit, self.recompute)
        check_dataset_strategy(self.dataset_strategy)
        requires_pricing = MODES[self.mode].requires_pricing
        if requires_pricing and self.cost_model == "symbolic":
            raise StrategyError(f"mode={self.mode!r} weighs seconds: cost_model must be 'time'")
        if (self.cost_model == "time" or requires_pricing) and self.cluster is None:
            object.__setattr__(self, "cluster", LOCAL)
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            object.__setattr__(self, "cluster", load_cluster(self.cluster))
        if self.cost_model is None:
            known = "symbolic" if self.cluster is None else "time"
            object.__setattr__(self, "cost_model", known)
        if self.asked.stages == AUTO and self.cluster is None:
            object.__setattr__(self, "cluster", load_cluster(LOCAL))
        # Its own checks are made once, here.
        object.__setattr__(self, "hsdp", _sharding(self.hsdp))
        if self.has_auto_mem_coeff and not self.weighs_memory:
            object.__setattr__(self, "mem_coeff", MEM_COEFFS[0])
        if self.has_auto_mem_coeff and self.limit is None:
            raise StrategyError(
                f"mem_coeff={AUTO_MEM_COEFF!r} is the smallest that fits into memory: give a"
                " memory_limit, as in '24GiB', or a cluster, whose devices have one"
            )

    def in_words(self, recompute: bool = False) -> str:
        """What differs from one attempt to the next: `hsdp level1, mem_coeff=0.1, 2 stages`.

        Args:
            recompute: whether further operators may be computed again.
        """
        sharding, stages = self.sharding, self.asked.stages
        words = [
            f"hsdp {sharding.level}" if sharding is not None else "",
            "recompute" if recompute else "",
            f"mem_coeff={self.coefficient:g}" if self.of_search else "",
            f"{stages} stages" if stages != 1 else "",
        ]
        return ", ".join(word for word in words if word) or "as asked"

    def captured(self, net: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Graph:
        """The graph of a model for one micro-batch; a graph that is given as it is.

        Raises:
            StrategyError: if a graph is given that is computed in another dtype than asked.
            CaptureError: if the model cannot be captured.
        """
        asked = None if self.compute_dtype in (None, "float32") else torch.bfloat16
        if not isinstance(net, Graph):
            self.on_progress("capture")
            return capture(net, *self.asked.example(args, kwargs), compute_dtype=asked)
        if self.compute_dtype is not None and net.compute_dtype != asked:
            raise StrategyError(
                f"compute_dtype={self.compute_dtype!r}, but the graph was captured with"
                f" compute_dtype={net.compute_dtype}: capture the model with it, or plan the model"
            )
        return net

    @property
    def sharding(self) -> OptimizerParallel | None:
        """Optimizer parallel, if it is asked for."""
        assert self.hsdp is None or isinstance(self.hsdp, OptimizerParallel)
        return self.hsdp

    @property
    def limit(self) -> int | None:
        """Bytes that a device has for a step; None if that does not matter."""
        if self.memory_limit is None and self.recompute is None:
            return self.device_memory if self.has_auto_mem_coeff else None
        if self.device_memory is None:
            raise StrategyError(
                f"recompute={self.recompute!r} fits a plan into memory: give a memory_limit, as in"
                " '24GiB', or a cluster, whose devices have one"
            )
        return self.device_memory

    @property
    def device_memory(self) -> int | None:
        """Bytes that a device has: as asked, else those of the cluster's devices."""
        if self.memory_limit is not None:
            return _bytes(self.memory_limit)
        return None if self.cluster is None else int(self.on.device.memory)

    @property
    def has_auto_mem_coeff(self) -> bool:
        """Whether `mem_coeff` is to be chosen."""
        return self.mem_coeff == AUTO_MEM_COEFF

    @property
    def weighs_memory(self) -> bool:
        """Whether the mode is a search that `mem_coeff` guides."""
        return MODES[self.mode].takes_pricing

    @property
    def coefficient(self) -> float:
        """`mem_coeff`, where it is not to be chosen."""
        assert not isinstance(self.mem_coeff, str)
        return self.mem_coeff

    @property
    def of_search(self) -> dict[str, Any]:
        """What the search of the mode takes."""
        if not self.weighs_memory:
            return {}
        model = {"cost_model": self.cost_model}
        if self.cost_model == "symbolic":
            return {"mem_coeff": self.mem_coeff, "order": self.order, **model}
        return {"mem_coeff": self.mem_coeff, **model, "cluster": self.on.name}

    @property
    def on(self) -> Cluster:
        """The cluster, where there is one."""
        assert isinstance(self.cluster, Cluster)
        return self.cluster

    def pricing(self, pipeline: PipelineSpec) -> Pricing | None:
        """What a search by time counts; None where the search is another."""
        if self.cost_model != "time":
            return None
        return Pricing(
            self.on,
            stages=pipeline.stages,
            micro_batches=pipeline.micro_batches,
            sharing=None if self.sharding is None else self.sharding.shard_size,
        )


def _check_memory(limit: int | str | None, recompute: str | None) -> None:
    if recompute not in (None, AUTO_RECOMPUTE):
        raise StrategyError(
            f"recompute={recompute!r}: valid are None and {AUTO_RECOMPUTE!r}; operators of your"
            " choice are marked by sw.recompute(module)"
        )
    if limit is not None and _bytes(limit) is None:
        raise StrategyError(
            f"memory_limit={limit!r}: must be a number of bytes, or a text like '24GiB' or '2GB'"
        )


def _bytes(limit: int | str) -> int | None:
    found = quantity(limit, BYTES)
    return int(found) if found is not None and found >= 1 else None


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 1


def _is_positive(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and given > 0


def _sharding(given: Any) -> OptimizerParallel | None:
    if given is None or given is False:
        return None
    if given is True:
        return OptimizerParallel()
    if isinstance(given, OptimizerParallel):
        return given
    valid = [each.name for each in fields(OptimizerParallel)]
    if not isinstance(given, Mapping) or not set(given) <= set(valid):
        raise StrategyError(
            f"hsdp={given!r}: must be an OptimizerParallel, True, or a mapping with any of the keys"
            f" {', '.join(valid)}"
        )
    return OptimizerParallel(**given)
