"""Build the model, data and optimizer of a configuration."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.core.constraints.recompute import recompute
from shardwright.core.cost.optimizer_state import OPTIMIZERS
from shardwright.core.runtime.muon_adamw import MuonAdamW, table_shapes
from shardwright.core.torch_internals.operators import has_kernel
from shardwright.errors import ConfigError, DataError, ShardwrightError
from shardwright.models import Dimensions, LoRA, PrefixTuning, build, build_hf, dimensions
from shardwright.models.expert_sharding import paths_of_blocks
from shardwright.models.hf_causal_lm import hf_compute_dtype, hf_config
from shardwright.models.sizes import COMPUTE_DTYPES
from shardwright.run.config import schema
from shardwright.run.data.data import DIGITS_SIZE, Batches, Samples, digits, mnist, packed_text
from shardwright.run.data.token_files import token_sequences
from shardwright.run.loop.lr_schedule import LRSchedule

Returned = TypeVar("Returned")


def build_model(model: schema.ModelSection, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Build the model of the `model` section.

    Args:
        folder: the folder to which paths of the section are relative.

    Raises:
        ConfigError: if a target does not return a module, or the name, sizes or arguments of the
            model are invalid.
    """
    if model.target is not None:
        net = call_target("model.target", model.target, model.arguments, folder)
        if not isinstance(net, nn.Module):
            returned = type(net).__name__
            raise ConfigError(
                f"model.target: {model.target} returned a {returned}, not an nn.Module\n"
                "return the model from this callable"
            )
        return net.to(dtype)
    # `build` takes these arguments too, but each has a configuration key of its own.
    keys = ("dtype", "train.dtype"), ("lora", "model.lora"), ("prefix", "model.prefix")
    for name, key in keys:
        if name in model.arguments:
            raise ConfigError(f"model.arguments.{name}: not supported\nset the key `{key}` instead")
    lora = None if model.lora is None else LoRA(**model.lora.model_dump())
    options = {**model.arguments, "dtype": dtype, "lora": lora}
    if model.hf is not None:
        is_path = isinstance(model.hf, str)
        # Only a path is relative to the folder; a mapping has arguments of `AutoConfig.for_model`.
        source = folder / model.hf if is_path else model.hf  # type: ignore[operator]
        return _call_with_key_in_errors("model", build_hf, source, **options)
    if model.prefix is not None:
        options["prefix"] = PrefixTuning(**model.prefix.model_dump())
    if model.sizes is not None:
        sizes = _call_with_key_in_errors("model.sizes", Dimensions, **model.sizes)
        return _call_with_key_in_errors("model", build, sizes, **options)
    return _call_with_key_in_errors("model", build, model.name, **options)


def compute_dtype_of(model: schema.ModelSection, folder: Path) -> str | None:
    """Return the compute dtype in the published configuration of a model; None if it has none.

    Raises:
        ConfigError: if the configuration of `hf` does not exist.
    """
    if model.name is not None:
        return COMPUTE_DTYPES.get(model.name)
    # Neither sizes nor a target are a published configuration.
    if model.hf is None:
        return None
    source = folder / model.hf if isinstance(model.hf, str) else model.hf
    return _call_with_key_in_errors("model", hf_compute_dtype, source)


@contextmanager
def wrap_errors(key: str, error_type: type[ShardwrightError]) -> Iterator[None]:
    """Context that re-raises third-party exceptions as `error_type`, with key, file and line.

    Args:
        key: the configuration key that the code inside the context handles.

    Raises:
        error_type: if an exception other than a `ShardwrightError` was raised.
    """
    try:
        yield
    except ShardwrightError:
        raise
    except Exception as error:
        # The innermost frame, where the user's code or a library has raised the error.
        last = traceback.extract_tb(error.__traceback__)[-1]
        # PyTorch appends its C++ stack trace to messages, after these words.
        message, _, _ = str(error).partition("Exception raised from")
        reason = " ".join(message.split()) or "no message"
        source_line = f"{Path(last.filename).name}:{last.lineno}"
        raise error_type(f"{key}: {type(error).__name__}: {reason} ({source_line})") from error


@contextmanager
def naming_file(file: str) -> Iterator[None]:
    """Context that prefixes the message of a ConfigError with the file name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _call_with_key_in_errors(
    key: str, function: Callable[..., Returned], *args: Any, **kwargs: Any
) -> Returned:
    """Call `function`, and convert its errors to a ConfigError that starts with the key.

    Raises:
        ConfigError: if `function` does not take these arguments, or rejects a value.
    """
    # Bound first, to distinguish wrong arguments from a TypeError inside the function.
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        # The keys of `model.sizes` are themselves the arguments; other models have a key for them.
        arguments_key = f"{key}.arguments" if key == "model" else key
        raise ConfigError(f"{arguments_key}: {error}") from None
    with wrap_errors(key, ConfigError):
        # `wrap_errors` passes a ConfigError on unchanged, so its key is added here.
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None


def mark_recomputed(net: nn.Module, section: schema.RecomputeSection) -> None:
    """Mark the modules to be recomputed in the backward pass (activation checkpointing).

    Raises:
        ConfigError: if a module path or a block index does not exist in the model.
    """
    modules = dict(net.named_modules())
    for path, op_types in _collect_recomputed_op_types(net, section).items():
        if path not in modules:
            # A cutoff of 0 always gives a suggestion.
            close_matches = get_close_matches(path, modules, n=1, cutoff=0.0)
            raise ConfigError(
                f"parallel.recompute.modules: the model has no module {path!r}\n"
                f"did you mean {close_matches[0]!r}?"
            )
        recompute(modules[path], section.communication, operators=op_types)


def _collect_recomputed_op_types(
    net: nn.Module, section: schema.RecomputeSection
) -> dict[str, list[str] | None]:
    """Return the operator types to recompute in each module, by path; None for all types."""
    if section.modules is not None:
        # The schema refuses a mapping of operators together with `modules`.
        assert not isinstance(section.operators, dict)
        return dict.fromkeys(section.modules, section.operators)
    blocks = list(paths_of_blocks(net))
    if not blocks:
        raise ConfigError(
            "parallel.recompute: the model has no transformer blocks\n"
            "set the key `modules` to paths of modules, for example `modules: [encoder]`"
        )
    types_of_block = _collect_op_types_by_block(section, len(blocks))
    # Checked here, not in the schema, which does not know the number of blocks.
    if (last := max((*types_of_block, *section.whole_blocks), default=0)) >= len(blocks):
        raise ConfigError(
            f"parallel.recompute: the model has no block {last}\n"
            f"use block indices from 0 to {len(blocks) - 1}"
        )
    op_types = {blocks[index]: types for index, types in types_of_block.items()}
    # Fully recomputed blocks win where a block is in both lists.
    return op_types | dict.fromkeys(blocks[index] for index in section.whole_blocks)


def _collect_op_types_by_block(
    section: schema.RecomputeSection, num_blocks: int
) -> dict[int, list[str] | None]:
    """Return the operator types to recompute in each block, by block index; None for all types."""
    if not isinstance(section.operators, dict):
        indices = range(num_blocks) if section.blocks is None else section.blocks
        return dict.fromkeys(indices, section.operators)
    # From the blocks of each type to the types of each block.
    op_types: dict[int, list[str] | None] = {}
    for op_type, indices_of_type in section.operators.items():
        for index in indices_of_type:
            op_types[index] = [*(op_types.get(index) or []), op_type]
    return op_types


def load_batches(
    data: schema.DataSection, model: schema.ModelSection, folder: Path, dtype: torch.dtype
) -> Batches:
    """Load the dataset as batches.

    Args:
        data, model: sections of the configuration.
        folder: the folder to which paths of the sections are relative.
        dtype: dtype to which floating-point tensors are cast.

    Raises:
        ConfigError: if a target does not return a tuple of tensors.
        DataError: if the data is missing or damaged, or does not fill one batch.
    """
    cast = tuple(
        # Integers are class labels or token ids.
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in load_samples(data, model, folder)
    )
    return Batches(cast, data.batch_size, data.seed)


def load_samples(
    data: schema.DataSection, model: schema.ModelSection, folder: Path
) -> tuple[Samples, ...]:
    """Load the dataset as tensors with samples on dimension 0.

    Token files are memory-mapped; token ids are checked only when a batch is read.

    Args:
        data, model: sections of the configuration.
        folder: the folder to which paths of the sections are relative.

    Raises:
        ConfigError: if a target does not return a tuple of tensors.
        DataError: if the data is missing or damaged, or the text has a token id outside the model's
            vocabulary.
    """
    if data.target is not None:
        tensors = call_target("data.target", data.target, data.arguments, folder)
        if not isinstance(tensors, tuple) or not all(isinstance(t, Tensor) for t in tensors):
            raise ConfigError(
                f"data.target: {data.target} returned a {type(tensors).__name__}, not a tuple of"
                " tensors\nreturn tensors with samples on dimension 0, such as (images, labels)"
            )
        return tensors
    path = folder / Path(data.path).expanduser() if data.path is not None else None
    with wrap_errors("data", DataError):
        if data.name == "mnist":
            return mnist(path)
        # Without a length of sequences, the dataset is the digits, which are the default.
        if data.seq_length is None:
            return digits(data.image_size or DIGITS_SIZE)
        vocab_size = _get_vocab_size(model, folder)
        if data.name == "tokens":
            assert path is not None
            return token_sequences(path, data.seq_length, vocab_size, data.dtype)
        tokenizer = folder / data.tokenizer if data.tokenizer is not None else None
        tokens = packed_text(data.seq_length, path, tokenizer)
        _check_token_ids(tokens[0], vocab_size)
        return tokens


def _get_vocab_size(model: schema.ModelSection, folder: Path) -> int | None:
    """Return the vocabulary size of a language model; None for a model built by `model.target`."""
    if model.target is not None:
        return None
    if model.hf is not None:
        config = hf_config(folder / model.hf if isinstance(model.hf, str) else model.hf)
        # In a multimodal model, the text model has the vocabulary.
        vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    else:
        vocab_size = (
            model.sizes.get("vocab_size") if model.sizes else dimensions(str(model.name)).vocab_size
        )
    return vocab_size if isinstance(vocab_size, int) else None


def _check_token_ids(tokens: Tensor, vocab_size: int | None) -> None:
    highest = int(tokens.max())
    if vocab_size is not None and highest >= vocab_size:
        raise DataError(
            f"the text has token id {highest}, but the model's `vocab_size` is {vocab_size}\nset"
            f" `vocab_size` to at least {highest + 1}, or use a tokenizer with fewer tokens"
        )


def build_optimizer(section: schema.OptimizerSection, net: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer for all parameters that require gradients."""
    options: dict[str, Any] = {"lr": section.learning_rate}
    for name in ("momentum", "weight_decay", "betas", "eps"):
        value = getattr(section, name)
        # An omitted key leaves PyTorch's default, which differs between optimizers.
        if value is not None:
            options[name] = tuple(value) if name == "betas" else value
    constructor = OPTIMIZERS[section.name].constructor
    # MuonAdamW recognizes output heads by the shape that they share with embeddings.
    if constructor is MuonAdamW:
        options["tables"] = table_shapes(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    options |= _choose_fused_kernel_option(constructor, trained)
    if section.decay_vectors:
        return constructor(trained, **options)
    # Every rank creates both parameter groups, even if its stage has no parameter for one:
    # checkpoints store groups by index.
    decayed = {"params": [p for p in trained if p.ndim > 1]}
    # Biases and weights of normalization layers are vectors.
    not_decayed = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
    return constructor([decayed, not_decayed], **options)


def _choose_fused_kernel_option(
    constructor: Callable[..., torch.optim.Optimizer], parameters: Sequence[Tensor]
) -> dict[str, bool]:
    """Return the option `fused=True` if all parameters' devices have a fused optimizer kernel.

    PyTorch's default AdamW reads and writes memory three times as often, and takes 2.8 times as
    long on an H100 (docs/versions.md).
    """
    kernel = f"aten::_fused_{constructor.__name__.lower()}_"
    # The CPU is added so that a rank whose stage has no parameters decides like the others.
    device_types = {"cpu", *(p.device.type for p in parameters)}
    # The meta device has kernels too, but PyTorch refuses its parameters.
    if "meta" in device_types or not all(p.is_floating_point() for p in parameters):
        return {}
    covered = all(has_kernel(kernel, device_type) for device_type in device_types)
    return {"fused": True} if covered else {}


def build_schedule(section: schema.OptimizerSection) -> LRSchedule | None:
    """Build the learning rate schedule; None for a constant rate."""
    if section.schedule is None:
        return None
    return LRSchedule(peak=section.learning_rate, **section.schedule.model_dump())


def call_target(key: str, target: str, arguments: Mapping[str, Any], folder: Path) -> Any:
    """Import `target`, call it with `arguments`, and return its result.

    Args:
        key: configuration key of `target`, such as `model.target`, for error messages.
        target: `package.module:callable`.
        folder: the configuration's folder; its modules take precedence over installed ones.

    Raises:
        ConfigError: if the module or attribute does not exist, is not callable, or does not take
            `arguments`.
    """
    with wrap_errors(key, ConfigError):
        function = _import_target(key, target, folder)
        # Raises an error for some built-in classes, which have no signature.
        signature = inspect.signature(function)
    # Bound first, to distinguish wrong arguments from a TypeError inside the function.
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {target}{signature} cannot be called: {error}\n"
            f"set `{key.replace('target', 'arguments')}` to the arguments of that signature"
        ) from None
    with wrap_errors(key, ConfigError):
        return function(**arguments)


def _import_target(key: str, target: str, folder: Path) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    import_path = str(folder.resolve())
    if import_path not in sys.path:
        sys.path.insert(0, import_path)
    try:
        target_object: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Re-raised if the target module exists, but something that it imports does not.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{key}: no module {error.name!r} in {folder} or among the installed packages\n"
            "set it to `package.module:callable`, with a module of that folder or of a package"
        ) from None
    # The path may have several parts, such as a class method: `models:Model.small`.
    for name in attribute.split("."):
        if not hasattr(target_object, name):
            close_matches = difflib.get_close_matches(name, dir(target_object), n=1)
            hint = f"; did you mean {close_matches[0]}?" if close_matches else ""
            raise ConfigError(
                f"{key}: module {module_name} has no attribute {attribute}{hint}\n"
                "set it to `package.module:callable`, for example `models:MyModel`"
            )
        target_object = getattr(target_object, name)
    if not callable(target_object):
        raise ConfigError(
            f"{key}: {target} is {target_object!r}, which is not callable\n"
            "set it to the name of a function or class, such as `models:MyModel`"
        )
    return target_object  # type: ignore[no-any-return]
