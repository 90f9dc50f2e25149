"""Save and load a model's full `state_dict` as one file: safetensors or `torch.save`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from shardwright.core.agreement.collective import is_rank_0, value_of_rank, values_of_ranks
from shardwright.core.checkpoint import state as checkpoint_state
from shardwright.core.checkpoint.dcp_errors import convert_errors
from shardwright.core.checkpoint.file_checksum import (
    CheckedFile,
    checksum_file,
    publish_with_checksum,
)
from shardwright.core.checkpoint.manifest import is_plain_name
from shardwright.core.checkpoint.parameter_names import match_saved_names
from shardwright.core.checkpoint.shared_folder import check_shared_folder
from shardwright.core.checkpoint.storage import (
    CheckpointReader,
    ChecksumFileSystem,
    keep_write_error,
)
from shardwright.core.checkpoint.torch_file import (
    read_torch_file,
    unreadable_error,
    unwritable_error,
)
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.core.parallel.uninitialized import allocate_memory
from shardwright.core.runtime.counted_calls import by_all_ranks
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.torch_internals.dtensor import local_part_of
from shardwright.errors import CheckpointError
from shardwright.plain_data import parse_json, short_repr
from shardwright.text_files import partial_file, read_text

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Supported suffixes of files. All but `.safetensors` have the format of `torch.save`."""


def save_state_dict(net: nn.Module, path: str | Path) -> None:
    """Write the full `state_dict` of a model to one file, for loading on one device. Collective.

    Ranks write their shards to a folder next to `path`. Rank 0 merges the shards through
    memory-mapped files, so that the full model need not fit into its memory.

    Args:
        net: the model, parallelized or not.
        path: the file to write. The suffix selects the format: `.safetensors`, or `.pt`, `.pth` or
            `.bin` for `torch.save`. A `.safetensors` file contains each tied tensor once, under its
            first name, as the format does not support shared memory.

    Raises:
        CheckpointError: if `path` has another suffix, folders differ between ranks, or the format
            does not support a tensor.
    """
    path = _require_suffix(Path(path))
    tensors = checkpoint_state.model_tensors(net)
    if not _is_distributed(net, tensors):
        _write_model_file(net, path, lambda name: tensors[f"{checkpoint_state.MODEL}.{name}"])
        return
    _merge_shards(net, path, tensors)


@by_all_ranks("save_state_dict")
def _merge_shards(net: nn.Module, path: Path, tensors: dict[str, Tensor]) -> None:
    check_shared_folder(path.parent)
    shards = path.with_name(f"{path.name}.shards")
    _remove_shards(shards)
    writer = FileSystemWriter(shards)
    writer.fs = ChecksumFileSystem()
    with convert_errors(path):
        # Saved by all ranks, each its shards; replicated ones once.
        state_dict_saver.save(
            dict(checkpoint_state.drop_tied_duplicates(tensors)), storage_writer=writer
        )
    if dist.get_rank() == 0:
        reader = CheckpointReader(shards)
        originals = checkpoint_state.original_module(net).state_dict()

        def read(name: str) -> Tensor:
            tensor = _allocate_memory_mapped_tensor(shards / f"{name}.full", originals[name])
            destination = {f"{checkpoint_state.MODEL}.{name}": tensor}
            state_dict_loader.load(destination, storage_reader=reader, no_dist=True)
            return tensor

        _write_model_file(net, path, read)
        shutil.rmtree(shards)
    # Ranks return only when the file is complete.
    dist.barrier()


def _remove_shards(folder: Path) -> None:
    """Remove shards of an interrupted `save_state_dict` from `folder`. Collective.

    Raises:
        CheckpointError: on all ranks, if `folder` contains anything else.
    """
    foreign = value_of_rank(_find_foreign_file(folder) if is_rank_0() else None)
    if foreign is not None:
        raise CheckpointError(
            f"{foreign} already exists, where `save_state_dict` would write temporary shards\n"
            "move the file, or pass another path"
        )
    if is_rank_0():
        shutil.rmtree(folder, ignore_errors=True)
    # No rank writes its shards before the leftovers are removed.
    dist.barrier()


def _find_foreign_file(folder: Path) -> str | None:
    """Return the path of a user's file that `save_state_dict` could overwrite in `folder`.

    Any file in `folder` that is not a temporary shard is a user's file; `folder` itself if it is
    not a folder. None if temporary shards can be written to `folder`.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return str(folder)
    entries = folder.iterdir() if folder.is_dir() else ()
    return next((str(each) for each in entries if not _SHARD_NAMES.fullmatch(each.name)), None)


_SHARD_NAMES = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|.+\.full", re.DOTALL)
"""Names of files in the folder of shards: files of `torch.distributed.checkpoint`, and files of
full tensors."""


def _is_distributed(net: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a model is sharded or divided into several pipeline stages."""
    planned = wrapped_model(net)
    stages = planned.execution.devices.stages if isinstance(planned, ParallelModule) else 1
    # With several stages a rank may have ordinary tensors only, but it lacks those of other stages.
    return stages > 1 or any(isinstance(tensor, DTensor) for tensor in tensors.values())


def load_state_dict(net: nn.Module, path: str | Path) -> None:
    """Load a `state_dict` file, or all `.safetensors` files of a folder, into a model. Collective.

    Each rank reads its own shards only. LoRA adapters of the model keep their values if the file
    contains no adapters.

    Args:
        net: the model, parallelized or not.
        path: a file, or a folder that `save_pretrained` of transformers has written.

    Raises:
        CheckpointError: if the file does not exist, is damaged, has an unsupported suffix, or
            belongs to another model.
    """
    path = Path(path)
    # Sorted, so that the ranks divide the same list among themselves when they verify files.
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [_require_suffix(path)]
    if not files and any(path.glob("*.bin")):
        raise CheckpointError(
            f"{path} has only .bin files, which every rank would have to read in full\n"
            "convert them with `save_pretrained` of transformers, which writes .safetensors files"
        )
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(
            f"{path}: no such file or folder with .safetensors files\npass a file, or a folder that"
            " `save_pretrained` of transformers has written"
        )
    # Otherwise a folder that was downloaded in part would look like another model.
    # Lazily, as a damaged name may count billions of files, of which the first missing one ends it.
    for file in chain(_list_files_in_index(path), _iterate_numbered_series(files)):
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing, but other files of the folder refer to it\n"
                "copy or download the folder again"
            )
    is_planned = _is_distributed(net, checkpoint_state.model_tensors(net))
    if is_planned:
        _verify_checksums_on_all_ranks(files)
    else:
        _verify_checksums(files)
    # Mapped into memory, not read.
    saved = {name: value for file in files for name, value in _read_tensors(file).items()}
    shapes = {name: value.shape for name, value in saved.items()}
    names = match_saved_names(net, shapes, str(path), new_adapters=True)
    allocate_memory(net)
    with torch.no_grad():
        for key, tensor in checkpoint_state.model_tensors(net).items():
            name = key.removeprefix(f"{checkpoint_state.MODEL}.")
            if name in names:
                # From a mapped file this reads the pages of the shard only.
                detached_local(tensor).copy_(local_part_of(saved[names[name]], tensor))


def _verify_checksums(files: Sequence[Path]) -> None:
    for file in files:
        if (checked := CheckedFile.open(file, CheckpointError)) is not None:
            checked.verify()


@by_all_ranks("load_state_dict")
def _verify_checksums_on_all_ranks(files: Sequence[Path]) -> None:
    """Verify the checksums of files, which are divided among the ranks. Collective.

    Raises:
        CheckpointError: on all ranks, if a file is damaged.
    """
    problem = None
    try:
        _verify_checksums(files[dist.get_rank() :: dist.get_world_size()])
    except CheckpointError as error:
        problem = str(error)
    # Each rank reads its shards of all files, also of those that another rank has verified.
    first = next((each for each in values_of_ranks(problem) if each is not None), None)
    if first is not None:
        raise CheckpointError(first)


def _list_files_in_index(folder: Path) -> list[Path]:
    """Return the files listed in `model.safetensors.index.json`; empty if the folder has no
    index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    content = parse_json(read_text(index, CheckpointError), str(index), CheckpointError)
    try:
        names = set(content["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: invalid index: {error}\ndownload it again") from None
    for name in names:
        # Longer names cannot exist, and would be an error of the system.
        if not isinstance(name, str) or not is_plain_name(name) or len(os.fsencode(name)) > 255:
            raise CheckpointError(
                f"{index}: {short_repr(name)} is not the name of a file\ndownload it again"
            )
    return [folder / name for name in sorted(names)]


def _iterate_numbered_series(files: Sequence[Path]) -> Iterator[Path]:
    """Yield all files of each numbered series of `files`, such as `-00001-of-00006`."""
    # Each series once, not once for each of its files.
    series = dict[tuple[str, int, str], Path]()
    for file in files:
        if match := re.fullmatch(r"(.*-)([0-9]+)-of-([0-9]+)", file.stem):
            name, digits, count = match.groups()
            series.setdefault((name, len(digits), count), file)
    for (name, width, count), file in series.items():
        for number in range(1, int(count) + 1):
            yield file.with_stem(f"{name}{number:0{width}}-of-{count}")


def _allocate_memory_mapped_tensor(path: Path, template: Tensor) -> Tensor:
    """Allocate a CPU tensor with the shape and dtype of `template` in a new memory-mapped file, so
    that the kernel can evict pages."""
    if template.numel() == 0:  # mmap cannot map an empty file
        return torch.empty_like(template, device="cpu")
    # All blocks at once: a write to a mapped page of a full disk would kill the process (SIGBUS).
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, template.nbytes)
    flat = torch.from_file(str(path), shared=True, size=template.numel(), dtype=template.dtype)
    return flat.view(template.shape)


def _write_model_file(net: nn.Module, path: Path, read: Callable[[str], Tensor]) -> None:
    """Write a model to a temporary file and rename the file, so that `path` is always complete.

    Args:
        net: the model, parallelized or not.
        path: the file to write.
        read: returns the full tensor of a parameter or buffer, given its name.
    """
    first = checkpoint_state.first_names(net)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial = partial_file(path)
        try:
            _write_tensors(net, path, partial, first, read)
            # Checksums of an earlier file of this name would not match the new content.
            if checksum_file(path).exists():
                publish_with_checksum(partial, path)
            else:
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable_error(path, error) from None


def _write_tensors(
    net: nn.Module,
    path: Path,
    partial: Path,
    first: Mapping[str, str],
    read: Callable[[str], Tensor],
) -> None:
    # Each tied tensor is read once.
    tensors = {name: read(name).detach().cpu() for name in dict.fromkeys(first.values())}
    if path.suffix == ".safetensors":
        _save_safetensors(tensors, partial, path)
    else:
        with partial.open("xb") as file, keep_write_error(file) as stream:
            # Under all names, as in the model's own state dict: the file has shared memory once.
            torch.save({name: tensors[first[name]] for name in first}, stream)  # type: ignore[arg-type]


def _save_safetensors(tensors: Mapping[str, Tensor], partial: Path, path: Path) -> None:
    """Save tensors as safetensors. Views are copied, as the format does not support them.

    Args:
        tensors: the tensors by name.
        partial: the file to write.
        path: the name of the file in errors.

    Raises:
        CheckpointError: if the format does not support a tensor.
    """
    try:
        contiguous = {
            # A contiguous view of a larger storage must be copied too.
            name: tensor.contiguous()
            if tensor.untyped_storage().nbytes() == tensor.nbytes
            else tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        # `transformers` rejects files without this entry.
        save_file(contiguous, partial, metadata={"format": "pt"})
    except SafetensorError as error:
        # The texts of Rust's I/O errors end in their number, which gives the message of the system.
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(os.strerror(int(number[1])) if number else str(error)) from None
    # A dtype that the format lacks (KeyError), a sparse tensor (ValueError), shared memory
    # (RuntimeError).
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: safetensors cannot store this model: {error}\nuse a path with suffix .pt"
        ) from None


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Memory-map the tensors of a file, so that a rank reads the bytes of its shards only.

    Raises:
        CheckpointError: if the file is damaged, or does not contain a `state_dict`.
    """
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except Exception as error:  # damaged files may cause any error
            raise unreadable_error(file, error) from None
    content = read_torch_file(file, mapped=True)
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(
            f"{file}: not a state_dict\nsave it anew: torch.save(net.state_dict(), path)"
        )
    return content


def _require_suffix(path: Path) -> Path:
    if path.suffix not in SUFFIXES:
        raise CheckpointError(
            f"{path}: unknown suffix {path.suffix!r}\nuse a path that ends in "
            f"{' or '.join(SUFFIXES)}"
        )
    return path
