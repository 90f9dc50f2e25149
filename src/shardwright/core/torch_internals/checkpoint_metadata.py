"""Read the pickled metadata of torch.distributed.checkpoint (DCP) as data, without calling it.

The unpickler supports only the opcodes that DCP writes. It fills a `_PickledObject` where `pickle`
would create or change an object, so an untrusted file cannot run code or change classes of this
process. The `_PickledObject`s are then converted to DCP's classes, field by field.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from math import prod
from pickle import _Unpickler
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA_FILE = ".metadata"

# Python 3.13 pickles paths as objects of `pathlib._local`.
_MODULES = ("torch", "torch.serialization", "pathlib", "pathlib._local")
_DCP_MODULE = "torch.distributed.checkpoint."
_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
    *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo"),
    *("_get_layout", "Size", "PosixPath", "WindowsPath"),
)
"""Names of the classes that `.metadata` files may refer to, besides dtypes."""

_MAX_NUMBER = 2**63
"""Exclusive upper bound of sizes, offsets and lengths, which PyTorch stores in 64 bits."""

FieldT = TypeVar("FieldT")


class _PickledObject:
    """An object in a pickle as data: the name of its class, constructor arguments and state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.args: Any = ()
        self.state: Any = None


def loads_metadata(content: bytes) -> Metadata:
    """Read the metadata of tensors, and the locations of their chunks, from a `.metadata` file.

    Args:
        content: the bytes of the file.

    Returns:
        DCP's metadata, without entries that are not tensors.

    Raises:
        ValueError: if the bytes are malformed, or refer to an object that DCP does not write:
            unpickling other objects could run code.
    """
    try:
        root = _DataUnpickler(io.BytesIO(content)).load()
    except (KeyError, IndexError, EOFError):
        # An opcode outside of `_dispatch` is a KeyError, an empty stack an IndexError.
        raise ValueError(
            "the metadata is not a pickle that DCP has written: copy the checkpoint again"
        ) from None
    except Exception as error:  # malformed bytes may cause any error
        raise ValueError(str(error) or type(error).__name__) from error
    if not isinstance(root, _PickledObject) or root.name != "Metadata":
        name = root.name if isinstance(root, _PickledObject) else type(root).__name__
        raise ValueError(
            f"the file contains a {name}, not the metadata of a checkpoint: copy the checkpoint"
            " again"
        )
    entries, storage = (
        _get_required_field(root, name, dict) for name in ("state_dict_metadata", "storage_data")
    )
    tensors: dict[str, Any] = {}
    chunk_ids: set[int] = set()
    for key, entry in entries.items():
        # Other entries are of objects that DCP has pickled, which are not loaded.
        if _require_type(entry, _PickledObject).name != "TensorStorageMetadata":
            continue
        tensors[_require_type(key, str)] = _convert_tensor_metadata(entry, chunk_ids)
    return Metadata(tensors, storage_data=_convert_chunk_locations(storage, tensors))


def _convert_chunk_locations(
    storage: Mapping[Any, Any], tensors: Mapping[str, TensorStorageMetadata]
) -> dict[MetadataIndex, _StorageInfo]:
    """Return the file, offset and length of each chunk of `tensors`.

    Args:
        storage: the unpickled `storage_data` of the metadata.
        tensors: the metadata of each tensor, by name.
    """
    converted: dict[MetadataIndex, _StorageInfo] = {}
    for key, info in storage.items():
        name = _get_required_field(_require_type(key, _PickledObject), "fqn", str)
        if name not in tensors:
            continue
        # pickle leaves out fields that are None.
        offset, number = (_get_field_or_none(key, field) for field in ("offset", "index"))
        index = MetadataIndex(
            name,
            None if offset is None else _convert_torch_size(offset),
            None if number is None else _require_size_or_position(number),
        )
        if _get_field_or_none(info, "transform_descriptors"):
            raise ValueError(
                f"tensor {name!r} is compressed, which is not supported: save the checkpoint"
                " without compression"
            )
        start, length = (
            _require_size_or_position(_get_required_field(info, field, int))
            for field in ("offset", "length")
        )
        converted[index] = _StorageInfo(
            _get_required_field(info, "relative_path", str), start, length
        )
    return converted


def _convert_tensor_metadata(entry: _PickledObject, chunk_ids: set[int]) -> TensorStorageMetadata:
    """Convert the unpickled metadata of one tensor to DCP's class.

    Args:
        entry: the unpickled `TensorStorageMetadata`.
        chunk_ids: ids of the chunks of earlier tensors, to which the ids of this tensor's chunks
            are added.
    """
    state = _require_type(_get_required_field(entry, "properties", _PickledObject).state, tuple)
    chunks = _get_required_field(entry, "chunks", list)
    known_chunks = len(chunk_ids)
    chunk_ids.update(map(id, chunks))
    # Many references to one chunk take a byte or two each in the file, and a kilobyte in memory.
    if len(chunk_ids) != known_chunks + len(chunks) or not state:
        raise ValueError(
            "the table of tensors in the metadata is malformed: copy the checkpoint again"
        )
    return TensorStorageMetadata(
        # `TensorProperties` is pickled as a tuple, with the dtype first.
        TensorProperties(_require_type(state[0], torch.dtype)),
        _convert_torch_size(_get_required_field(entry, "size", _PickledObject)),
        [
            ChunkStorageMetadata(
                *(
                    _convert_torch_size(_get_required_field(chunk, name, _PickledObject))
                    for name in ("offsets", "sizes")
                )
            )
            for chunk in chunks
        ],
    )


def _convert_torch_size(record: object) -> torch.Size:
    record = _require_type(record, _PickledObject)
    sizes = record.args[0] if record.name == "Size" and len(record.args) == 1 else None
    numbers = [_require_size_or_position(size) for size in _require_type(sizes, tuple)]
    # Tensors with a size of 0 have no elements, however large their other sizes are.
    _require_size_or_position(prod(size for size in numbers if size))
    return torch.Size(numbers)


def _require_size_or_position(value: object) -> int:
    # Exact, as True and False are ints.
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError(
            f"the metadata has {value!r:.40} in place of a size or position: copy the checkpoint"
            " again"
        )
    return value


def _require_type(value: object, expected: type[FieldT]) -> FieldT:
    if not isinstance(value, expected):
        raise ValueError(
            f"the metadata has a {type(value).__name__} in place of a {expected.__name__}: copy"
            " the checkpoint again"
        )
    return value


def _get_field_or_none(record: object, name: str) -> Any:
    state = _require_type(record, _PickledObject).state
    # A dataclass without fields that are set has no state; one with slots has a pair.
    return state.get(name) if isinstance(state, dict) else None


def _get_required_field(record: object, name: str, expected: type[FieldT]) -> FieldT:
    value = _get_field_or_none(record, name)
    if not isinstance(value, expected):
        raise ValueError(
            f"field `{name}` of the metadata is not a {expected.__name__.strip('_')}: copy the"
            " checkpoint again"
        )
    return value


class _DataUnpickler(_Unpickler):
    """Unpickler that fills `_PickledObject`s instead of creating objects.

    Derived from Python's unpickler, not the one in C: that allocates memory up to the largest memo
    index of a file, and hashes keys of any depth.
    """

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _CLASSES and (module in _MODULES or module.startswith(_DCP_MODULE)):
            return _PickledObject(name)
        raise pickle.UnpicklingError(
            f"the metadata refers to {module}.{name}, which could run code: only load checkpoints"
            " that DCP or Shardwright has written"
        )

    def load_call(self) -> None:
        # For NEWOBJ and REDUCE, which both have the arguments above a class or function on the
        # stack.
        args, reference = self.stack.pop(), self.stack.pop()
        record = _PickledObject(_require_type(reference, _PickledObject).name)
        record.args = _require_type(args, tuple)
        self.stack.append(record)

    def load_build(self) -> None:
        # The object stays on the stack, below its state.
        state = self.stack.pop()
        _require_type(self.stack[-1], _PickledObject).state = state

    def load_setitems(self) -> None:
        items: list[Any] = self.pop_mark()  # type: ignore[attr-defined]
        mapping = _require_type(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a tuple recurses, so that a deep one would overflow the stack.
            if not isinstance(key, str | _PickledObject):
                raise pickle.UnpicklingError(
                    f"a table of the metadata has a key of type {type(key).__name__}: copy the"
                    " checkpoint again"
                )
            mapping[key] = value

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        mapping = _require_type(self.stack[-1], dict)
        mapping[key if isinstance(key, _PickledObject) else _require_type(key, str)] = value


_PLAIN_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.STACK_GLOBAL, pickle.NONE),
    *(pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
)
_dispatch: dict[int, Callable[[Any], None]] = {
    **{opcode[0]: _Unpickler.dispatch[opcode[0]] for opcode in _PLAIN_OPCODES},
    pickle.NEWOBJ[0]: _DataUnpickler.load_call,
    pickle.REDUCE[0]: _DataUnpickler.load_call,
    pickle.BUILD[0]: _DataUnpickler.load_build,
    pickle.SETITEM[0]: _DataUnpickler.load_setitem,
    pickle.SETITEMS[0]: _DataUnpickler.load_setitems,
}
# An opcode that is missing here is refused, as the unpickler looks all of them up in this table.
_DataUnpickler.dispatch = _dispatch
