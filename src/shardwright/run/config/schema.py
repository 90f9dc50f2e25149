"""Keys of a configuration file, with types and defaults."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shardwright.core.cost.optimizer_state import OPTIMIZERS
from shardwright.core.planner.options import FileOptions, PlanOptions
from shardwright.core.planner.requirement import requirements
from shardwright.errors import ConfigError

# `.inf` is a number in YAML, and would pass `gt=0`.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0)]
# "package.module:callable", imported from the configuration's folder first.
ImportTarget = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]


class Section(BaseModel, extra="forbid", strict=True, frozen=True):
    """Base class of sections, which rejects unknown keys and values of another type."""


class LoraSection(Section, frozen=True):
    """LoRA adapters; all other weights are frozen."""

    target_modules: str | list[str] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    rank: Count = 16
    alpha: Positive = 16
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    trained: list[str] = []


class PrefixSection(Section, frozen=True):
    """Prefix tuning: trained keys and values prepended in each layer; all weights are frozen."""

    tokens: Count = 16
    projection: Count | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class ModelSection(Section, frozen=True):
    """The model, from exactly one of four sources.

    `target`: a callable that is called with `arguments` and returns an `nn.Module`. `name`: a
    language model of `shardwright.models`. `sizes`: the fields of `shardwright.models.Dimensions`.
    `hf`: a causal language model of `transformers`, as the path of a `config.json` or the arguments
    of `AutoConfig.for_model`. Language models are built with `arguments`.
    """

    target: ImportTarget | None = None
    name: str | None = None
    sizes: dict[str, Any] | None = None
    hf: str | dict[str, Any] | None = None
    arguments: dict[str, Any] = {}
    lora: LoraSection | None = None
    prefix: PrefixSection | None = None

    @property
    def is_language_model(self) -> bool:
        """Whether the model computes its own loss."""
        return self.target is None

    @model_validator(mode="after")
    def _check_one_model_source(self) -> Self:
        sources = {"target": self.target, "name": self.name, "sizes": self.sizes, "hf": self.hf}
        used_keys = [key for key, value in sources.items() if value is not None]
        if len(used_keys) != 1:
            listed = " and ".join(f"`{key}`" for key in used_keys) or "no source"
            raise ValueError(
                f"`model` has {listed}; set exactly one of the keys `target`, `name`, `sizes`, `hf`"
            )
        if self.lora is not None and self.target is not None:
            raise ValueError("the key `lora` needs a language model; set `name`, `sizes` or `hf`")
        if self.prefix is not None and self.lora is not None:
            raise ValueError("the keys `prefix` and `lora` conflict; remove one of them")
        # `build_hf` has no prefix tuning.
        if self.prefix is not None and not (self.name or self.sizes):
            raise ValueError("the key `prefix` needs a language model; set `name` or `sizes`")
        return self


class DataSection(Section, frozen=True):
    """The training data.

    `name`: a built-in dataset, or `text` or `tokens` files at `path`. `target`: a callable that is
    called with `arguments` and returns a tuple of tensors with samples on dimension 0. `dtype`: the
    dtype of `.bin` token files without a header.
    """

    name: Literal["digits", "mnist", "text", "tokens"] | None = None
    target: ImportTarget | None = None
    arguments: dict[str, Any] = {}
    path: str | None = None
    # Digits have 8 x 8 pixels and are only enlarged.
    image_size: Annotated[int, Field(ge=8, le=256)] | None = None
    seq_length: Count | None = None
    tokenizer: str | None = None
    dtype: Literal["uint16", "uint32"] | None = None
    batch_size: Count = 32
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_one_data_source(self) -> Self:
        if self.name is not None and self.target is not None:
            raise ValueError("the keys `name` and `target` conflict; remove one of them")
        if self.arguments and self.target is None:
            raise ValueError(
                "the key `arguments` needs the key `target`, for example `target: data:images`"
            )
        if self.name == "tokens" and self.path is None:
            raise ValueError("`name: tokens` needs the key `path`, for example `path: train.bin`")
        if self.name in ("text", "tokens") and self.seq_length is None:
            raise ValueError(
                f"`name: {self.name}` needs the key `seq_length`, for example `seq_length: 64`"
            )
        # Without `name` and `target`, the dataset is the digits.
        name = "digits" if self.name is None and self.target is None else self.name
        for key, names in _DATASETS_BY_KEY.items():
            if getattr(self, key) is not None and name not in names:
                valid = " or ".join(f"`name: {name}`" for name in names)
                raise ValueError(f"the key `{key}` needs {valid}; remove the key, or change `name`")
        return self


def _make_option_error(expected: str) -> PydanticCustomError:
    return PydanticCustomError("option_error", "expected {expected}", {"expected": expected})


def _get_first_error_message(error: ValidationError) -> str:
    return error.errors()[0]["msg"].removeprefix("Value error, ")


_DATASETS_BY_KEY = {
    "path": ("mnist", "text", "tokens"),
    "image_size": ("digits",),
    "seq_length": ("text", "tokens"),
    "tokenizer": ("text",),
    "dtype": ("tokens",),
}
"""For each optional key of the section `data`, the values of `data.name` that allow the key."""


class ScheduleSection(Section, frozen=True):
    """Learning rate schedule; the arguments of `LRSchedule`."""

    kind: Literal["constant", "cosine", "linear", "polynomial"] = "cosine"
    start: NotNegative = 0.0
    end: NotNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    total_steps: Count | None = None
    power: Positive = 1.0

    @model_validator(mode="after")
    def _check_warmup_keys(self) -> Self:
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError("the keys `warmup_steps` and `warmup_ratio` conflict; remove one")
        return self


class OptimizerSection(Section, frozen=True):
    """The optimizer and its hyperparameters; omitted keys have PyTorch's defaults.

    `clip_norm`: maximum global gradient norm. `decay_vectors: false`: no weight decay for biases
    and normalization weights.
    """

    name: str = "sgd"
    learning_rate: Positive = 0.001
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: NotNegative | None = None
    decay_vectors: bool = True
    betas: list[NotNegative] | None = None
    eps: Positive | None = None
    schedule: ScheduleSection | None = None
    clip_norm: Positive | None = None

    @field_validator("name", mode="before")
    @classmethod
    def _check_optimizer_name(cls, value: Any) -> Any:
        if value not in OPTIMIZERS:
            *names, last = (repr(name) for name in OPTIMIZERS)
            expected = f"{', '.join(names)} or {last}"
            raise _make_option_error(expected)
        return value

    @model_validator(mode="after")
    def _check_optimizer_keys(self) -> Self:
        optimizer = OPTIMIZERS[self.name]
        for key, example in optimizer.required.items():
            if getattr(self, key) is None:
                raise ValueError(
                    f"`name: {self.name}` needs the key `{key}`; set for example `{key}: {example}`"
                )
        valid_keys = {*optimizer.keys, *optimizer.required}
        # `weight_decay` is not among these keys, because every optimizer has it.
        for key in ("momentum", "betas", "eps"):
            if key not in valid_keys and getattr(self, key) is not None:
                names = [n for n, o in OPTIMIZERS.items() if key in (*o.keys, *o.required)]
                valid = " or ".join(f"`name: {name}`" for name in names)
                raise ValueError(
                    f"the key `{key}` has no effect with `name: {self.name}`; remove it, or set"
                    f" {valid}"
                )
        # The bounds that PyTorch's Adam checks.
        if self.betas is not None and (len(self.betas) != 2 or max(self.betas) >= 1):
            raise ValueError(
                f"`betas` must be two numbers below 1, not {self.betas}; set for example"
                " [0.9, 0.95]"
            )
        return self


class ExpertSection(Section, frozen=True):
    """Megatron-style parallel degrees of a language model, for `mode: semi_auto`.

    The arguments of `shardwright.models.expert_sharding.pin_expert`, and `layers`: the number of
    blocks in each pipeline stage, by default the same number in all; with `interleaved_1f1b`, in
    each chunk, chunks in model order.
    """

    data_parallel: Count = 1
    model_parallel: Count = 1
    context_parallel: Count = 1
    expert_parallel: Count = 1
    seq_parallel: bool = False
    vocab_emb_dp: bool = False
    layers: list[Count] | None = None


class OptimizerParallelSection(Section, frozen=True):
    """ZeRO / FSDP settings; the fields of `shardwright.OptimizerParallel`."""

    level: Literal["level1", "level2", "level3"] = "level1"
    shard_size: int = -1
    threshold: Annotated[int, Field(ge=0)] = 64


class RecomputeSection(Section, frozen=True):
    """Activation checkpointing; the arguments of `shardwright.recompute`.

    `modules`: paths of modules. `blocks`: indices of transformer blocks, counted from 0; without
    either, every block. `operators`: operator types to recompute (selective recomputation), by
    default all; or a mapping from types to the indices of their blocks. `whole_blocks`: indices of
    blocks that are recomputed fully despite `operators`.
    `recompute: auto` instead of a section recomputes as much as the memory limit requires.
    """

    # `recompute: auto` is read as `recompute: {auto: true}`.
    auto: bool = False
    modules: list[str] | None = None
    blocks: list[Annotated[int, Field(ge=0)]] | None = None
    whole_blocks: list[Annotated[int, Field(ge=0)]] = []
    operators: list[str] | dict[str, list[Annotated[int, Field(ge=0)]]] | None = None
    communication: bool = True

    @model_validator(mode="before")
    @classmethod
    def _expand_auto_recompute(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _check_recompute_keys(self) -> Self:
        others = (n for n, f in type(self).model_fields.items() if getattr(self, n) != f.default)
        if self.auto and set(others) != {"auto"}:
            raise ValueError("`auto: true` conflicts with the other keys of `recompute`; remove it")
        if self.modules is not None and (self.blocks is not None or self.whole_blocks):
            raise ValueError("`modules` conflicts with `blocks` and `whole_blocks`; remove one")
        has_paths = self.modules is not None or self.blocks is not None
        if isinstance(self.operators, dict) and has_paths:
            raise ValueError(
                "the blocks of each operator type are in `operators`; remove `modules` and `blocks`"
            )
        return self


class ParallelSection(Section, FileOptions, frozen=True):
    """Parallelism and planner options.

    Inherits the options of `shardwright.plan` as keys, with their names and defaults. Declares only
    keys that `shardwright.plan` does not have, or for which it takes another type.
    """

    mode: str = PlanOptions.mode
    cluster: str | None = None
    compute_dtype: str | None = None
    strategies: str | None = None
    expert: ExpertSection | None = None
    hsdp: OptimizerParallelSection | None = None
    recompute: RecomputeSection | None = None
    save_strategies: str | None = None

    # Before pydantic checks the type, so that the message lists the valid values.
    @field_validator("mode", *requirements(FileOptions), mode="before")
    @classmethod
    def _check_planner_option(cls, value: Any, info: ValidationInfo) -> Any:
        # Not of `FileOptions`, which has no requirement for `mode`.
        requirement = requirements(PlanOptions)[str(info.field_name)]
        if not requirement.accepts(value):
            raise _make_option_error(requirement.valid_values)
        return value

    @property
    def recomputes_as_needed(self) -> bool:
        """Whether the planner chooses the recomputed modules such that the memory limit holds."""
        return self.recompute is not None and self.recompute.auto

    def check_devices(self, devices: int) -> None:
        """Raise ConfigError if the degrees of `expert` do not multiply to `devices`."""
        if self.expert is None or not isinstance(self.stages, int):
            return
        # Not `expert_parallel`: its devices are among those of the other degrees.
        degrees = {
            "data_parallel": self.expert.data_parallel,
            "model_parallel": self.expert.model_parallel,
            "context_parallel": self.expert.context_parallel,
            "stages": self.stages,
        }
        product = prod(degrees.values())
        if product != devices:
            factors = " · ".join(f"{name} {degree}" for name, degree in degrees.items())
            raise ConfigError(
                f"parallel.expert: {factors} = {product}, but there are {devices} devices\n"
                f"use {product} devices, or degrees whose product is {devices}"
            )

    @model_validator(mode="after")
    def _check_expert_keys(self) -> Self:
        if self.expert is not None and self.mode != "semi_auto":
            raise ValueError(f"`expert` conflicts with `mode: {self.mode}`; set `mode: semi_auto`")
        if self.expert is not None and self.strategies is not None:
            raise ValueError("the keys `expert` and `strategies` conflict; remove one of them")
        if self.expert is not None and self.stages == "auto":
            raise ValueError(
                "`expert` conflicts with `stages: auto`; set a number of stages, for example"
                " `stages: 2`"
            )
        if self.suggest_stages and (self.stages == "auto" or self.expert is not None):
            conflict = "stages: auto" if self.stages == "auto" else "expert"
            raise ValueError(
                f"the key `suggest_stages` conflicts with `{conflict}`; remove one of the two"
            )
        return self


class CheckpointSection(Section, frozen=True):
    """Checkpoint folder, interval in steps, and number of checkpoints to keep."""

    folder: str = "checkpoints"
    every: Count = 100
    keep: Count = 3
    # `async` is a keyword of Python.
    asynchronous: bool = Field(default=False, alias="async")


class EvaluationSection(Section, frozen=True):
    """Evaluation data, interval in steps, and number of batches, by default all.

    The data is loaded like the training data, but from `path`, or with `arguments` for a target.
    """

    path: str | None = None
    arguments: dict[str, Any] = {}
    every: Count = 100
    batches: Count | None = None


class TrainSection(Section, frozen=True):
    """Length, precision, logging and checkpoints of a training run."""

    epochs: Count = 1
    steps: Count | None = None
    log_every: Count = 100
    log_to: list[Literal["tensorboard", "wandb"]] = []
    evaluation: EvaluationSection | None = None
    seed: Seed = 1
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    device: Literal["auto", "cpu"] = "auto"
    checkpoint: CheckpointSection | None = None
    resume: bool = False
    load: str | None = None
    # PyTorch counts the nanoseconds of a timeout in 64 bits. 10 minutes is its default for NCCL.
    timeout_seconds: Annotated[float, Field(gt=0, le=1e9)] = 600.0
    non_finite: Literal["stop", "skip"] = "stop"


class Config(Section, frozen=True):
    """The root of a configuration file, with one field per section."""

    model: ModelSection
    loss: Literal["cross_entropy", "mae", "mse", "none"] | None = None
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    train: TrainSection = TrainSection()

    @property
    def loss_name(self) -> str:
        """Name of the loss to add to the model, by default cross entropy.

        The default is `none` for a language model, which computes its own loss.
        """
        return self.loss or ("none" if self.model.is_language_model else "cross_entropy")

    @model_validator(mode="after")
    def _check_evaluation_data(self) -> Self:
        evaluation = self.train.evaluation
        if evaluation is not None:
            key = "arguments" if self.data.target is not None else "path"
            if not getattr(evaluation, key):
                raise ValueError(f"`train.evaluation` has no data; set its key `{key}`")
            try:
                # Built only to run the checks of its section.
                _ = self.evaluation_data
            except ValidationError as error:
                raise ValueError(f"train.evaluation: {_get_first_error_message(error)}") from None
        return self

    @property
    def evaluation_data(self) -> DataSection:
        """Section `data` of the evaluation; the key `train.evaluation` must be set."""
        assert self.train.evaluation is not None
        changes = self.train.evaluation.model_dump(include={"path", "arguments"})
        # Built anew, so that the checks of the section run on the changed keys.
        return DataSection(**{**self.data.model_dump(), **changes})

    @model_validator(mode="after")
    def _check_keys_match_model(self) -> Self:
        if self.model.is_language_model and self.loss_name != "none":
            raise ValueError("a language model computes its own loss; remove the key `loss`")
        if self.parallel.expert is not None and not self.model.is_language_model:
            raise ValueError(
                "`parallel.expert` needs a language model; remove it, or set `model.name`"
            )
        recompute = self.parallel.recompute
        # Without `modules`, blocks are recomputed by index, which only language models have.
        names_blocks = recompute is not None and not recompute.auto and recompute.modules is None
        if names_blocks and not self.model.is_language_model:
            raise ValueError(
                "`parallel.recompute` needs module paths if `model.target` is set; set for example"
                " `modules: [encoder]`"
            )
        return self
