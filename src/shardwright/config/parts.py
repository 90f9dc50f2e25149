"""The model, data and optimizer that a configuration describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.config import schema
from shardwright.config.target import call_target
from shardwright.errors import ConfigError, DataError
from shardwright.models import Dimensions, LoRA, build, build_hf, dimensions
from shardwright.models.expert import paths_of_blocks
from shardwright.recompute import recompute
from shardwright.train.data import DIGITS_SIZE, digits, mnist
from shardwright.train.schedule import Schedule
from shardwright.train.text import packed_text

Made = TypeVar("Made")


def made_model(model: schema.Model, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model that is described; `folder` is what its paths are relative to.

    Raises:
        ConfigError: a target that returns no module, an unknown model, sizes or arguments.
    """
    if model.target is not None:
        net = call_target("model.target", model.target, model.arguments, folder)
        if not isinstance(net, nn.Module):
            kind = type(net).__name__
            raise ConfigError(f"model.target: {model.target} returned a {kind}, not an nn.Module")
        return net.to(dtype)
    for name, key in (("dtype", "train.dtype"), ("lora", "model.lora")):
        if name in model.arguments:
            raise ConfigError(f"model.arguments.{name}: give the key {key} instead")
    options = {**model.arguments, "dtype": dtype, "lora": _lora(model.lora)}
    if model.hf is not None:
        inside = isinstance(model.hf, str)
        source = folder / model.hf if inside else model.hf  # type: ignore[operator]
        return _called("model", build_hf, source, **options)
    if model.sizes is not None:
        sizes = _called("model.sizes", Dimensions, **model.sizes)
        return _called("model", build, sizes, **options)
    return _called("model", build, model.name, **options)


def _lora(lora: schema.Lora | None) -> LoRA | None:
    return None if lora is None else LoRA(**lora.model_dump())


def _called(key: str, function: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
    """Raises: ConfigError: arguments that the function does not take, or values that cannot be."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        place = f"{key}.arguments" if key == "model" else key
        raise ConfigError(f"{place}: {error}") from None
    try:
        return function(*args, **kwargs)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def mark_recomputed(net: nn.Module, chosen: schema.Recompute) -> None:
    """Marks what is computed again in the backward pass.

    Raises:
        ConfigError: the model has no such module, or no blocks.
    """
    modules = dict(net.named_modules())
    paths = list(paths_of_blocks(net)) if chosen.modules is None else chosen.modules
    if not paths:
        raise ConfigError("parallel.recompute: the model has no blocks: give the key modules")
    for path in paths:
        if path not in modules:
            near = get_close_matches(path, modules, n=1, cutoff=0.0)
            raise ConfigError(
                f"parallel.recompute.modules: the model has no module {path!r};"
                f" nearest is {near[0]}"
            )
        recompute(modules[path], chosen.communication, operators=chosen.operators)


def made_tensors(data: schema.Data, folder: Path) -> tuple[Tensor, ...]:
    """The data, samples on dimension 0; `folder` is what its paths are relative to.

    Raises:
        ConfigError: a target that returns no tensors.
        DataError: data that is missing or damaged.
    """
    if data.target is not None:
        tensors = call_target("data.target", data.target, data.arguments, folder)
        if not isinstance(tensors, tuple) or not all(isinstance(t, Tensor) for t in tensors):
            raise ConfigError(f"data.target: {data.target} did not return a tuple of tensors")
        return tensors
    path = folder / data.path if data.path is not None else None
    if data.name == "mnist":
        return mnist(path)
    if data.seq_length is not None:
        tokenizer = folder / data.tokenizer if data.tokenizer is not None else None
        return packed_text(data.seq_length, path, tokenizer)
    return digits(data.image_size or DIGITS_SIZE)


def check_tokens(tokens: Tensor, model: schema.Model) -> None:
    """Raises: DataError: a token that the model has no embedding of, as far as its size is said."""
    known = model.sizes or (model.hf if isinstance(model.hf, dict) else {})
    size = known.get("vocab_size") if model.name is None else dimensions(model.name).vocab_size
    highest = int(tokens.max())
    if isinstance(size, int) and highest >= size:
        raise DataError(
            f"the text holds token {highest}, but the model's vocab_size is {size}: give a"
            f" vocab_size of at least {highest + 1}, or a tokenizer of fewer tokens"
        )


def made_optimizer(
    chosen: schema.Optimizer, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained."""
    given: dict[str, Any] = {"lr": chosen.learning_rate}
    for name in ("momentum", "weight_decay", "betas", "eps"):
        value = getattr(chosen, name)
        if value is not None:
            given[name] = tuple(value) if name == "betas" else value
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "momentum": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return kinds[chosen.name]([p for p in parameters if p.requires_grad], **given)


def made_schedule(chosen: schema.Optimizer) -> Schedule | None:
    """How the learning rate goes; None where it stays."""
    if chosen.schedule is None:
        return None
    return Schedule(peak=chosen.learning_rate, **chosen.schedule.model_dump())
