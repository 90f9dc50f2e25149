"""Published training runs described by model dimensions, as rows of a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ValidationError,
    field_validator,
    model_validator,
)

from shardwright.core.cost.cluster import Cluster
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.errors import ConfigError, one_line
from shardwright.models import Dimensions
from shardwright.models.build import FAMILIES
from shardwright.models.decoder import MODEL_TYPES
from shardwright.plain_data import parse_json, short_repr
from shardwright.run.config.schema import Count, Positive
from shardwright.text_files import read_text
from shardwright.tools.compare.measured_run import cluster_of, model_flops_utilization
from shardwright.tools.compare.published_names import with_names_of_rows

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

LIST_KEYS = "rows", "mindformers"
"""Keys of a file: the list of runs given by model dimensions, and by MindFormers files."""

Row = TypeVar("Row", bound=BaseModel)

Hardware = Annotated[str, AfterValidator(lambda name: name.partition(" (")[0])]
"""Name of a cluster; a remark in parentheses after the name is dropped."""


# Written out, because type checkers need literal values.
Schedule = Literal[
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "zero_bubble_v",
    "interleaved_zero_bubble",
    "dualpipe_v",
    "looped_bfs",
]
"""Name of a pipeline schedule, a key of `SCHEDULES`."""


EXPLICIT_KERNELS = ("torch", "fused")
"""Names of kernels of unfused attention: `torch` has the operators of PyTorch, `fused` has
Megatron-LM's scaled masked softmax as one kernel (Hagemann et al., arXiv:2311.05610)."""

EXPLICIT_ATTENTION_SOURCES = ("2104.04473",)
"""arXiv ids of publications without fused attention: Narayanan et al., 2021 (Megatron-LM)."""


BIASED_EXPERTS = ("gpt_oss",)
"""Types of `transformers` models whose experts have biases and clamped inner activations."""


class PublishedRun(BaseModel, strict=True, frozen=True):
    """A training run of a language model with published throughput; unknown keys are ignored.

    Args:
        source: title or id of the publication.
        hidden, layers, heads, kv_heads, ffn, vocab, seq: dimensions of the model, and tokens per
            sequence.
        hardware: name of a cluster.
        data_parallel: number of replicas of a stage.
        sharded: the state that is sharded over the replicas (ZeRO).
        shard_size: number of replicas over which it is sharded (HSDP), a divisor of
            `data_parallel`; by default all. Also `dp_shard`, beside `dp_replicate`.
        micro_batch: sequences per micro-batch and replica.
        global_batch: sequences per step.
        recompute: the recomputed operators. `selective` means the selection of the run's framework:
            attention only with Megatron-LM; otherwise, as in torchtitan, all operators of a block
            except attention and every second matrix product.
        head_dim: size of an attention head; by default hidden / heads.
        experts, experts_per_token: for mixtures of experts, whose `ffn` is the width of an expert.
        context_parallel: number of shards of the sequence; also `cp`.
        expert_parallel: number of shards of the experts, a divisor of the devices of a stage; also
            `ep`. Taken from `data_parallel` as far as possible, then from the other degrees.
        expert_tensor_parallel: number of devices that share an expert: 1 or `tensor_parallel`; also
            `etp`. By default `tensor_parallel`, or 1 where `expert_parallel` needs its devices.
        expert_biases: whether experts have biases and clamped inner activations.
        chunks: number of chunks of each stage (virtual stages).
        schedule: name of the pipeline schedule; by default 1F1B, interleaved with several chunks.
        layers_of_stages: number of blocks of each stage, or of each chunk; by default equal.
        attention: `explicit` for unfused attention, or the name of a fused kernel.
        kernel: name of the attention kernels, such as `fa2`; None for those of the cluster.
        framework: name of the training framework; by default read from `source`.
        hf: further arguments of the `transformers` configuration, for families built on it.
        hf_config: the published `transformers` configuration, of which only the type is read.
        memory_gib: peak memory of a device in GiB; None if not published.
    """

    id: str
    source: str
    model: str
    family: str
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
    shard_size: Count | None = None
    head_dim: Count | None = None
    experts: Count = 1
    experts_per_token: Count = 1
    context_parallel: Count = 1
    expert_parallel: Count = 1
    expert_tensor_parallel: Count | None = None
    expert_biases: bool = False
    chunks: Count = 1
    schedule: Schedule | None = None
    layers_of_stages: list[Count] | None = None
    attention: str | None = None
    kernel: str | None = None
    framework: str | None = None
    hf: Mapping[str, Any] = {}
    hf_config: Mapping[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _accept_other_names(cls, row: object) -> object:
        return with_names_of_rows(row) if isinstance(row, Mapping) else row

    @field_validator("family")
    @classmethod
    def _check_family(cls, family: str) -> str:
        if family not in FAMILIES:
            raise ValueError(f"unknown family; set it to one of {', '.join(FAMILIES)}")
        return family

    @model_validator(mode="after")
    def _check_consistent_sizes(self) -> Self:
        degrees = {
            "data_parallel": self.data_parallel,
            "tensor_parallel": self.tensor_parallel,
            "stages": self.stages,
            "context_parallel": self.context_parallel,
        }
        # Rows of runs without context parallelism need not say so.
        if self.context_parallel == 1:
            del degrees["context_parallel"]
        if self.devices != prod(degrees.values()):
            raise ValueError(
                f"`devices` is {self.devices}, but must be {' · '.join(degrees)} ="
                f" {' · '.join(map(str, degrees.values()))}; correct one of these keys"
            )
        if self.shard_size is not None and self.data_parallel % self.shard_size:
            raise ValueError(
                f"`shard_size` is {self.shard_size}, which does not divide data_parallel ="
                f" {self.data_parallel}; correct one of these keys"
            )
        stage_devices = self.data_parallel * self.context_parallel * self.tensor_parallel
        if stage_devices % self.expert_parallel:
            raise ValueError(
                f"`expert_parallel` is {self.expert_parallel}, which does not divide the"
                f" {stage_devices} devices of a stage; correct one of these keys"
            )
        if self.expert_tensor_parallel not in (None, 1, self.tensor_parallel):
            raise ValueError(
                f"`expert_tensor_parallel` is {self.expert_tensor_parallel}, but must be 1 or"
                f" tensor_parallel = {self.tensor_parallel}; correct one of these keys"
            )
        self._check_layers_of_chunks()
        samples = self.micro_batch * self.data_parallel
        # A step has a whole number of micro-batches.
        if self.global_batch % samples:
            raise ValueError(
                f"`global_batch` is {self.global_batch}, which is not a multiple of micro_batch ·"
                f" data_parallel = {samples}; correct one of these keys"
            )
        # Tensor parallelism shards attention by heads.
        if self.heads % self.tensor_parallel:
            raise ValueError(
                f"`heads` is {self.heads}, which is not a multiple of tensor_parallel ="
                f" {self.tensor_parallel}; correct one of these keys"
            )
        # Raises an error if dimensions contradict each other.
        _ = self.sizes
        return self

    def _check_layers_of_chunks(self) -> None:
        # One stage has neither chunks nor numbers of blocks to check.
        if self.stages == 1:
            return
        if not SCHEDULES[self.schedule_name].allows_chunks(self.chunks):
            raise ValueError(
                f"`chunks` is {self.chunks}, but schedule {self.schedule_name} runs"
                f" {SCHEDULES[self.schedule_name].valid_chunks}; correct one of these keys"
            )
        layers = self.layers_of_stages
        if layers is not None and (
            # One number for each stage, or one for each chunk.
            len(layers) not in (self.stages, self.stages * self.chunks)
            or sum(layers) != self.layers
        ):
            raise ValueError(
                f"`layers_of_stages` {layers} does not divide {self.layers} layers into"
                f" {self.stages} stages; use one number per stage, with the sum {self.layers}"
            )

    @property
    def has_explicit_attention(self) -> bool:
        """Whether attention is unfused and saves its score matrix for the backward pass."""
        return (
            self.attention == "explicit"
            or self.kernel in EXPLICIT_KERNELS
            # Sources name publications by their arXiv ids.
            or any(source in self.source for source in EXPLICIT_ATTENTION_SOURCES)
        )

    @property
    def has_expert_biases(self) -> bool:
        """Whether experts have biases and clamped inner activations."""
        return self.expert_biases or self.hf_config.get("model_type") in BIASED_EXPERTS

    @property
    def has_whole_experts(self) -> bool:
        """Whether a device has whole experts, although `tensor_parallel` devices share layers."""
        if self.expert_tensor_parallel is None:
            replicas = self.data_parallel * self.context_parallel
            return replicas % self.expert_parallel != 0
        return self.expert_tensor_parallel < self.tensor_parallel

    @property
    def schedule_name(self) -> str:
        """Name of the pipeline schedule."""
        return self.schedule or ("1f1b" if self.chunks == 1 else "interleaved_1f1b")

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
            # Frameworks pad the vocabulary to a multiple of the tensor-parallel degree.
            vocab_size=-(-self.vocab // self.tensor_parallel) * self.tensor_parallel,
            seq_length=self.seq,
            # Changes neither time nor memory.
            norm_eps=1e-5,
            positions="learned" if self.family in ("gpt", "pangualpha") else "rotary",
            num_experts=self.experts,
            experts_per_token=self.experts_per_token,
            hf=self._hf_config_arguments,
        )

    @property
    def _hf_config_arguments(self) -> dict[str, Any]:
        # Other families have heads of hidden / heads, and ignore these arguments.
        if self.family not in MODEL_TYPES:
            return {}
        return {**({} if self.head_dim is None else {"head_dim": self.head_dim}), **self.hf}

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
        """Measured seconds of a training step."""
        return self.global_batch * self.seq / self.devices / self.tokens_per_second_per_device

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """Return the MFU of a step of `seconds` seconds; see `model_flops_utilization`."""
        tokens = self.global_batch * self.seq / self.devices / seconds
        return model_flops_utilization(self.sizes, tokens, cluster.device.rates[DTYPES[self.dtype]])


def read_published(file: str | Path, left_out: dict[str, str] | None = None) -> list[PublishedRun]:
    """Read the published training runs in the list `rows` of a JSON file.

    Args:
        left_out: where to add the reasons why rows are not valid, by their index; if None, such a
            row is an error.

    Raises:
        ConfigError: if a key is missing or invalid; the message names the file, the row and the
            key.
    """
    runs: dict[str, PublishedRun] = {}
    for index, row in enumerate(read_rows(file, "rows")):
        location = f"{file}: rows[{index}]"
        try:
            run = validate_row(PublishedRun, row, location)
            if run.id in runs:
                raise ConfigError(
                    f"{location}: another row has the id {run.id!r}\ngive each row its own id"
                )
        except ConfigError as error:
            if left_out is None:
                raise
            left_out[f"rows[{index}]"] = one_line(error)
        else:
            runs[run.id] = run
    return list(runs.values())


def read_rows(file: str | Path, key: str) -> list[Any]:
    """Read a list of runs from a JSON file.

    Args:
        key: name of the list, one of `LIST_KEYS`; `rows` if the top level of the file is a list.

    Returns:
        The entries of the list; [] if the file has only other lists.

    Raises:
        ConfigError: if all lists of the file are missing or empty, or one of them is not a list.
    """
    content = parse_json(read_text(file, ConfigError), str(file), ConfigError)
    lists = content if isinstance(content, dict) else {"rows": content}
    rows_by_key = {name: lists.get(name, []) for name in LIST_KEYS}
    # A file may have either list, or both.
    if not all(isinstance(rows, list) for rows in rows_by_key.values()) or not any(
        rows_by_key.values()
    ):
        raise ConfigError(
            f"{file}: the file has no rows\nwrite a mapping with a list `rows` or `mindformers`"
        )
    rows: list[Any] = rows_by_key[key]
    return rows


def validate_row(row_type: type[Row], row: Any, location: str) -> Row:
    """Validate an entry of a list of runs, and return it as an object.

    Args:
        row_type: model that describes the valid keys and values, and class of the result.
        row: the entry, as read from JSON.
        location: file and index of the entry, for error messages.

    Raises:
        ConfigError: if a key is missing or invalid.
    """
    # An id is found in a file sooner than an index.
    if isinstance(row, dict) and isinstance(row.get("id"), str):
        location = f"{location} ({row['id']})"
    try:
        return row_type.model_validate(row)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(str(entry) for entry in details["loc"])
        if details["type"] == "missing":
            raise ConfigError(f"{location}: the key `{key}` is missing\nadd it") from None
        # Pydantic puts this prefix before messages of validators.
        problem = details["msg"].removeprefix("Value error, ")
        got = f"{key}: {problem}, not {short_repr(details['input'])}" if key else problem
        raise ConfigError(f"{location}: {got}") from None
