"""A model's `state_dict` as a single file that one device can load: safetensors or `torch.save`."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from shardwright.core.checkpoint import state as checkpoint_state
from shardwright.core.checkpoint.parameter_names import match_saved_names
from shardwright.core.checkpoint.storage import CheckpointReader
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.core.runtime.dtensor import own_tensor
from shardwright.core.torch_internals.dtensor import own_part
from shardwright.errors import CheckpointError

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def save_state_dict(net: nn.Module, path: str | Path) -> None:
    """Write the whole model to a single file, which a model on one device can load.

    Every rank must call it. The ranks write their shards to a folder next to `path`, and rank 0
    merges them, without the whole model in its memory, into a `.safetensors` file or one of
    `torch.save` (`.pt`, `.pth` or `.bin`). A `.safetensors` file has only the first of tied
    tensors, as the format requires.

    Raises:
        CheckpointError: if `path` has another suffix, or the format does not support a tensor.
    """
    path = _check_suffix(Path(path))
    tensors = checkpoint_state.model_tensors(net)
    if not _is_distributed(net, tensors):
        _write(net, path, lambda name: tensors[f"{checkpoint_state.MODEL}.{name}"])
        return
    shards = path.with_name(f"{path.name}.shards")
    if dist.get_rank() == 0:
        shutil.rmtree(shards, ignore_errors=True)
    dist.barrier()
    state_dict_saver.save(
        dict(checkpoint_state.drop_tied_duplicates(tensors)),
        storage_writer=FileSystemWriter(shards),
    )
    if dist.get_rank() == 0:
        reader = CheckpointReader(shards)
        like = checkpoint_state.original_module(net).state_dict()

        def read(name: str) -> Tensor:
            tensor = _in_file(shards / f"{name}.whole", like[name])
            places = {f"{checkpoint_state.MODEL}.{name}": tensor}
            state_dict_loader.load(places, storage_reader=reader, no_dist=True)
            return tensor

        _write(net, path, read)
        shutil.rmtree(shards)
    dist.barrier()


def _is_distributed(net: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Whether this rank lacks values of the model: it has shards, or a pipeline stage."""
    planned = wrapped_model(net)
    stages = planned.execution.devices.stages if isinstance(planned, ParallelModule) else 1
    return stages > 1 or any(isinstance(tensor, DTensor) for tensor in tensors.values())


def load_state_dict(net: nn.Module, path: str | Path) -> None:
    """Load a `state_dict` file, or all `.safetensors` files of a folder, into `net`.

    Every rank must call it, and reads only its own shards. A model with LoRA adapters also accepts
    a file without them, and keeps its adapters.

    Raises:
        CheckpointError: if the file does not exist, is damaged, has an unknown suffix, or belongs
            to another model; the message names the first parameter that differs.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [_check_suffix(path)]
    if not files and any(path.glob("*.bin")):
        raise CheckpointError(
            f"{path} has only .bin files: write it with `save_pretrained` of transformers again, "
            "which makes .safetensors files of which each rank reads its part"
        )
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"{path}: no such file or folder with .safetensors files")
    for file in (*_files_of_index(path), *_numbered_like(files)):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, which the other files of the folder name")
    saved = {name: value for file in files for name, value in _read(file).items()}
    shapes = {name: value.shape for name, value in saved.items()}
    names = match_saved_names(net, shapes, str(path), new_adapters=True)
    with torch.no_grad():
        for key, tensor in checkpoint_state.model_tensors(net).items():
            name = key.removeprefix(f"{checkpoint_state.MODEL}.")
            if name in names:
                own_tensor(tensor).copy_(own_part(saved[names[name]], tensor))


def _files_of_index(folder: Path) -> list[Path]:
    """The files that the index of a folder names, if it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of tensors: {error}") from None
    return [folder / str(name) for name in sorted(names, key=str)]


def _numbered_like(files: Sequence[Path]) -> Iterator[Path]:
    """All files that there are if one is named as the first of several (`-00001-of-00006`)."""
    for file in files:
        if match := re.fullmatch(r"(.*-)(\d+)-of-(\d+)", file.stem):
            name, digits, count = match.groups()
            for number in range(1, int(count) + 1):
                yield file.with_stem(f"{name}{number:0{len(digits)}}-of-{count}")


def _in_file(path: Path, like: Tensor) -> Tensor:
    """A tensor on the CPU whose memory is a new file, which the system can write out."""
    if like.numel() == 0:
        return torch.empty_like(like, device="cpu")
    flat = torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype)
    return flat.view(like.shape)


def _write(net: nn.Module, path: Path, tensor: Callable[[str], Tensor]) -> None:
    """Writes to a temporary file and renames it, so that `path` is always complete."""
    first = checkpoint_state.first_names(net)
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor(name).detach().cpu() for name in dict.fromkeys(first.values())}
    if path.suffix == ".safetensors":
        _save_safetensors(tensors, partial, path)
    else:
        torch.save({name: tensors[first[name]] for name in first}, partial)
    partial.replace(path)


def _save_safetensors(tensors: Mapping[str, Tensor], partial: Path, path: Path) -> None:
    """The format has no views: a tensor that shares memory with others is copied."""
    try:
        own = {
            name: tensor.contiguous()
            if tensor.untyped_storage().nbytes() == tensor.nbytes
            else tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        save_file(own, partial, metadata={"format": "pt"})
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not possible as safetensors: {error}") from None


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, memory-mapped, so that bytes are read when they are used."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        mapped = zipfile.is_zipfile(file)
        content = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:  # Damaged files can raise anything.
        reason = str(error).partition("\n")[0] or type(error).__name__
        kind = file.suffix.removeprefix(".")
        raise CheckpointError(f"{file}: cannot be read as {kind}: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{file}: not a state_dict (a dict from names to tensors)")
    return content


def _check_suffix(path: Path) -> Path:
    if path.suffix not in SUFFIXES:
        raise CheckpointError(
            f"{path}: unknown suffix {path.suffix!r}; valid are {', '.join(SUFFIXES)}"
        )
    return path
