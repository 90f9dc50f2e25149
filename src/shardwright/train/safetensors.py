"""Files in the safetensors format, one tensor in memory at a time.

The format (https://huggingface.co/docs/safetensors): the length of the header as a little-endian
64-bit integer; the header, JSON with dtype, shape and place of each tensor; the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.errors import CheckpointError

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


def write(path: Path, like: Mapping[str, Tensor], tensor: Callable[[str], Tensor]) -> None:
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


def read(path: Path) -> dict[str, Tensor]:
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
