"""Training runs that others measured and published, and the same runs as they are predicted."""

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
"""By what is sharded over data parallel devices the level of optimizer parallel."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

LISTS = "rows", "mindformers"
"""Of a file: runs by their dimensions, and runs by a configuration of MindFormers."""

UNFUSED = ("2104.04473",)
"""Publications from before there was attention in one operator (Narayanan et al., 2021)."""


Row = TypeVar("Row", bound=BaseModel)

Hardware = Annotated[str, AfterValidator(lambda name: name.partition(" (")[0])]
"""The name of a cluster; what follows in parentheses says more of it."""


class MeasuredRun(Protocol):
    """What is known of every published run."""

    @property
    def id(self) -> str: ...

    @property
    def source(self) -> str:
        """Where it was published."""

    @property
    def hardware(self) -> str:
        """The name of the cluster that it ran on."""

    @property
    def devices(self) -> int: ...

    @property
    def tokens_per_second_per_device(self) -> float: ...

    @property
    def memory_gib(self) -> float | None:
        """Peak of one device, if published."""

    @property
    def seconds(self) -> float:
        """Of a step, as measured."""

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """The share of the peak in a step of so many seconds; see `share_of_peak`."""


class PlannedMeasurement(Protocol):
    """A published run, planned as its expert divided it."""

    @property
    def run(self) -> MeasuredRun: ...

    @property
    def cluster(self) -> Cluster:
        """What it ran on."""

    @property
    def memory(self) -> int:
        """Bytes that a device needs at most, as predicted."""

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Of a step, as predicted on this cluster or on another."""


class PublishedRun(BaseModel, strict=True, frozen=True):
    """A training run of a language model whose throughput was published; other keys are ignored.

    Args:
        source: where it was published.
        hidden, layers, heads, kv_heads, ffn, vocab, seq: dimensions of the model, and positions of
            a sequence.
        hardware: name of a cluster.
        data_parallel: replicas of a stage; `sharded` says what is sharded over them.
        micro_batch: sequences that a replica computes at once.
        global_batch: sequences of a step.
        recompute: `selective`: all but attention and every second matrix product of a block.
        memory_gib: peak of one device, if published.
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
        """The model's. Raises: ConfigError: they contradict each other."""
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
        """What it ran on. Raises: ConfigError: `hardware` names none."""
        return cluster_of(self)

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.global_batch // (self.micro_batch * self.data_parallel)

    @property
    def seconds(self) -> float:
        """Of a step, as measured."""
        return self.global_batch * self.seq / self.devices / self.tokens_per_second_per_device

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """The share of the peak in a step of so many seconds; see `share_of_peak`."""
        tokens = self.global_batch * self.seq / self.devices / seconds
        return share_of_peak(self.sizes, tokens, cluster.device.rates[DTYPES[self.dtype]])


def cluster_of(run: MeasuredRun) -> Cluster:
    """What a run ran on. Raises: ConfigError: `hardware` names none."""
    try:
        return load_cluster(run.hardware)
    except ConfigError as error:
        raise ConfigError(f"row {run.id}: hardware: {error}") from None


def check_possible(run: MeasuredRun, cluster: Cluster) -> None:
    """Raises: ConfigError: a run was faster than the peak of its cluster."""
    share = run.utilization(cluster, run.seconds)
    if share > 1:
        raise ConfigError(
            f"row {run.id}: {run.tokens_per_second_per_device:g} tokens per second and device are"
            f" {share:.0%} of the peak of {cluster.name}"
        )


def share_of_peak(sizes: Dimensions, tokens: float, rate: float) -> float:
    """The share of the peak that the model's FLOPs need: without recomputation, with all of
    attention, as Chowdhery et al. (PaLM, 2022) count, and with the experts that a token visits.

    Args:
        tokens: per second and device.
        rate: FLOPs per second, the peak of a device.
    """
    linears = 2 if sizes.family in ("gpt", "pangualpha") else 3
    hidden, layers = sizes.hidden_size, sizes.num_layers
    grouped = 2 + 2 * sizes.num_kv_heads / sizes.num_heads
    feed_forward = linears * sizes.intermediate_size * sizes.experts_per_token
    weights = layers * hidden * (grouped * hidden + feed_forward) + sizes.vocab_size * hidden
    return tokens * (6 * weights + 12 * layers * hidden * sizes.seq_length) / rate


def read_published(file: str | Path) -> list[PublishedRun]:
    """The runs in the list `rows` of a JSON file.

    Raises:
        ConfigError: names the file, the row and the key that is missing or impossible.
    """
    runs: dict[str, PublishedRun] = {}
    for number, row in enumerate(rows_of(file, "rows")):
        where = f"{file}: rows[{number}]"
        run = validated_row(PublishedRun, row, where)
        if run.id in runs:
            raise ConfigError(f"{where}: id {run.id!r} is that of another row too")
        runs[run.id] = run
    return list(runs.values())


def rows_of(file: str | Path, key: str) -> list[Any]:
    """A list of a JSON file; empty where the file has only the other one.

    Raises:
        ConfigError: the file has no runs.
    """
    content = parse_json(read_text(file, ConfigError), str(file), ConfigError)
    lists = content if isinstance(content, dict) else {"rows": content}
    known = {name: lists.get(name, []) for name in LISTS}
    if not all(isinstance(rows, list) for rows in known.values()) or not any(known.values()):
        raise ConfigError(
            f"{file}: expected a mapping with a list `rows` or `mindformers` that is not empty"
        )
    rows: list[Any] = known[key]
    return rows


def validated_row(kind: type[Row], row: Any, where: str) -> Row:
    """A row of a kind. Raises: ConfigError: names the key that is missing or impossible."""
    if isinstance(row, dict) and isinstance(row.get("id"), str):
        where = f"{where} ({row['id']})"
    try:
        return kind.model_validate(row)
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
    """A published run, divided as its expert divided it. The model is captured at first use, at
    full size on the meta device.

    Args:
        cluster: what it ran on.
    """

    run: PublishedRun
    cluster: Cluster

    def __post_init__(self) -> None:
        """Raises: ConfigError: the measured throughput is impossible."""
        if DTYPES[self.run.dtype] not in self.cluster.device.rates:
            raise ConfigError(
                f"row {self.run.id}: cluster {self.cluster.name} has no rate for {self.run.dtype}"
            )
        check_possible(self.run, self.cluster)

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Of a step, as predicted. What others ran did not start redistributions early."""
        return predict(self.candidate.partitioned, cluster or self.cluster, blocking=True).seconds

    @property
    def memory(self) -> int:
        """Bytes that a device needs at most, as predicted."""
        candidate = self.candidate
        if self.run.recompute != "selective":
            return candidate.memory().peak
        # Others keep results of blocks whose inputs are all that is kept besides: here the inputs
        # of what is computed again are kept, which are more.
        graph, chosen = candidate.model.graph, candidate.decisions
        blocks = {mark.segment for mark in chosen.recompute.values()}
        inside = {op.name: path for op in graph.ops if (path := _block_of(op, blocks))}
        again = {name: Recompute(path) for name, path in inside.items()}
        peak = candidate.memory(replace(chosen, recompute=again)).peak
        kept = sum(
            _result_bytes(graph.by_name[name], candidate)
            for name in inside
            if name not in chosen.recompute
        )
        stages = self.run.stages
        return peak + int(kept / stages * min(stages, self.run.micro_batches))

    @cached_property
    def candidate(self) -> Candidate:
        """The decisions. Raises: ConfigError: the model cannot be divided so."""
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
        # Half precision of either kind takes the same time.
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
    """What torchtitan recomputes: of each block all but attention and every second product."""
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
    """Of the result of `op` on one device."""
    rule = rule_of(op)
    assert rule is not None
    parts = rule.shard_counts(candidate.mesh, candidate.decisions.cuts.get(op.name, {}))
    named = (parts[factor] for factor in rule.outputs[0] if factor is not None)
    return op.output.numel * op.output.itemsize / prod(named)


def _block_of(op: Op, blocks: Collection[str]) -> str | None:
    parts = op.module.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((path for path in paths if path in blocks), None)
