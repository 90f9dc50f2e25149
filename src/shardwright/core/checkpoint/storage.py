"""Write checkpoint files with checksums, and read checkpoint files without unpickling code.

A checkpoint is written under a temporary name and renamed once every rank has written, so that a
folder `step-N` is always complete.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.checkpoint.manifest import (
    INFO_FILE,
    CheckpointInfo,
    FileChecksum,
    is_plain_name,
    open_regular_file,
)
from shardwright.core.torch_internals.checkpoint_metadata import METADATA_FILE, loads_metadata
from shardwright.errors import CheckpointError, DamagedCheckpointError

FOLDER_NAME = re.compile("step-(0|[1-9][0-9]*)")
"""Names of the folders of checkpoints, as they are written: no leading zeros, ASCII digits only.

Any other folder, such as `step-007`, is a user's, and could not be found by its step."""

REPLACED = ".replaced"
"""Suffix of the folder of a complete checkpoint while another checkpoint of its step replaces it.
"""


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints in `folder`, in ascending order."""
    names = (path.name.removesuffix(REPLACED) for path in folder.glob("step-*") if path.is_dir())
    # A set, as a step that is saved again has two folders for a moment.
    return sorted({int(match[1]) for match in map(FOLDER_NAME.fullmatch, names) if match})


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of `step` in the folder of a run.

    This is `step-N`, or the renamed earlier checkpoint if a crash interrupted its replacement.
    """
    path = folder / f"step-{step}"
    replaced = path.with_name(path.name + REPLACED)
    return replaced if replaced.is_dir() and not path.is_dir() else path


LEFTOVERS = (".partial", ".removed")
"""Suffixes of checkpoints that are being written or removed."""


class CheckpointReader(FileSystemReader):
    """DCP reader of an untrusted checkpoint: reads only tensors, and only from regular files.

    DCP would unpickle the metadata and other entries, which can run code, and would follow the
    paths in the metadata.

    Args:
        folder: the folder of the checkpoint.
        files: names of the files in its manifest; empty without a manifest.
    """

    def __init__(self, folder: Path, files: Collection[str] = ()) -> None:
        super().__init__(folder)
        # The base class opens the files of tensors through `fs`.
        self.fs, self._names = _RegularFileSystem(), files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint's tensors.

        Raises:
            DamagedCheckpointError: if the metadata is malformed, or refers to code, to a file
                outside the checkpoint, or to bytes that a file does not have.
        """
        path = Path(self.path) / METADATA_FILE
        try:
            with open_regular_file(path) as file:
                metadata = loads_metadata(file.read())
            self._check_tensor_ranges(metadata)
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(
                f"{path} cannot be read: {error}\nload an earlier checkpoint of the folder"
            ) from None
        # As `FileSystemReader.read_metadata`, which this method replaces.
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _check_tensor_ranges(self, metadata: Metadata) -> None:
        """Raise ValueError if a tensor is in no checkpoint file, or beyond the end of its file."""
        sizes = dict[str, int]()
        for index, info in metadata.storage_data.items():
            name = info.relative_path
            # Checkpoints of version 1 have no manifest with names.
            if not is_plain_name(name) or (self._names and name not in self._names):
                raise ValueError(
                    f"tensor {index.fqn!r} is in {name!r}, not in a file of the checkpoint:"
                    " copy the checkpoint again"
                )
            # Once per file, which has many tensors.
            if name not in sizes:
                path = Path(self.path) / name
                # A missing file counts as empty, so that the next check names it.
                sizes[name] = path.lstat().st_size if path.is_file() else 0
            if info.offset + info.length > sizes[name]:
                raise ValueError(
                    f"tensor {index.fqn!r} is beyond the end of {name}: copy the file again"
                )
        # One real rank among fake ranks has saved its own shards only, and reads only these.
        has_all_shards = has_other_ranks() or not dist.is_initialized()
        for key, tensor in metadata.state_dict_metadata.items():
            _check_tensor_chunks(key, tensor, metadata.storage_data)
            if has_all_shards and not _covers_tensor(tensor):
                raise ValueError(
                    f"the chunks of tensor {key!r} do not cover it exactly once: copy the"
                    " checkpoint again"
                )


def _check_tensor_chunks(key: str, tensor: Any, storage: Mapping[MetadataIndex, Any]) -> None:
    """Raise ValueError if a chunk of a tensor is in no file, exceeds the bounds of the tensor, or
    is larger than its range of the file."""
    for chunk in tensor.chunks:
        # DCP identifies the chunks of a tensor by their offsets.
        info = storage.get(MetadataIndex(key, chunk.offsets))
        ranks = {len(chunk.offsets), len(chunk.sizes), len(tensor.size)}
        # Unequal lengths do not raise here: they are refused below, as damage of the checkpoint.
        ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=False))
        if (
            info is None
            or len(ranks) > 1
            # The file also has the header of `torch.save`, so it may be longer but not shorter.
            or chunk.sizes.numel() * tensor.properties.dtype.itemsize > info.length
            or any(end > size for end, size in zip(ends, tensor.size, strict=False))
        ):
            raise ValueError(
                f"the chunks of tensor {key!r} do not match its shape or file: copy the checkpoint"
                " again"
            )


def _covers_tensor(tensor: Any) -> bool:
    """Whether the chunks of a tensor contain each of its elements exactly once.

    DCP ignores missing chunks: their elements would keep old values without an error.
    """
    chunks, size = tensor.chunks, tuple(tensor.size)
    if len(chunks) == 1:
        # Within bounds, so that equal sizes suffice.
        return tuple(chunks[0].sizes) == size
    # A count of chunks per element is determined by its differences along all dimensions, which
    # are ±1 at the corners of each chunk: the sums must be those of a single chunk.
    corners = Counter[tuple[int, ...]]()
    for chunk in chunks:
        _count_chunk_corners(corners, chunk.offsets, chunk.sizes, 1)
    _count_chunk_corners(corners, (0,) * len(size), size, -1)
    return not any(corners.values())


def _count_chunk_corners(
    corners: Counter[tuple[int, ...]], offsets: Sequence[int], sizes: Sequence[int], sign: int
) -> None:
    for ends in itertools.product((0, 1), repeat=len(sizes)):
        corner = tuple(o + e * s for o, e, s in zip(offsets, ends, sizes, strict=True))
        corners[corner] += sign * (-1) ** sum(ends)


class PublishingWriter(FileSystemWriter):
    """DCP writer to a folder with a temporary name, which is renamed once all ranks have written.

    Args:
        folder: the folder `step-N` of the checkpoint.
        info: the contents of `checkpoint.json`, to which the checksums are added.
        keep: number of newest checkpoints to keep; None for all.
    """

    def __init__(self, folder: Path, info: CheckpointInfo, keep: int | None) -> None:
        super().__init__(folder.with_name(f"{folder.name}.partial"))
        self.fs = self._files = ChecksumFileSystem()
        self._folder, self._info, self._keep = folder, info, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the shards of this rank, and add the checksums of its files to the first result.

        DCP gathers the results on the coordinator, so that checksums need no further communication.
        """
        # Complete already: DCP makes the future after it has written.
        results = super().write_data(plan, planner).wait()
        # A rank without results has written no file.
        if results:
            checksums = dict(self._files.checksums)
            results[0] = _ChecksumResult(**vars(results[0]), checksums=checksums)
        written = Future[list[WriteResult]]()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the checksums and rename the folder; called by DCP on the coordinator only, once
        all ranks have written."""
        super().finish(metadata, results)
        # The coordinator's own files, with the metadata that `finish` has just written.
        files = dict(self._files.checksums)
        for result in (result for rank_results in results for result in rank_results):
            if isinstance(result, _ChecksumResult):
                files |= result.checksums
        partial = Path(self.path)
        with (partial / INFO_FILE).open("w", encoding="utf-8") as file:
            file.write(replace(self._info, files=files).to_json())
            file.flush()
            # On the disk before the rename: after a power loss, `step-N` must not have empty files.
            os.fsync(file.fileno())
        replaced = self._folder.with_name(self._folder.name + REPLACED)
        # The earlier checkpoint of this step is removed only once the new one has its name.
        if self._folder.exists():
            self._folder.rename(replaced)
        partial.rename(self._folder)
        _remove_folder(replaced)
        self._remove_old_checkpoints()

    def _remove_old_checkpoints(self) -> None:
        """Remove all but the newest `keep` checkpoints up to the current step.

        Checkpoints of later steps are ignored, as they are damaged, or were saved before the run
        was resumed from an earlier step.
        """
        if self._keep is None:
            return
        current = int(self._folder.name.removeprefix("step-"))
        earlier = [step for step in complete_steps(self._folder.parent) if step <= current]
        for step in earlier[: -self._keep]:
            _remove_checkpoint(self._folder.with_name(f"step-{step}"))


class OneRankPlanner(DefaultSavePlanner):
    """DCP save planner for a rehearsal of one rank: skips the check that the shards of all ranks
    cover each tensor."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


@dataclass(frozen=True)
class _ChecksumResult(WriteResult):
    """DCP's result of writing one tensor, with the checksums of all files of the rank."""

    checksums: dict[str, FileChecksum]


class _RegularFileSystem(FileSystem):
    """DCP file system that opens only regular files: no links, pipes or devices."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open_regular_file(Path(path)) as stream:
            yield stream


class ChecksumFileSystem(FileSystem):
    """DCP file system that computes the checksums of files while writing."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with (
            super().create_stream(path, mode) as stream,
            keep_write_error(cast("io.BufferedWriter", stream)) as written,
        ):
            yield written
        self.checksums[Path(path).name] = FileChecksum(written.size, written.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        # DCP writes the metadata under a temporary name.
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


@contextmanager
def keep_write_error(file: io.BufferedWriter) -> Iterator[_ChecksumStream]:
    """Context that yields an output stream, and raises the OSError of a failed write.

    `torch.save` would replace the OSError by a RuntimeError about positions in the file.
    """
    stream = _ChecksumStream(file)
    try:
        yield stream
    except Exception as error:
        if stream.error is not None and error is not stream.error:
            raise stream.error from error
        raise


class _ChecksumStream(io.BufferedIOBase):
    """Output stream that counts the bytes, computes their CRC-32, and keeps the first error."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self.size, self.crc32 = file, 0, 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        try:
            count = self._file.write(content)
        except OSError as error:
            # The first error is the cause; a later write may fail for another reason.
            self.error = self.error or error
            raise
        self.size += count
        return count

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        # For `os.fsync`: without a descriptor DCP would call `os.sync`, which waits for all file
        # systems.
        return self._file.fileno()

    def flush(self) -> None:
        # `IOBase.__del__` flushes too, perhaps after the file was closed.
        if not self._file.closed:
            self._file.flush()


def clear_leftovers(folder: Path, step: int) -> None:
    """Remove incomplete and replaced checkpoints of crashed runs from the folder of a run.

    Args:
        step: the step whose checkpoint is to be written.

    Raises:
        CheckpointError: if a file has the name of a folder of a checkpoint. Nothing is changed.
    """
    replaced_folders = _checkpoint_folders(folder, REPLACED)
    # From a crash while a checkpoint was written, or while an earlier one was removed.
    leftovers = [each for suffix in LEFTOVERS for each in _checkpoint_folders(folder, suffix)]
    # Before anything is removed or renamed, and before a file could be taken for a checkpoint.
    for path in (folder / f"step-{step}", *replaced_folders, *leftovers):
        # A link without a target does not exist, but would be in the way too.
        if os.path.lexists(path) and not path.is_dir():
            raise CheckpointError(
                f"{path} is not a folder, but has the name of one of a checkpoint\n"
                "move it, or use another folder"
            )
    for replaced in replaced_folders:
        complete = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if complete.exists():
            _remove_folder(replaced)
        else:
            # From a crash before the new checkpoint had the name.
            replaced.rename(complete)
    for leftover in leftovers:
        _remove_folder(leftover)


def _checkpoint_folders(folder: Path, suffix: str) -> list[Path]:
    """Return the paths `step-N<suffix>` in the folder of a run, without other names such as
    `step-final.removed`, which are a user's."""
    paths = folder.glob(f"step-*{suffix}")
    return [path for path in paths if FOLDER_NAME.fullmatch(path.name.removesuffix(suffix))]


def _remove_checkpoint(folder: Path) -> None:
    """Rename a checkpoint, then remove it, so that it never looks complete after a crash."""
    if folder.exists():
        _remove_folder(folder.rename(folder.with_name(f"{folder.name}.removed")))


def _remove_folder(path: Path) -> None:
    """Remove a folder of a checkpoint; remove only the link if `path` is a link to a folder."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
