"""Write checkpoint files with checksums, and read checkpoint files without unpickling code.

A checkpoint is written under a temporary name and renamed once every rank has written, so that a
folder `step-N` is always complete.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwright.core.checkpoint.manifest import INFO_FILE, CheckpointInfo, FileChecksum
from shardwright.core.torch_internals.checkpoint_metadata import METADATA_FILE, loads_metadata
from shardwright.errors import DamagedCheckpointError

FOLDER_NAME = re.compile(r"step-(\d+)")


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints in `folder`, in ascending order."""
    matches = (FOLDER_NAME.fullmatch(path.name) for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


class CheckpointReader(FileSystemReader):
    """DCP reader that reads tensors only, as DCP unpickles other entries, which can run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint's tensors.

        Raises:
            DamagedCheckpointError: if the metadata is malformed, or refers to code.
        """
        path = Path(self.path) / METADATA_FILE
        try:
            metadata = loads_metadata(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(
                f"{path} cannot be read: {error}\nload an earlier checkpoint of the folder"
            ) from None
        metadata.state_dict_metadata = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class PublishingWriter(FileSystemWriter):
    """DCP writer to a folder with a temporary name, which is renamed once all ranks have written.

    Args:
        folder: the folder `step-N` of the checkpoint.
        info: the contents of `checkpoint.json`, to which the checksums are added.
        keep: number of newest checkpoints to keep; None for all.
    """

    def __init__(self, folder: Path, info: CheckpointInfo, keep: int | None) -> None:
        super().__init__(folder.with_name(f"{folder.name}.partial"))
        self.fs = self._files = _ChecksumFileSystem()
        self._folder, self._info, self._keep = folder, info, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the shards of this rank, and add the checksums of its files to the first result.

        DCP gathers the results on the coordinator, so that checksums need no further communication.
        """
        results = super().write_data(plan, planner).wait()
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
        files = dict(self._files.checksums)
        for result in (result for rank_results in results for result in rank_results):
            if isinstance(result, _ChecksumResult):
                files |= result.checksums
        partial = Path(self.path)
        with (partial / INFO_FILE).open("w", encoding="utf-8") as file:
            file.write(replace(self._info, files=files).to_json())
            file.flush()
            os.fsync(file.fileno())
        _remove_checkpoint(self._folder)
        partial.rename(self._folder)
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
    """DCP save planner for one real rank among fake ranks, which does not check that the shards of
    each tensor are complete."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


@dataclass(frozen=True)
class _ChecksumResult(WriteResult):
    """DCP's result of writing one tensor, with the checksums of all files of the rank."""

    checksums: dict[str, FileChecksum]


class _ChecksumFileSystem(FileSystem):
    """DCP file system that computes the checksums of files while writing."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            written = _ChecksumStream(cast("io.BufferedWriter", stream))
            yield written
        self.checksums[Path(path).name] = FileChecksum(written.size, written.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _ChecksumStream(io.BufferedIOBase):
    """Output stream that counts the bytes and computes their CRC-32."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self.size, self.crc32 = file, 0, 0

    def write(self, content: Any) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        count = self._file.write(content)
        self.size += count
        return count

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()


def clear_leftovers(folder: Path) -> None:
    """Remove incomplete checkpoints of crashed runs from the folder of a run."""
    for pattern in ("step-*.partial", "step-*.removed"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)


def _remove_checkpoint(folder: Path) -> None:
    """Rename a checkpoint, then remove it, so that it never looks complete after a crash."""
    if folder.exists():
        removed = folder.with_name(f"{folder.name}.removed")
        folder.rename(removed)
        shutil.rmtree(removed)
