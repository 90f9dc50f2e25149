"""A model's `state_dict` as a single file that one device can load: safetensors or `torch.save`."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

from shardwright.errors import CheckpointError
from shardwright.torch_internals.dtensor import held_chunks
from shardwright.train import checkpoint_state
from shardwright.train.parameter_names import match_saved_names

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def save_state_dict(net: nn.Module, path: str | Path) -> None:
    """Write the whole model to a single file, which a model on one device can load.

    Every rank must call it. The ranks write their shards to a folder next to `path`, and rank 0
    merges them: tensor by tensor into a `.safetensors` file, or with the whole model in memory into
    a `torch.save` file (`.pt`, `.pth` or `.bin`). A `.safetensors` file has only the first of tied
    tensors, as the format requires.

    Raises:
        CheckpointError: if `path` has another suffix, or the format does not support a dtype.
    """
    path = _check_suffix(Path(path))
    tensors = checkpoint_state.model_tensors(net)
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
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
        reader = FileSystemReader(shards)
        like = checkpoint_state.original_module(net).state_dict()

        def read(name: str) -> Tensor:
            key, tensor = (
                f"{checkpoint_state.MODEL}.{name}",
                torch.empty_like(like[name], device="cpu"),
            )
            state_dict_loader.load({key: tensor}, storage_reader=reader, no_dist=True)
            return tensor

        _write(net, path, read)
        shutil.rmtree(shards)
    dist.barrier()


def load_state_dict(net: nn.Module, path: str | Path) -> None:
    """Load a `state_dict` file, or all `.safetensors` files of a folder, into `net`.

    Every rank must call it, and reads only its own shards. A model with LoRA adapters also accepts
    a file without them, and keeps its adapters.

    Raises:
        CheckpointError: if the file does not exist, has an unknown suffix, or belongs to another
            model; the message names the first parameter that differs.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [_check_suffix(path)]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"{path}: no such file or folder with .safetensors files")
    saved = {name: value for file in files for name, value in _read(file).items()}
    shapes = {name: value.shape for name, value in saved.items()}
    names = match_saved_names(net, shapes, str(path), new_adapters=True)
    with torch.no_grad():
        for key, tensor in checkpoint_state.model_tensors(net).items():
            name = key.removeprefix(f"{checkpoint_state.MODEL}.")
            if name in names:
                _copy_shard(saved[names[name]], tensor)


def _copy_shard(full: Tensor, tensor: Tensor) -> None:
    """Copies this rank's shard of `full` into `tensor`."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(full)
        return
    for chunk in held_chunks(tensor):
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        block = full[tuple(slice(start, start + size) for start, size in ends)]
        tensor.to_local().copy_(block)


def _write(net: nn.Module, path: Path, tensor: Callable[[str], Tensor]) -> None:
    """Writes to a temporary file and renames it, so that `path` is always complete."""
    first, like = (
        checkpoint_state.first_names(net),
        checkpoint_state.original_module(net).state_dict(),
    )
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        once = {name: value for name, value in like.items() if first[name] == name}
        write_safetensors(partial, once, tensor)
    else:
        tensors = {name: tensor(name).cpu() for name in dict.fromkeys(first.values())}
        torch.save({name: tensors[first[name]] for name in like}, partial)
    partial.replace(path)


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{file}: not a state_dict (a dict from names to tensors)")
    return content


def _check_suffix(path: Path) -> Path:
    if path.suffix not in SUFFIXES:
        raise CheckpointError(
            f"{path}: unknown suffix {path.suffix!r}; valid are {', '.join(SUFFIXES)}"
        )
    return path


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    path: Path, like: Mapping[str, Tensor], tensor: Callable[[str], Tensor]
) -> None:
    """Write a safetensors file, one tensor at a time.

    Args:
        like: the names, shapes and dtypes of the tensors.
        tensor: returns a tensor by name; called when the tensor is written.

    Raises:
        CheckpointError: if the format does not support a dtype.
    """
    header, end = {}, 0
    for name, value in like.items():
        if value.dtype not in NAMES:
            raise CheckpointError(
                f"{path}: safetensors does not support the dtype {value.dtype} of {name!r}"
            )
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in like:
            data = tensor(name).detach().cpu().contiguous()
            file.write(data.reshape(-1).view(torch.uint8).numpy().data)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, memory-mapped, so that bytes are read when they are used.

    Raises:
        CheckpointError: if the file is malformed, or has an unknown dtype.
    """
    try:
        content = np.memmap(path, np.uint8, "c")
        (length,) = struct.unpack("<Q", content[:8].tobytes())
        header = json.loads(content[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        return {name: _tensor(content[8 + length :], entry) for name, entry in header.items()}
    except (struct.error, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not a valid safetensors file: {error}") from None


def _tensor(content: NDArray[np.uint8], entry: dict[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    return torch.from_numpy(content[start:end]).view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
