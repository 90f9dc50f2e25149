"""The model, data and optimizer that a configuration describes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.core.constraints.recompute import recompute
from shardwright.core.cost.optimizer_state import OPTIMIZERS
from shardwright.errors import ConfigError, DataError, ShardwrightError
from shardwright.models import Dimensions, LoRA, PrefixTuning, build, build_hf, dimensions
from shardwright.models.expert_sharding import paths_of_blocks
from shardwright.models.hf_causal_lm import hf_compute_dtype, hf_config
from shardwright.models.sizes import COMPUTE_DTYPES
from shardwright.run.config import schema
from shardwright.run.data.data import DIGITS_SIZE, Samples, digits, mnist, packed_text
from shardwright.run.data.token_files import token_sequences
from shardwright.run.loop.lr_schedule import LRSchedule

Built = TypeVar("Built")


def build_model(model: schema.ModelSection, folder: Path, dtype: torch.dtype) -> nn.Module:
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
    keys = ("dtype", "train.dtype"), ("lora", "model.lora"), ("prefix", "model.prefix")
    for name, key in keys:
        if name in model.arguments:
            raise ConfigError(f"model.arguments.{name}: use the key {key} instead")
    lora = None if model.lora is None else LoRA(**model.lora.model_dump())
    options = {**model.arguments, "dtype": dtype, "lora": lora}
    if model.hf is not None:
        inside = isinstance(model.hf, str)
        source = folder / model.hf if inside else model.hf  # type: ignore[operator]
        return _called("model", build_hf, source, **options)
    if model.prefix is not None:
        options["prefix"] = PrefixTuning(**model.prefix.model_dump())
    if model.sizes is not None:
        sizes = _called("model.sizes", Dimensions, **model.sizes)
        return _called("model", build, sizes, **options)
    return _called("model", build, model.name, **options)


def compute_dtype_of(model: schema.ModelSection, folder: Path) -> str | None:
    """The dtype in which a published model is computed, as its configuration says; None where
    nothing says so.

    Raises:
        ConfigError: the configuration of `hf` does not exist.
    """
    if model.name is not None:
        return COMPUTE_DTYPES.get(model.name)
    if model.hf is None:
        return None
    source = folder / model.hf if isinstance(model.hf, str) else model.hf
    return _called("model", hf_compute_dtype, source)


@contextmanager
def errors_of(key: str, kind: type[ShardwrightError]) -> Iterator[None]:
    """What the code of others raises on the values of `key`, as one error with the place in it.

    Raises:
        kind: anything but a `ShardwrightError` was raised.
    """
    try:
        yield
    except ShardwrightError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        # PyTorch adds the stack of its own C++ code.
        message, _, _ = str(error).partition("Exception raised from")
        text = " ".join(message.split()) or "no message"
        place = f"{Path(last.filename).name}:{last.lineno}"
        raise kind(f"{key}: {type(error).__name__}: {text} ({place})") from error


def _called(key: str, function: Callable[..., Built], *args: Any, **kwargs: Any) -> Built:
    """Raises: ConfigError: arguments that the function does not take, or values that cannot be."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        place = f"{key}.arguments" if key == "model" else key
        raise ConfigError(f"{place}: {error}") from None
    with errors_of(key, ConfigError):
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None


def mark_recomputed(net: nn.Module, chosen: schema.RecomputeSection) -> None:
    """Marks what is recomputed in the backward pass.

    Raises:
        ConfigError: the model has no such module, or no blocks.
    """
    modules = dict(net.named_modules())
    for path, kinds in _recomputed(net, chosen).items():
        if path not in modules:
            near = get_close_matches(path, modules, n=1, cutoff=0.0)
            raise ConfigError(
                f"parallel.recompute.modules: the model has no module {path!r};"
                f" nearest is {near[0]}"
            )
        recompute(modules[path], chosen.communication, operators=kinds)


def _recomputed(net: nn.Module, chosen: schema.RecomputeSection) -> dict[str, list[str] | None]:
    """The kinds of operators that are recomputed in each module, None for all."""
    if chosen.modules is not None:
        return dict.fromkeys(chosen.modules, chosen.operators)
    blocks = list(paths_of_blocks(net))
    if not blocks:
        raise ConfigError("parallel.recompute: the model has no blocks: set the key modules")
    numbers = range(len(blocks)) if chosen.blocks is None else chosen.blocks
    if (last := max((*numbers, *chosen.whole_blocks), default=0)) >= len(blocks):
        raise ConfigError(
            f"parallel.recompute: there is no block {last}; valid are 0 to {len(blocks) - 1}"
        )
    kinds = dict.fromkeys((blocks[number] for number in numbers), chosen.operators)
    return kinds | dict.fromkeys(blocks[number] for number in chosen.whole_blocks)


def load_samples(
    data: schema.DataSection, model: schema.ModelSection, folder: Path
) -> tuple[Samples, ...]:
    """The data, samples on dimension 0; `folder` is what its paths are relative to.

    Raises:
        ConfigError: a target that returns no tensors.
        DataError: data that is missing or damaged, or a text with a token beyond the vocabulary of
            the model, where its size is known; of files of tokens, when that is read.
    """
    if data.target is not None:
        tensors = call_target("data.target", data.target, data.arguments, folder)
        if not isinstance(tensors, tuple) or not all(isinstance(t, Tensor) for t in tensors):
            raise ConfigError(f"data.target: {data.target} must return a tuple of tensors")
        return tensors
    path = folder / Path(data.path).expanduser() if data.path is not None else None
    with errors_of("data", DataError):
        if data.name == "mnist":
            return mnist(path)
        if data.seq_length is None:
            return digits(data.image_size or DIGITS_SIZE)
        size = _vocab_size(model, folder)
        if data.name == "tokens":
            assert path is not None
            return token_sequences(path, data.seq_length, size, data.dtype)
        tokenizer = folder / data.tokenizer if data.tokenizer is not None else None
        tokens = packed_text(data.seq_length, path, tokenizer)
        _check_tokens(tokens[0], size)
        return tokens


def _vocab_size(model: schema.ModelSection, folder: Path) -> int | None:
    """The number of tokens that a model knows; None for a target."""
    if model.target is not None:
        return None
    if model.hf is not None:
        config = hf_config(folder / model.hf if isinstance(model.hf, str) else model.hf)
        size = getattr(config.get_text_config(), "vocab_size", None)
    else:
        size = (
            model.sizes.get("vocab_size") if model.sizes else dimensions(str(model.name)).vocab_size
        )
    return size if isinstance(size, int) else None


def _check_tokens(tokens: Tensor, size: int | None) -> None:
    highest = int(tokens.max())
    if size is not None and highest >= size:
        raise DataError(
            f"the text has token {highest}, but the model's vocab_size is {size}: set"
            f" vocab_size to at least {highest + 1}, or use a tokenizer with fewer tokens"
        )


def build_optimizer(
    chosen: schema.OptimizerSection, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained."""
    options: dict[str, Any] = {"lr": chosen.learning_rate}
    for name in ("momentum", "weight_decay", "betas", "eps"):
        value = getattr(chosen, name)
        if value is not None:
            options[name] = tuple(value) if name == "betas" else value
    constructor = OPTIMIZERS[chosen.name].constructor
    trained = [p for p in parameters if p.requires_grad]
    if chosen.decay_vectors:
        return constructor(trained, **options)
    # Both groups are on every rank, also where a stage has nothing for one of them.
    decayed = {"params": [p for p in trained if p.ndim > 1]}
    others = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
    return constructor([decayed, others], **options)


def build_schedule(chosen: schema.OptimizerSection) -> LRSchedule | None:
    """The schedule of the learning rate; None for a constant one."""
    if chosen.schedule is None:
        return None
    return LRSchedule(peak=chosen.learning_rate, **chosen.schedule.model_dump())


def call_target(key: str, target: str, arguments: Mapping[str, Any], folder: Path) -> Any:
    """Import `target`, call it with `arguments` and return what it returns.

    Args:
        key: where the configuration names the target, for messages.
        folder: the configuration's folder; its modules come before those installed.

    Raises:
        ConfigError: no such module or attribute, not callable, or it does not take `arguments`.
    """
    with errors_of(key, ConfigError):
        function = _import(key, target, folder)
        signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key}: {target}{signature} cannot be called: {error}") from None
    with errors_of(key, ConfigError):
        return function(**arguments)


def _import(key: str, target: str, folder: Path) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
    try:
        target_object: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module is there: something that it imports is not.
        raise ConfigError(
            f"{key}: no module {error.name} in {folder} nor among the installed packages"
        ) from None
    for name in attribute.split("."):
        if not hasattr(target_object, name):
            near = difflib.get_close_matches(name, dir(target_object), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{key}: module {module_name} has no {attribute}{hint}")
        target_object = getattr(target_object, name)
    if not callable(target_object):
        raise ConfigError(f"{key}: {target} is {target_object!r}, which cannot be called")
    return target_object  # type: ignore[no-any-return]
