"""Checkpoints as a stranger could plant them: each is complete, and its checksums are right."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PosixPath, PurePosixPath
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import shardwright as sw
from benchmarks.bit_flips import RAW, REFUSED, SILENT
from shardwright.core.checkpoint.manifest import INFO_FILE, CheckpointInfo, FileChecksum

METADATA, DATA = ".metadata", "__0_0.distcp"
SECONDS = 20
"""Limit of one load, which takes less than one: a pipe would make it wait forever."""


def _sets_attributes(target: type, **attributes: object) -> bytes:
    """A pickle that sets attributes of a class, and then is a string."""
    text = b"\x80\x04" + _global(target) + b"N" + pickle.dumps(attributes, 4)[2:-1]
    return text + b"\x86b0\x8c\x01x."


def _global(target: type) -> bytes:
    words = (target.__module__, target.__qualname__)
    return b"".join(b"\x8c" + bytes([len(w)]) + w.encode() for w in words) + b"\x93"


def _moved(relative_path: str) -> Callable[[Path], None]:
    """The bytes of all tensors are in another file."""

    def change(folder: Path) -> None:
        _change_metadata(
            folder,
            lambda metadata: [
                setattr(info, "relative_path", relative_path.format(folder=folder))
                for info in metadata.storage_data.values()
            ],
        )

    return change


def _change_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata, 4))


def _resized(size: int) -> Callable[[Path], None]:
    """A state of the optimizer is so large."""

    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["optimizer.0.bias.exp_avg"]
        entry.size = torch.Size([size])

    return lambda folder: _change_metadata(folder, change)


def _written(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / METADATA).write_bytes(content) and None


def _replaced(file: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Another kind of thing has the name of a file."""

    def change(folder: Path) -> None:
        path = folder / file
        path.replace(folder.parent / f"outside-{file}")
        make(path)

    return change


def _link(path: Path) -> None:
    path.symlink_to(path.parent.parent / f"outside-{path.name}")


def _deep(folder: Path) -> None:
    (folder / METADATA).write_bytes(b"\x80\x04})" + b"\x85" * 5_000_000 + b"Ns.")


def _names_outside(folder: Path) -> None:
    """The manifest lists a file outside."""
    outside = folder.parent / "outside"
    outside.write_bytes(b"secret")
    info = CheckpointInfo.read(folder)
    files = {**info.files, "../outside": FileChecksum(6, zlib.crc32(b"secret"))}
    (folder / INFO_FILE).write_text(replace(info, files=files).to_json())


def _shares_a_list(metadata: Metadata) -> None:
    """Two tensors of which each has the pieces of the other, many times."""
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            entry.chunks = entry.chunks * 10**6


def _first_chunk(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A weight's entry is changed so that some of its elements are in no file."""
    return lambda folder: _change_metadata(
        folder, lambda metadata: change(metadata.state_dict_metadata["model.0.weight"])
    )


ATTACKS: Mapping[str, Callable[[Path], object]] = {
    "attributes of a class": _written(_sets_attributes(PosixPath, __fspath__=None)),
    "attributes of DCP's": _written(_sets_attributes(MetadataIndex, __hash__=None)),
    "attributes of storage": _written(_sets_attributes(_StorageInfo, relative_path="x")),
    "code": _written(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."),
    "a memo of 64 GiB": _written(b"\x80\x04Nr\xff\xff\xff\xff."),
    "a deep key": _deep,
    "the pieces of a tensor, repeated": lambda folder: _change_metadata(folder, _shares_a_list),
    "a path with ..": _moved(f"../outside-{DATA}"),
    "an absolute path": _moved("{folder}/" + DATA),
    "a file that is not in the manifest": _moved("other.distcp"),
    "a tensor of 2^62 elements": _resized(2**62),
    "a tensor of 2^70 elements": _resized(2**70),
    "a negative size": _resized(-1),
    "a tensor without chunks": _first_chunk(lambda entry: entry.chunks.clear()),
    "a chunk of half a tensor": _first_chunk(
        lambda entry: setattr(entry.chunks[0], "sizes", torch.Size([2, 4]))
    ),
    "a chunk twice": _first_chunk(lambda entry: entry.chunks.extend(entry.chunks)),
    "a name in the manifest with ..": _names_outside,
    **{
        f"{what} as {file}": _replaced(file, make)
        for file in (METADATA, DATA, INFO_FILE)
        for what, make in (("link", _link), ("pipe", os.mkfifo), ("folder", Path.mkdir))
    },
}
"""What a stranger does to a complete checkpoint, by name."""


def attack(name: str, folder: Path) -> str:
    """How loading ends after an attack on a checkpoint that is saved in `folder`."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    sw.save_checkpoint(folder, net, optimizer, position=sw.Position(1))
    step = folder / "step-1"
    info = CheckpointInfo.read(step)
    ATTACKS[name](step)
    if (step / INFO_FILE).is_file() and "manifest" not in name:
        files = {file: _checksum(step / file, known) for file, known in info.files.items()}
        (step / INFO_FILE).write_text(replace(info, files=files).to_json())
    try:
        with _Limit():
            sw.load_checkpoint(folder, net, optimizer, step=1)
    except sw.CheckpointError as error:
        end = REFUSED if str(step) in str(error) else RAW
    except BaseException:
        end = RAW
    else:
        end = SILENT
    shutil.rmtree(folder)
    return end if _is_unchanged() else SILENT


def _checksum(path: Path, known: FileChecksum) -> FileChecksum:
    if not path.is_file():
        return known
    content = path.read_bytes()
    return FileChecksum(len(content), zlib.crc32(content))


def _is_unchanged() -> bool:
    """Whether the classes of this process are as they were."""
    return (
        os.fspath(PurePosixPath("a")) == "a"
        and hash(MetadataIndex("a")) == hash(MetadataIndex("a"))
        and not hasattr(_StorageInfo, "relative_path")
    )


class _Limit:
    """Context that raises TimeoutError after `SECONDS`."""

    def __enter__(self) -> None:
        self._handler = signal.signal(signal.SIGALRM, self._stop)
        signal.alarm(SECONDS)

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self._handler)

    @staticmethod
    def _stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError
