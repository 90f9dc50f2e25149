"""A model's `state_dict` as one file, as one device writes and reads it."""

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
from shardwright.train.checkpoint import held_once
from shardwright.train.parameter_names import saved_names

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def save_state_dict(net: nn.Module, path: str | Path) -> None:
    """Write the whole model to one file, which a model on one device can load.

    Every rank calls it. The ranks write their shards to a folder beside `path`; rank 0 joins them:
    in a `.safetensors` file tensor by tensor, for `.pt`, `.pth` and `.bin`, which `torch.save`
    writes, with the whole model in its memory. Of tied tensors a `.safetensors` file holds the
    first, as the format demands.

    Raises:
        CheckpointError: `path` has another suffix, or a dtype that its format does not have.
    """
    path = _known(Path(path))
    tensors = checkpoint_state.model_tensors(net)
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        _write(net, path, lambda name: tensors[f"{checkpoint_state.MODEL}.{name}"])
        return
    shards = path.with_name(f"{path.name}.shards")
    if dist.get_rank() == 0:
        shutil.rmtree(shards, ignore_errors=True)
    dist.barrier()
    state_dict_saver.save(dict(held_once(tensors)), storage_writer=FileSystemWriter(shards))
    if dist.get_rank() == 0:
        reader = FileSystemReader(shards)
        like = checkpoint_state.original_module(net).state_dict()

        def read(name: str) -> Tensor:
            key, whole = (
                f"{checkpoint_state.MODEL}.{name}",
                torch.empty_like(like[name], device="cpu"),
            )
            state_dict_loader.load({key: whole}, storage_reader=reader, no_dist=True)
            return whole

        _write(net, path, read)
        shutil.rmtree(shards)
    dist.barrier()


def load_state_dict(net: nn.Module, path: str | Path) -> None:
    """Give `net` the values in a file that one device wrote, or in all `.safetensors` files of a
    folder. Every rank calls it, and reads only what it holds. Into a model with adapters a file of
    the model without them is read too; its adapters then stay as they are.

    Raises:
        CheckpointError: there is no such file, its suffix is not known, or it is of another model;
            names the first parameter that differs.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [_known(path)]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"{path}: no such file, nor a folder of .safetensors files")
    given = {name: value for file in files for name, value in _read(file).items()}
    shapes = {name: value.shape for name, value in given.items()}
    names = saved_names(net, shapes, str(path), new_adapters=True)
    with torch.no_grad():
        for key, tensor in checkpoint_state.model_tensors(net).items():
            name = key.removeprefix(f"{checkpoint_state.MODEL}.")
            if name in names:
                _copy_held(given[names[name]], tensor)


def _copy_held(whole: Tensor, tensor: Tensor) -> None:
    """Copy the part of `whole` that this rank holds."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    for chunk in held_chunks(tensor):
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        part = whole[tuple(slice(start, start + size) for start, size in ends)]
        tensor.to_local().copy_(part)


def _write(net: nn.Module, path: Path, tensor: Callable[[str], Tensor]) -> None:
    """Under another name first, so that what has the name is whole."""
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
        whole = {name: tensor(name).cpu() for name in dict.fromkeys(first.values())}
        torch.save({name: whole[first[name]] for name in like}, partial)
    partial.replace(path)


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{file}: not a state_dict, tensors by name")
    return content


def _known(path: Path) -> Path:
    if path.suffix not in SUFFIXES:
        raise CheckpointError(
            f"{path}: the suffix says the format; valid are {', '.join(SUFFIXES)}"
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
    """Write a file of the tensors that are named in `like` and have its shapes and dtypes; each is
    asked for by its name when it is written.

    Raises:
        CheckpointError: a dtype that the format does not have.
    """
    header, end = {}, 0
    for name, value in like.items():
        if value.dtype not in NAMES:
            raise CheckpointError(f"{path}: safetensors files cannot hold {name!r}, {value.dtype}")
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
            whole = tensor(name).detach().cpu().contiguous()
            file.write(whole.reshape(-1).view(torch.uint8).numpy().data)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory: bytes are read when they are used.

    Raises:
        CheckpointError: the file is not in this format, or has a dtype that is not known.
    """
    try:
        content = np.memmap(path, np.uint8, "c")
        (length,) = struct.unpack("<Q", content[:8].tobytes())
        header = json.loads(content[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        return {name: _tensor(content[8 + length :], entry) for name, entry in header.items()}
    except (struct.error, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file that can be read: {error}") from None


def _tensor(content: NDArray[np.uint8], entry: dict[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    return torch.from_numpy(content[start:end]).view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
