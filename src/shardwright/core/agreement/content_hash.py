"""Hashes of contents, equal in every process: of tensors, on their device without waiting for it,
and of texts."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

WORD = 8
"""Bytes that are read as one number."""

COLUMNS = 4096
"""Words in a row."""

ROWS = 256
"""Rows that are multiplied at once: this bounds the memory that is needed."""

_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd numbers of 64 bits of well-known mixers, as signed numbers."""


def text_hash(text: str) -> int:
    """A number of 63 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def content_hash(tensor: Tensor) -> Tensor:
    """A number of 64 bits, int64 without dimensions on the tensor's device, that depends on the
    bits of every element and on where it stands, but not on shape or dtype.

    The words of the tensor are laid out in rows. Each is multiplied by weights of its row and its
    column that have no pattern, and all are added, modulo 2⁶⁴.
    """
    flat = memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    count = flat.numel() // WORD
    words, rest = flat[: count * WORD].view(torch.int64), flat[count * WORD :].long()
    whole = count // COLUMNS * COLUMNS
    last = torch.cat([words[whole:], rest])
    if whole:
        columns = _weights(COLUMNS, flat.device)
        last = torch.cat([last, _product(words[:whole].view(-1, COLUMNS), columns)])
    return (last * _weights(len(last), flat.device)).sum()


def memory_of(contiguous: Tensor) -> Tensor:
    """Its memory, in one dimension. One element may have any stride, so it gets one of 1."""
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    if matrix.device.type == "cpu":
        return torch.mv(matrix, vector)
    # Accelerators multiply no matrices of whole numbers.
    return torch.cat([(rows * vector).sum(1) for rows in torch.split(matrix, ROWS)])


def _weights(count: int, device: torch.device) -> Tensor:
    mixed = torch.arange(1, count + 1, device=device) * _MULTIPLIERS[0]
    for factor in _MULTIPLIERS[1:]:
        mixed = (mixed ^ (mixed >> 29)) * factor
    return mixed ^ (mixed >> 32)
