"""Hashes of tensors and texts that are equal in every process.

Tensors are hashed on their device, without synchronizing with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from zlib import crc32

import torch
from torch import Tensor

WORD = 8
"""Bytes that are hashed together as one int64 word."""

COLUMNS = 4096
"""Words per row of the matrix as which a tensor is hashed."""

ROWS = 256
"""Rows that an accelerator multiplies at once; bounds the temporary memory of a hash."""

SAMPLE = 2**13
"""Words in the sample of a large tensor."""

_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The increment and the two multipliers of SplitMix64, as signed numbers."""


def text_hash(text: str) -> int:
    """Return a hash of 63 bits, which fits a nonnegative int64."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def content_hash(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bytes and their order, as an int64 scalar on its device.

    The hash does not depend on shape and dtype. The words are arranged in rows of `COLUMNS`; each
    word is multiplied by pseudorandom weights of its row and column, and the products are added
    modulo 2⁶⁴.
    """
    flat = memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
    if flat.storage_offset() % WORD:  # `view(int64)` needs an aligned offset
        flat = flat.clone()
    count = flat.numel() // WORD
    words, rest = flat[: count * WORD].view(torch.int64), flat[count * WORD :].long()
    in_full_rows = count // COLUMNS * COLUMNS
    to_sum = torch.cat([words[in_full_rows:], rest])
    if in_full_rows:
        columns = _weights(COLUMNS, flat.device)
        to_sum = torch.cat([to_sum, _product(words[:in_full_rows].view(-1, COLUMNS), columns)])
    return (to_sum * _weights(len(to_sum), flat.device)).sum()


def sample_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, of a large tensor only `SAMPLE` equidistant words, as uint8.

    Their hash tells batches of other samples apart, but not large tensors that differ in few
    elements.
    """
    flat = memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
    count = flat.numel() // WORD
    step = count // SAMPLE
    if step < 2 or flat.storage_offset() % WORD:
        return flat
    return memory_of(flat[: count * WORD].view(torch.int64)[::step].contiguous())


def host_hash(tensors: Iterable[Tensor]) -> int:
    """A hash of the bytes of tensors on the CPU, faster for some KiB than `content_hash`."""
    result = 0
    for tensor in tensors:
        result = crc32(tensor.numpy().data, result)
    return result


def memory_of(contiguous: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, as a one-dimensional uint8 view."""
    # A contiguous tensor of one element may have any stride; `view` requires 1.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    if matrix.device.type == "cpu":
        return torch.mv(matrix, vector)
    # CUDA has no matrix products of int64.
    return torch.cat([(rows * vector).sum(1) for rows in torch.split(matrix, ROWS)])


def _weights(count: int, device: torch.device) -> Tensor:
    """Return pseudorandom int64 weights: a variant of SplitMix64 applied to 1, 2, ..., `count`."""
    mixed = torch.arange(1, count + 1, device=device) * _MULTIPLIERS[0]
    for factor in _MULTIPLIERS[1:]:
        mixed = (mixed ^ (mixed >> 29)) * factor
    return mixed ^ (mixed >> 32)
