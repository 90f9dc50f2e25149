"""What all ranks of the process group have alike: values, descriptions, and contents of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.agreement.content_hash import content_hash, memory_of, text_hash
from shardwright.core.torch_internals.distributed import FAKE
from shardwright.errors import PlanError

Sent = TypeVar("Sent")

PIECE = 64 * 2**20
"""Bytes that are sent at once where they first go to another device."""


def has_other_ranks() -> bool:
    """Whether a process group is running with other ranks that answer: those of a fake one do
    not."""
    return dist.is_initialized() and dist.get_backend() != FAKE


def is_rank_0() -> bool:
    """Whether this process does what one of all ranks does."""
    return not has_other_ranks() or dist.get_rank() == 0


def value_of_rank(value: Sent, rank: int = 0) -> Sent:
    """The value of one rank, on every rank; all must call this."""
    box = [value]
    if has_other_ranks():
        dist.broadcast_object_list(box, src=rank)
    return box[0]


def values_of_ranks(value: Sent, group: dist.ProcessGroup | None = None) -> list[Sent]:
    """The value of each rank, on every rank; all must call this."""
    if not has_other_ranks():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gathered(mine: Tensor) -> Tensor:
    """The tensor of each rank of the process group, stacked along a first dimension."""
    every = mine.new_empty(dist.get_world_size(), *mine.shape)
    dist.all_gather(list(every), mine)
    return every


def check_description(lines: Sequence[str], device: torch.device) -> None:
    """Compares the description of each rank's model and plan; every rank must call this.

    Only a hash is sent, and where it differs the description of two ranks.

    Raises:
        PlanError: on every rank, if they differ; with the first line in which they do.
    """
    text = "\n".join(lines)
    hashes = gathered(torch.tensor(text_hash(text), device=device)).tolist()
    other = next((rank for rank, each in enumerate(hashes) if each != hashes[0]), None)
    if other is None:
        return
    texts = [value_of_rank(text, rank).split("\n") for rank in (0, other)]
    first, second = next(
        pair for pair in zip_longest(*texts, fillvalue="nothing") if len({*pair}) > 1
    )
    raise PlanError(
        f"the ranks do not agree: rank 0 has {first!r}, rank {other} has {second!r}; every rank"
        " must build the same model and make, or load, the same plan"
    )


def take_values_of_rank_0(tensors: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Gives tensors the values that they have on rank 0, in place; every rank must call this.

    Only tensors whose hashes differ on some rank are sent.

    Returns:
        The names of those.
    """
    if not tensors:
        return []
    hashes = gathered(torch.stack([content_hash(t).to(device) for t in tensors.values()]))
    differ = (hashes != hashes[0]).any(0).tolist()
    names = [name for name, differs in zip(tensors, differ, strict=True) if differs]
    for name in names:
        _broadcast(tensors[name].detach(), device)
    return names


@torch.no_grad()
def _broadcast(tensor: Tensor, device: torch.device) -> None:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # expanded: all of its elements are the first
            tensor = tensor.narrow(dim, 0, 1)
    whole = tensor.contiguous()
    for piece in torch.split(memory_of(whole), PIECE):
        sent = piece.to(device)
        dist.broadcast(sent, 0)
        if sent is not piece:
            piece.copy_(sent)
    if whole is not tensor:
        tensor.copy_(whole)
