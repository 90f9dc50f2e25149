"""Collectives of Python values, and checks that models and tensors are equal on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.agreement.content_hash import content_hash, memory_of, text_hash
from shardwright.core.torch_internals.distributed import FAKE, device_of_objects
from shardwright.errors import PlanError

Sent = TypeVar("Sent")

PIECE = 64 * 2**20
"""Maximum bytes per broadcast, which bounds the copy of a tensor on the group's device."""


def has_other_ranks() -> bool:
    """Whether a process group is initialized and its other ranks are real, not fake."""
    return dist.is_initialized() and dist.get_backend() != FAKE


def is_rank_0() -> bool:
    """Whether this process is rank 0, or no process group of real ranks is initialized."""
    return not has_other_ranks() or dist.get_rank() == 0


def value_of_rank(value: Sent, rank: int = 0) -> Sent:
    """Broadcast a Python value from `rank` to all ranks. Collective.

    Values travel as JSON, not as pickles, with which a peer could run code.

    Args:
        value: this rank's value, of JSON types; ignored on ranks other than `rank`. Other ranks
            receive tuples as lists.
        rank: global rank that sends its value.
    """
    if not has_other_ranks():
        return value
    device = device_of_objects(None)
    # Other ranks write null, as their values need not be of JSON types.
    content_of_rank = _encode_json_as_byte_tensor(
        value if dist.get_rank() == rank else None, device
    )
    # Receivers need the size first, to allocate the memory of the second broadcast.
    size = torch.tensor(len(content_of_rank), device=device)
    dist.broadcast(size, rank)
    content = content_of_rank if dist.get_rank() == rank else content_of_rank.new_empty(int(size))
    dist.broadcast(content, rank)
    return (
        value if dist.get_rank() == rank else cast("Sent", _decode_json_from_byte_tensor(content))
    )


def values_of_ranks(value: Sent, group: dist.ProcessGroup | None = None) -> list[Sent]:
    """All-gather a Python value over `group`, in the order of ranks. Collective.

    Args:
        value: this rank's value, of JSON types; tuples are received as lists.
        group: process group; None for all ranks.
    """
    if not has_other_ranks():
        return [value]
    device, ranks = device_of_objects(group), dist.get_world_size(group)
    content = _encode_json_as_byte_tensor(value, device)
    sizes = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor(len(content), device=device), group=group)
    # All-gather needs equal shapes, so contents are padded to the longest.
    padded = content.new_zeros(max(map(int, sizes)))
    padded[: len(content)] = content
    contents = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(contents, padded, group=group)
    pairs = zip(contents, sizes, strict=True)
    return [
        cast("Sent", _decode_json_from_byte_tensor(content[: int(size)])) for content, size in pairs
    ]


def _encode_json_as_byte_tensor(value: object, device: torch.device) -> Tensor:
    # A bytearray, as `torch.frombuffer` warns about the read-only memory of `bytes`.
    content = bytearray(json.dumps(value).encode())
    return torch.frombuffer(content, dtype=torch.uint8).to(device)


def _decode_json_from_byte_tensor(content: Tensor) -> Any:
    return json.loads(content.cpu().numpy().tobytes())


def gathered(tensor: Tensor) -> Tensor:
    """All-gather a tensor, stacked along a new dimension 0. Collective.

    Args:
        tensor: this rank's tensor, of equal shape on all ranks.

    Returns:
        A tensor of shape (number of ranks, *`tensor.shape`).
    """
    stacked = tensor.new_empty(dist.get_world_size(), *tensor.shape)
    # Views of `stacked`, so that the all-gather writes the result in place.
    dist.all_gather(list(stacked), tensor)
    return stacked


def check_description(lines: Sequence[str], device: torch.device) -> None:
    """Check that models and plans of all ranks have equal descriptions. Collective.

    Ranks all-gather hashes of 8 bytes. If hashes differ, rank 0 and the first rank with another
    hash broadcast their full descriptions.

    Args:
        lines: the description of this rank's model and plan.
        device: device for collectives.

    Raises:
        PlanError: on every rank, with the first line that differs.
    """
    description = "\n".join(lines)
    # All ranks gather the same hashes, so either all return here or all make the broadcasts below.
    hashes = gathered(torch.tensor(text_hash(description), device=device)).tolist()
    other = next((rank for rank, each in enumerate(hashes) if each != hashes[0]), None)
    if other is None:
        return
    descriptions = [value_of_rank(description, rank).split("\n") for rank in (0, other)]
    first, second = next(
        pair for pair in zip_longest(*descriptions, fillvalue="nothing") if len({*pair}) > 1
    )
    raise PlanError(
        f"models or plans differ between ranks: rank 0 has {first!r}, but rank {other} has "
        f"{second!r}\nbuild the same model, and make or load the same plan, on every rank"
    )


def take_values_of_rank_0(tensors: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Broadcast tensors of rank 0 to all ranks, in place. Collective.

    Only tensors whose hashes differ between ranks are broadcast.

    Args:
        tensors: this rank's tensors by name; names and shapes are equal on all ranks.
        device: device for collectives.

    Returns:
        The names of the tensors that differed.
    """
    if not tensors:
        return []
    # One all-gather for all tensors: latency, not bytes, decides for 8 bytes each.
    hashes = gathered(torch.stack([content_hash(t).to(device) for t in tensors.values()]))
    # A tensor that differs on any rank is broadcast by all ranks, as a broadcast is collective.
    differ = (hashes != hashes[0]).any(0).tolist()
    names = [name for name, differs in zip(tensors, differ, strict=True) if differs]
    for name in names:
        _broadcast_from_rank_0(tensors[name].detach(), device)
    return names


@torch.no_grad()
def _broadcast_from_rank_0(tensor: Tensor, device: torch.device) -> None:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # `copy_` rejects expanded tensors, whose elements share one location
            tensor = tensor.narrow(dim, 0, 1)
    contiguous = tensor.contiguous()
    for piece in torch.split(memory_of(contiguous), PIECE):
        sent = piece.to(device)
        dist.broadcast(sent, 0)
        # `to` has copied: the tensor is not on the device of the process group, e.g. on the CPU
        # with NCCL.
        if sent is not piece:
            piece.copy_(sent)
    if contiguous is not tensor:
        tensor.copy_(contiguous)
