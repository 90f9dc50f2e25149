"""Published training runs described by model dimensions, and predictions for them."""

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

ZERO_LEVELS = {"none": None, "optimizer": "level1", "gradients": "level2", "parameters": "level3"}
"""ZeRO level (`hsdp`) by the published name of the state sharded over data-parallel devices."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

LIST_KEYS = "rows", "mindformers"
"""Keys of the lists in a file: runs by model dimensions, and by configuration of MindFormers."""

UNFUSED_ATTENTION_SOURCES = ("2104.04473",)
"""arXiv ids of publications without fused attention: Narayanan et al., 2021 (Megatron-LM)."""

Row = TypeVar("Row", bound=BaseModel)

Hardware = Annotated[str, AfterValidator(lambda name: name.partition(" (")[0])]
"""Name of a cluster; a remark in parentheses after the name is dropped."""


class MeasuredRun(Protocol):
    """A published run with measured throughput."""

    @property
    def id(self) -> str: ...

    @property
    def source(self) -> str:
        """Title or id of the publication."""

    @property
    def hardware(self) -> str:
        """Name of the cluster."""

    @property
    def devices(self) -> int: ...

    @property
    def tokens_per_second_per_device(self) -> float: ...

    @property
    def memory_gib(self) -> float | None:
        """Peak memory of a device in GiB; None if not published."""

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """Return the MFU of a step of `seconds` seconds; see `model_flops_utilization`."""


class PlannedMeasurement(Protocol):
    """A published run, planned as its publication describes."""

    @property
    def run(self) -> MeasuredRun: ...

    @property
    def cluster(self) -> Cluster:
        """Cluster on which the run was measured."""

    @property
    def memory(self) -> int:
        """Predicted peak bytes per device."""

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Predict the seconds of a step, by default on the cluster of the run."""


class PublishedRun(BaseModel, strict=True, frozen=True):
    """A training run of a language model with published throughput; unknown keys are ignored.

    Args:
        source: title or id of the publication.
        hidden, layers, heads, kv_heads, ffn, vocab, seq: dimensions of the model, and tokens per
            sequence.
        hardware: name of a cluster.
        data_parallel: number of replicas of a stage.
        sharded: the state that is sharded over the replicas (ZeRO).
        micro_batch: sequences per micro-batch and replica.
        global_batch: sequences per step.
        recompute: `selective` recomputes all operators of a block except attention and every second
            matrix product, as torchtitan does.
        memory_gib: peak memory of a device in GiB; None if not published.
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
    def _check_sizes_agree(self) -> Self:
        product = f"{self.data_parallel} · {self.tensor_parallel} · {self.stages}"
        if self.devices != self.data_parallel * self.tensor_parallel * self.stages:
            raise ValueError(
                f"`devices` is {self.devices}, but must be data_parallel · tensor_parallel · stages"
                f" = {product}; correct one of these keys"
            )
        samples = self.micro_batch * self.data_parallel
        if self.global_batch % samples:
            raise ValueError(
                f"`global_batch` is {self.global_batch}, which is not a multiple of micro_batch ·"
                f" data_parallel = {samples}; correct one of these keys"
            )
        if self.heads % self.tensor_parallel:
            raise ValueError(
                f"`heads` is {self.heads}, which is not a multiple of tensor_parallel ="
                f" {self.tensor_parallel}; correct one of these keys"
            )
        _ = self.sizes
        return self

    @property
    def sizes(self) -> Dimensions:
        """Dimensions of the model. Raises ConfigError if they contradict each other."""
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
        """Cluster of the run. Raises ConfigError if `hardware` is not a cluster."""
        return cluster_of(self)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return self.global_batch // (self.micro_batch * self.data_parallel)

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        return self.global_batch * self.seq / self.devices / self.tokens_per_second_per_device

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """Return the MFU of a step of `seconds` seconds; see `model_flops_utilization`."""
        tokens = self.global_batch * self.seq / self.devices / seconds
        return model_flops_utilization(self.sizes, tokens, cluster.device.rates[DTYPES[self.dtype]])


def cluster_of(run: MeasuredRun) -> Cluster:
    """Load the cluster of a run. Raises ConfigError if `hardware` is not a cluster."""
    try:
        return load_cluster(run.hardware)
    except ConfigError as error:
        raise ConfigError(f"row {run.id}: cannot load the cluster `hardware`: {error}") from None


def check_below_peak(run: MeasuredRun, cluster: Cluster) -> None:
    """Raise ConfigError if a run was faster than the peak of its cluster."""
    utilization = run.utilization(cluster, run.seconds)
    if utilization > 1:
        raise ConfigError(
            f"row {run.id}: {run.tokens_per_second_per_device:g} tokens per second and device are"
            f" {utilization:.0%} of the peak of {cluster.name}\ncheck the units and `hardware`"
        )


def model_flops_utilization(sizes: Dimensions, tokens: float, rate: float) -> float:
    """Return the model FLOPs utilization (MFU), as in PaLM (Chowdhery et al., 2022, appendix B).

    A token takes 6 FLOPs per weight, plus 12 · layers · hidden · seq for attention. Counts
    attention as if it were not causal, and only the experts that process the token; does not count
    recomputation.

    Args:
        tokens: tokens per second and device.
        rate: peak FLOPs per second of a device.
    """
    linears = 2 if sizes.family in ("gpt", "pangualpha") else 3
    hidden, layers = sizes.hidden_size, sizes.num_layers
    # Queries and output projection, and keys and values of grouped-query attention.
    attention = 2 + 2 * sizes.num_kv_heads / sizes.num_heads
    feed_forward = linears * sizes.intermediate_size * sizes.experts_per_token
    weights = layers * hidden * (attention * hidden + feed_forward) + sizes.vocab_size * hidden
    return tokens * (6 * weights + 12 * layers * hidden * sizes.seq_length) / rate


def read_published(file: str | Path) -> list[PublishedRun]:
    """Read the list `rows` of a JSON file.

    Raises:
        ConfigError: if a key is missing or invalid; the message names the file, the row and the
            key.
    """
    runs: dict[str, PublishedRun] = {}
    for index, row in enumerate(read_rows(file, "rows")):
        location = f"{file}: rows[{index}]"
        run = validate_row(PublishedRun, row, location)
        if run.id in runs:
            raise ConfigError(
                f"{location}: another row has the id {run.id!r}\ngive each row its own id"
            )
        runs[run.id] = run
    return list(runs.values())


def read_rows(file: str | Path, key: str) -> list[Any]:
    """Read a list of runs from a JSON file.

    Args:
        key: name of the list, one of `LIST_KEYS`. A file whose top level is a list is `rows`.

    Returns:
        The entries of the list; [] if the file lacks the list.

    Raises:
        ConfigError: if the file has no non-empty list, or a value that is not a list.
    """
    content = parse_json(read_text(file, ConfigError), str(file), ConfigError)
    lists = content if isinstance(content, dict) else {"rows": content}
    rows_by_key = {name: lists.get(name, []) for name in LIST_KEYS}
    if not all(isinstance(rows, list) for rows in rows_by_key.values()) or not any(
        rows_by_key.values()
    ):
        raise ConfigError(
            f"{file}: the file has no rows\nwrite a mapping with a list `rows` or `mindformers`"
        )
    rows: list[Any] = rows_by_key[key]
    return rows


def validate_row(row_type: type[Row], row: Any, location: str) -> Row:
    """Validate `row`, an entry of a list of runs, and return it as a `row_type`.

    Args:
        location: file and index of the entry, for error messages.

    Raises:
        ConfigError: if a key is missing or invalid.
    """
    if isinstance(row, dict) and isinstance(row.get("id"), str):
        location = f"{location} ({row['id']})"
    try:
        return row_type.model_validate(row)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(str(entry) for entry in details["loc"])
        if details["type"] == "missing":
            raise ConfigError(f"{location}: the key `{key}` is missing\nadd it") from None
        problem = details["msg"].removeprefix("Value error, ")
        got = f"{key}: {problem}, not {short_repr(details['input'])}" if key else problem
        raise ConfigError(f"{location}: {got}") from None


@dataclass(frozen=True)
class PlannedRun:
    """A run described by model dimensions, planned as published.

    The model is captured on first use, at full size on the meta device.
    """

    run: PublishedRun
    cluster: Cluster

    def __post_init__(self) -> None:
        """Raise ConfigError if the cluster has no rate for the dtype, or the run was faster than
        that peak rate."""
        if DTYPES[self.run.dtype] not in self.cluster.device.rates:
            raise ConfigError(
                f"row {self.run.id}: the cluster {self.cluster.name} has no peak rate for"
                f" {self.run.dtype}\ncheck `dtype`, or add the rate to the cluster file"
            )
        check_below_peak(self.run, self.cluster)

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Predict the seconds of a step, by default on the cluster of the run."""
        # `blocking`, because published frameworks did not start redistributions early.
        return predict(self.candidate.partitioned, cluster or self.cluster, blocking=True).seconds

    @property
    def memory(self) -> int:
        """Predicted peak bytes per device."""
        candidate = self.candidate
        if self.run.recompute != "selective":
            return candidate.memory().peak
        # Selective recomputation in torchtitan saves the block's input and the results of operators
        # that are not recomputed. Ours also saves the inputs of the recomputed segments between
        # them, so memory is predicted with full recomputation plus the saved results.
        graph, decisions = candidate.model.graph, candidate.decisions
        blocks = {recompute.segment for recompute in decisions.recompute.values()}
        block_ops = {op.name: path for op in graph.ops if (path := _enclosing_block(op, blocks))}
        all_recomputed = {name: Recompute(path) for name, path in block_ops.items()}
        peak_bytes = candidate.memory(replace(decisions, recompute=all_recomputed)).peak
        saved_bytes = sum(
            _output_bytes(graph.by_name[name], candidate)
            for name in block_ops
            if name not in decisions.recompute
        )
        stages = self.run.stages
        return peak_bytes + int(saved_bytes / stages * min(stages, self.run.micro_batches))

    @cached_property
    def candidate(self) -> Candidate:
        """Plan of the run. Raises ConfigError if the model cannot be sharded as published."""
        try:
            return self._plan_as_published()
        except ShardwrightError as error:
            raise ConfigError(f"row {self.run.id} cannot be planned: {error}") from error

    def _plan_as_published(self) -> Candidate:
        run = self.run
        unfused = any(source in run.source for source in UNFUSED_ATTENTION_SOURCES)
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
        # Captured in bfloat16 instead of float16, which has the same rates.
        autocast_dtype = None if run.dtype == "fp32" else torch.bfloat16
        graph = capture(net, batch, {}, compute_dtype=autocast_dtype)
        level = ZERO_LEVELS[run.sharded]
        options = PlanOptions(
            devices=run.devices,
            mode="sharding_propagation",
            cluster=self.cluster,
            stage_config=expert_stages(net, run.stages) if run.stages > 1 else None,
            micro_batches=run.micro_batches,
            compute_dtype=None if autocast_dtype is None else "bfloat16",
            hsdp=None if level is None else {"level": level},
        )
        names = tuple(name for name, _ in net.named_modules())
        searched = candidates(CapturedModel(graph, pins_of(graph), names, True), options)
        candidate = searched[0].aligned
        if run.recompute != "selective":
            return candidate
        recompute_marks = dict(_selectively_recomputed_ops(graph, blocks))
        return replace(candidate, decisions=replace(candidate.decisions, recompute=recompute_marks))


def _selectively_recomputed_ops(
    graph: Graph, blocks: Collection[str]
) -> Iterator[tuple[str, Recompute]]:
    """Yield the names of operators that selective checkpointing recomputes, with their segment.

    As in torchtitan, these are all operators of a block except attention and every second matrix
    product.
    """
    products = dict.fromkeys(blocks, 0)
    for op in graph.ops:
        block = _enclosing_block(op, blocks)
        if block is None or op.target is aten.scaled_dot_product_attention.default:
            continue
        if op.target is aten.linear.default:
            products[block] += 1
            if products[block] % 2:
                continue
        yield op.name, Recompute(block)


def _output_bytes(op: Op, candidate: Candidate) -> float:
    """Return the bytes of `op`'s output on one device in the plan `candidate`."""
    rule = rule_of(op)
    assert rule is not None
    shard_counts = rule.shard_counts(candidate.mesh, candidate.decisions.cuts.get(op.name, {}))
    output_counts = (shard_counts[factor] for factor in rule.outputs[0] if factor is not None)
    return op.output.numel * op.output.itemsize / prod(output_counts)


def _enclosing_block(op: Op, blocks: Collection[str]) -> str | None:
    names = op.module.split(".")
    paths = (".".join(names[:end]) for end in range(1, len(names) + 1))
    return next((path for path in paths if path in blocks), None)
