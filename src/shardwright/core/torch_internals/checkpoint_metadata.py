"""Load the pickled metadata of torch.distributed.checkpoint without running code."""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

METADATA_FILE = ".metadata"

_ALLOWED_CLASSES = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
    *(TensorProperties, TensorStorageMetadata, _MEM_FORMAT_ENCODING, _StorageInfo, _get_layout),
)
_ALLOWED_OBJECTS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    **{(each.__module__, each.__qualname__): each for each in _ALLOWED_CLASSES},
    # Metadata has the path of the checkpoint; some Python versions define it in `pathlib._local`.
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): PureWindowsPath for module in ("pathlib", "pathlib._local")},
}
"""Objects that `.metadata` files may refer to besides dtypes, by (module, name)."""


def loads_metadata(content: bytes) -> Metadata:
    """Unpickle the content of a `.metadata` file.

    Raises:
        ValueError: if the bytes are malformed, or refer to an object that is neither in
            `_ALLOWED_OBJECTS` nor a dtype: unpickling other objects could run code.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # malformed bytes may cause any error
        raise ValueError(str(error) or type(error).__name__) from error
    tables = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(metadata, Metadata) or not all(isinstance(each, dict) for each in tables):
        raise ValueError(
            f"the file contains a {type(metadata).__name__}, not the metadata of a checkpoint"
        )
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED_OBJECTS:
            raise pickle.UnpicklingError(
                f"the file refers to {module}.{name}, which the metadata of a checkpoint never"
                " contains and which could run code"
            )
        return _ALLOWED_OBJECTS[module, name]
