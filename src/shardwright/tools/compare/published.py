"""Published training runs by their dimensions, and predictions for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ValidationError, model_validator

from shardwright.core.capture.capture import capture
from shardwright.core.constraints.recompute import recompute
from shardwright.core.constraints.shard import pins_of
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import predict
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.partition.decisions import Recompute
from shardwright.core.planner.candidate import Candidate, CapturedModel, candidates
from shardwright.core.planner.options import PlanOptions
from shardwright.core.rules import rule_of
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.models import Dimensions, build, example_batch
from shardwright.models.expert_sharding import expert_stages, paths_of_blocks, pin_expert
from shardwright.run.config.schema import Count, Positive
from shardwright.text_files import parse_json, read_text, short_repr

aten = torch.ops.aten

LEVELS = {"none": None, "optimizer": "level1", "gradients": "level2", "parameters": "level3"}
"""Level of optimizer parallel by the state that is sharded over data parallel devices."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

LISTS = "rows", "mindformers"
"""Keys of a file: runs by their dimensions, and runs by a configuration of MindFormers."""

UNFUSED = ("2104.04473",)
"""Publications without fused attention: Narayanan et al., 2021 (Megatron-LM)."""


Row = TypeVar("Row", bound=BaseModel)

Hardware = Annotated[str, AfterValidator(lambda name: name.partition(" (")[0])]
"""The name of a cluster. A remark in parentheses after it is dropped."""


class MeasuredRun(Protocol):
    """The properties that all published runs have."""

    @property
    def id(self) -> str: ...

    @property
    def source(self) -> str:
        """The publication."""

    @property
    def hardware(self) -> str:
        """The name of its cluster."""

    @property
    def devices(self) -> int: ...

    @property
    def tokens_per_second_per_device(self) -> float: ...

    @property
    def memory_gib(self) -> float | None:
        """Peak memory of a device in GiB, if published."""

    @property
    def seconds(self) -> float:
        """Measured step time."""

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """Model FLOPs utilization for a step time in seconds; see `share_of_peak`."""


class PlannedMeasurement(Protocol):
    """A published run with the plan of its publication."""

    @property
    def run(self) -> MeasuredRun: ...

    @property
    def cluster(self) -> Cluster:
        """The cluster of the run."""

    @property
    def memory(self) -> int:
        """Predicted peak bytes per device."""

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Predicted step time, on the cluster of the run or on another."""


class PublishedRun(BaseModel, strict=True, frozen=True):
    """A training run of a language model with published throughput; other keys are ignored.

    Args:
        source: the publication.
        hidden, layers, heads, kv_heads, ffn, vocab, seq: dimensions of the model, and the length of
            a sequence in tokens.
        hardware: name of a cluster.
        data_parallel: replicas of a stage; `sharded` is the state that is sharded over them.
        micro_batch: sequences of a replica per micro-batch.
        global_batch: sequences per step.
        recompute: `selective` recomputes all of a block but attention and every second matrix
            product, as torchtitan does.
        memory_gib: peak memory of a device in GiB, if published.
    """

    id: str
    source: str
    model: str
    family: Literal["gpt", "llama", "qwen"]
    hidden: Count
    layers: Count
    heads: Count
    kv_heads: Count
    ffn: Count
    vocab: Count
    seq: Count
    hardware: Hardware
    devices: Count
    data_parallel: Count
    tensor_parallel: Count
    stages: Count
    sequence_parallel: bool
    sharded: Literal["none", "optimizer", "gradients", "parameters"]
    micro_batch: Count
    global_batch: Count
    recompute: Literal["none", "selective", "full"]
    dtype: Literal["bf16", "fp16", "fp32"]
    tokens_per_second_per_device: Positive
    memory_gib: Positive | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        parts = f"{self.data_parallel} · {self.tensor_parallel} · {self.stages}"
        if self.devices != self.data_parallel * self.tensor_parallel * self.stages:
            raise ValueError(
                f"devices is {self.devices}, not data_parallel · tensor_parallel · stages = {parts}"
            )
        together = self.micro_batch * self.data_parallel
        if self.global_batch % together:
            raise ValueError(
                f"global_batch is {self.global_batch}, which is not a multiple of micro_batch ·"
                f" data_parallel = {together}"
            )
        if self.heads % self.tensor_parallel:
            raise ValueError(
                f"heads is {self.heads}, which is not a multiple of tensor_parallel ="
                f" {self.tensor_parallel}"
            )
        _ = self.sizes
        return self

    @property
    def sizes(self) -> Dimensions:
        """Dimensions of the model. Raises `ConfigError` if they contradict each other."""
        return Dimensions(
            family=self.family,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            seq_length=self.seq,
            norm_eps=1e-5,
            positions="learned" if self.family == "gpt" else "rotary",
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster of the run. Raises `ConfigError` if `hardware` is not a cluster."""
        return cluster_of(self)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.global_batch // (self.micro_batch * self.data_parallel)

    @property
    def seconds(self) -> float:
        """Measured step time."""
        return self.global_batch * self.seq / self.devices / self.tokens_per_second_per_device

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """Model FLOPs utilization for a step time in seconds; see `share_of_peak`."""
        tokens = self.global_batch * self.seq / self.devices / seconds
        return share_of_peak(self.sizes, tokens, cluster.device.rates[DTYPES[self.dtype]])


def cluster_of(run: MeasuredRun) -> Cluster:
    """Loads the cluster of a run. Raises `ConfigError` if `hardware` is not a cluster."""
    try:
        return load_cluster(run.hardware)
    except ConfigError as error:
        raise ConfigError(f"row {run.id}: hardware: {error}") from None


def check_possible(run: MeasuredRun, cluster: Cluster) -> None:
    """Raises `ConfigError` if a run was faster than the peak of its cluster."""
    share = run.utilization(cluster, run.seconds)
    if share > 1:
        raise ConfigError(
            f"row {run.id}: {run.tokens_per_second_per_device:g} tokens per second and device are"
            f" {share:.0%} of the peak of {cluster.name}\ncheck the units and `hardware`"
        )


def share_of_peak(sizes: Dimensions, tokens: float, rate: float) -> float:
    """Model FLOPs utilization (MFU): 6 FLOPs per weight and token plus 12 · layers · hidden · seq
    for attention, as in PaLM (Chowdhery et al., 2022, appendix B).

    Recomputation is not counted. Attention counts as if it were not causal. Of experts, those that
    process a token count.

    Args:
        tokens: tokens per second and device.
        rate: peak FLOPs per second of a device.
    """
    linears = 2 if sizes.family in ("gpt", "pangualpha") else 3
    hidden, layers = sizes.hidden_size, sizes.num_layers
    grouped = 2 + 2 * sizes.num_kv_heads / sizes.num_heads
    feed_forward = linears * sizes.intermediate_size * sizes.experts_per_token
    weights = layers * hidden * (grouped * hidden + feed_forward) + sizes.vocab_size * hidden
    return tokens * (6 * weights + 12 * layers * hidden * sizes.seq_length) / rate


def read_published(file: str | Path) -> list[PublishedRun]:
    """Reads the list `rows` of a JSON file.

    Raises:
        ConfigError: a key is missing or invalid; the message names the file, the row and the key.
    """
    runs: dict[str, PublishedRun] = {}
    for number, row in enumerate(rows_of(file, "rows")):
        where = f"{file}: rows[{number}]"
        run = validated_row(PublishedRun, row, where)
        if run.id in runs:
            raise ConfigError(f"{where}: another row has the id {run.id!r} too")
        runs[run.id] = run
    return list(runs.values())


def rows_of(file: str | Path, key: str) -> list[Any]:
    """Reads one of the `LISTS` of a JSON file; empty if the file has only the other one.

    Raises:
        ConfigError: the file has no runs.
    """
    content = parse_json(read_text(file, ConfigError), str(file), ConfigError)
    lists = content if isinstance(content, dict) else {"rows": content}
    found = {name: lists.get(name, []) for name in LISTS}
    if not all(isinstance(rows, list) for rows in found.values()) or not any(found.values()):
        raise ConfigError(
            f"{file}: expected a mapping with a non-empty list `rows` or `mindformers`"
        )
    rows: list[Any] = found[key]
    return rows


def validated_row(row_type: type[Row], row: Any, where: str) -> Row:
    """Validates a row. Raises `ConfigError`, which names the key that is missing or invalid."""
    if isinstance(row, dict) and isinstance(row.get("id"), str):
        where = f"{where} ({row['id']})"
    try:
        return row_type.model_validate(row)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in details["loc"])
        if details["type"] == "missing":
            raise ConfigError(f"{where}: {key} is missing") from None
        problem = details["msg"].removeprefix("Value error, ")
        got = f"{key}: {problem}, not {short_repr(details['input'])}" if key else problem
        raise ConfigError(f"{where}: {got}") from None


@dataclass(frozen=True)
class PlannedRun:
    """A published run with the plan of its publication.

    The model is captured when first needed, at full size on the meta device.
    """

    run: PublishedRun
    cluster: Cluster

    def __post_init__(self) -> None:
        """Raises `ConfigError` if the measured throughput is above the peak."""
        if DTYPES[self.run.dtype] not in self.cluster.device.rates:
            raise ConfigError(
                f"row {self.run.id}: cluster {self.cluster.name} has no rate for {self.run.dtype}"
            )
        check_possible(self.run, self.cluster)

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Predicted step time, on the cluster of the run or on another."""
        # Published frameworks did not start redistributions early, hence `blocking`.
        return predict(self.candidate.partitioned, cluster or self.cluster, blocking=True).seconds

    @property
    def memory(self) -> int:
        """Predicted peak bytes per device."""
        candidate = self.candidate
        if self.run.recompute != "selective":
            return candidate.memory().peak
        # Selective recomputation elsewhere saves the block's input and the results of the operators
        # that are not recomputed. Ours also saves the inputs of the recomputed segments between
        # them, so memory is predicted with full recomputation plus the saved results.
        graph, chosen = candidate.model.graph, candidate.decisions
        blocks = {mark.segment for mark in chosen.recompute.values()}
        block_ops = {op.name: path for op in graph.ops if (path := _block_of(op, blocks))}
        all_recomputed = {name: Recompute(path) for name, path in block_ops.items()}
        peak = candidate.memory(replace(chosen, recompute=all_recomputed)).peak
        saved_bytes = sum(
            _result_bytes(graph.by_name[name], candidate)
            for name in block_ops
            if name not in chosen.recompute
        )
        stages = self.run.stages
        return peak + int(saved_bytes / stages * min(stages, self.run.micro_batches))

    @cached_property
    def candidate(self) -> Candidate:
        """The plan. Raises `ConfigError` if the model cannot be sharded as published."""
        try:
            return self._candidate()
        except ShardwrightError as error:
            raise ConfigError(f"row {self.run.id}: {error}") from error

    def _candidate(self) -> Candidate:
        run = self.run
        unfused = any(source in run.source for source in UNFUSED)
        with torch.device("meta"):
            net = build(run.sizes, attention="explicit" if unfused else "fused")
            batch = example_batch(run.sizes, run.micro_batch * run.data_parallel)
        blocks = list(paths_of_blocks(net))
        if run.recompute == "full":
            for path in blocks:
                recompute(net.get_submodule(path))
        pin_expert(
            net,
            data_parallel=run.data_parallel,
            model_parallel=run.tensor_parallel,
            seq_parallel=run.sequence_parallel,
        )
        # float16 takes as long as bfloat16.
        half = None if run.dtype == "fp32" else torch.bfloat16
        graph = capture(net, batch, {}, compute_dtype=half)
        level = LEVELS[run.sharded]
        options = PlanOptions(
            devices=run.devices,
            mode="sharding_propagation",
            cluster=self.cluster,
            stage_config=expert_stages(net, run.stages) if run.stages > 1 else None,
            micro_batches=run.micro_batches,
            compute_dtype=None if half is None else "bfloat16",
            hsdp=None if level is None else {"level": level},
        )
        names = tuple(name for name, _ in net.named_modules())
        decided = candidates(CapturedModel(graph, pins_of(graph), names, True), options)
        candidate = decided[0].aligned
        if run.recompute != "selective":
            return candidate
        marks = dict(_selective(graph, blocks))
        return replace(candidate, decisions=replace(candidate.decisions, recompute=marks))


def _selective(graph: Graph, blocks: Collection[str]) -> Iterator[tuple[str, Recompute]]:
    """Yields the operators that torchtitan's selective checkpointing recomputes: of each block all
    but attention and every second matrix product."""
    products = dict.fromkeys(blocks, 0)
    for op in graph.ops:
        block = _block_of(op, blocks)
        if block is None or op.target is aten.scaled_dot_product_attention.default:
            continue
        if op.target is aten.linear.default:
            products[block] += 1
            if products[block] % 2:
                continue
        yield op.name, Recompute(block)


def _result_bytes(op: Op, candidate: Candidate) -> float:
    """Bytes of the result of `op` on one device."""
    rule = rule_of(op)
    assert rule is not None
    parts = rule.shard_counts(candidate.mesh, candidate.decisions.cuts.get(op.name, {}))
    named = (parts[factor] for factor in rule.outputs[0] if factor is not None)
    return op.output.numel * op.output.itemsize / prod(named)


def _block_of(op: Op, blocks: Collection[str]) -> str | None:
    parts = op.module.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((path for path in paths if path in blocks), None)
