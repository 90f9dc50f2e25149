"""Collectives over Python values, and checks that all ranks hold the same model and tensors."""

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
    """Whether a process group is initialized whose other ranks are real, not fake."""
    return dist.is_initialized() and dist.get_backend() != FAKE


def is_rank_0() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not has_other_ranks() or dist.get_rank() == 0


def value_of_rank(value: Sent, rank: int = 0) -> Sent:
    """Broadcasts the value of `rank`. Collective."""
    box = [value]
    if has_other_ranks():
        dist.broadcast_object_list(box, src=rank)
    return box[0]


def values_of_ranks(value: Sent, group: dist.ProcessGroup | None = None) -> list[Sent]:
    """All-gathers the values of all ranks, in their order. Collective."""
    if not has_other_ranks():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gathered(mine: Tensor) -> Tensor:
    """All-gathers tensors of one shape, stacked along a new dimension 0. Collective."""
    every = mine.new_empty(dist.get_world_size(), *mine.shape)
    dist.all_gather(list(every), mine)
    return every


def check_description(lines: Sequence[str], device: torch.device) -> None:
    """Compares the descriptions of all ranks' models and plans. Collective.

    Sends 8 bytes, and two descriptions only if they differ.

    Raises:
        PlanError: on every rank, with the first line that differs.
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
    """Copies the values of rank 0 into the tensors of all ranks. Collective.

    Sends only tensors whose hashes differ on some rank.

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
