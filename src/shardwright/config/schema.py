"""The keys of a configuration file, their types and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0)]
# "package.module:callable", imported from the configuration's folder first.
Target = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]


class Section(BaseModel):
    """Types are taken literally: no text for a number, no key that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Section):
    """What is trained: `target` is called with `arguments` and returns an `nn.Module`."""

    target: Target
    arguments: dict[str, Any] = {}


class Data(Section):
    """What it is trained on. With a `target`, that is called with `arguments` and returns a tuple
    of tensors with the samples on dimension 0."""

    name: Literal["digits", "mnist"] | None = None
    target: Target | None = None
    arguments: dict[str, Any] = {}
    path: str | None = None
    image_size: Annotated[int, Field(ge=8)] | None = None
    batch_size: Count = 32
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.name is not None and self.target is not None:
            raise ValueError("give either name or target, not both")
        if self.arguments and self.target is None:
            raise ValueError("arguments are for a target, and there is none")
        if self.path is not None and self.name != "mnist":
            raise ValueError("path is for name: mnist only")
        if self.image_size is not None and (self.name == "mnist" or self.target is not None):
            raise ValueError("image_size is for name: digits only")
        return self


class Optimizer(Section):
    """Which optimizer, with what rates; a key that is left out has torch's default."""

    name: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"
    learning_rate: Positive = 0.001
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: NotNegative | None = None

    @model_validator(mode="after")
    def _momentum_where_used(self) -> Self:
        if self.name == "momentum" and self.momentum is None:
            raise ValueError("name: momentum needs the key momentum, for example 0.9")
        if self.name != "momentum" and self.momentum is not None:
            raise ValueError(f"the key momentum is for name: momentum, not {self.name}")
        return self


class Parallel(Section):
    """How the plan is searched; the arguments of `shardwright.plan`."""

    mode: Literal[
        "recursive_programming", "sharding_propagation", "semi_auto", "data_parallel", "stand_alone"
    ] = "recursive_programming"
    strategies: str | None = None
    mem_coeff: Positive = 0.1
    cost_model: Literal["symbolic"] = "symbolic"
    order: Literal["weight", "topology"] = "weight"
    log_costs: bool = False


class Checkpoint(Section):
    """Where, after how many steps each, and how many checkpoints of the run are kept."""

    folder: str = "checkpoints"
    every: Count = 100
    keep: Count = 3
    asynchronous: bool = Field(default=False, alias="async")


class Train(Section):
    """How long, in what precision, what is reported, and what is kept against faults."""

    epochs: Count = 1
    steps: Count | None = None
    log_every: Count = 100
    seed: Seed = 1
    dtype: Literal["float32", "float64"] = "float32"
    checkpoint: Checkpoint | None = None
    resume: bool = False
    timeout_seconds: Positive = 600.0


class Config(Section):
    """A whole configuration file."""

    model: Model
    loss: Literal["cross_entropy", "mae", "mse", "none"] = "cross_entropy"
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    train: Train = Train()
