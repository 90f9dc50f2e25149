"""Hashes of tensors and strings that are reproducible across processes.

Tensors are hashed on their device, without synchronizing with the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from hashlib import blake2b
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

WORD = 8
"""Bytes per int64 word; tensors are hashed word by word."""

COLUMNS = 4096
"""Words per row of the matrix into which `content_hash` reshapes a tensor."""

ROWS = 256
"""Rows that `content_hash` multiplies at once on an accelerator, which bounds temporary memory."""

SAMPLE = 2**13
"""Number of int64 words of a large tensor that `sample_of` reads."""

_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The increment and the two multipliers of SplitMix64, as signed numbers."""


def text_hash(text: str) -> int:
    """Return a hash of a string in 63 bits, a nonnegative int64."""
    # The shift leaves 63 bits, which an int64 tensor holds without a sign.
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def content_hash(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bytes as an int64 scalar on the tensor's device.

    The hash depends on the order of bytes, but not on shape and dtype. Words are arranged in rows
    of `COLUMNS`. Each word is multiplied by the pseudorandom weights of its row and column, and the
    products are summed modulo 2⁶⁴.

    Args:
        tensor: a tensor of any shape and dtype, on any device.
    """
    flat = memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
    if flat.storage_offset() % WORD:  # `view(int64)` needs an aligned offset
        flat = flat.clone()
    count = flat.numel() // WORD
    words, last_bytes = flat[: count * WORD].view(torch.int64), flat[count * WORD :].long()
    in_full_rows = count // COLUMNS * COLUMNS
    # The rest: at most `COLUMNS - 1` words that fill no row, and 7 bytes, each as one number.
    to_sum = torch.cat([words[in_full_rows:], last_bytes])
    if in_full_rows:
        columns = _make_hash_weights(COLUMNS, flat.device)
        to_sum = torch.cat(
            [to_sum, _multiply_rows(words[:in_full_rows].view(-1, COLUMNS), columns)]
        )
    # A second set of weights, by row: without it, exchanged rows would have equal hashes.
    return (to_sum * _make_hash_weights(len(to_sum), flat.device)).sum()


def sample_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as 1-D uint8; a large tensor is sampled at equidistant words.

    A hash of the result distinguishes batches with different samples, but not large tensors that
    differ in few elements.

    Args:
        tensor: a tensor of any shape and dtype, on any device. Tensors of at least `2 * SAMPLE`
            words are sampled.
    """
    flat = memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
    count = flat.numel() // WORD
    step = count // SAMPLE
    # Sampled by words, which needs an aligned offset; an unaligned tensor is returned completely.
    if step < 2 or flat.storage_offset() % WORD:
        return flat
    return memory_of(flat[: count * WORD].view(torch.int64)[::step].contiguous())


def host_sample_hash(tensors: Iterable[Tensor]) -> int:
    """Return the CRC-32 of CPU tensors, large ones sampled as by `sample_of`.

    Faster than `content_hash` for a few KiB, since it reads memory by NumPy, whose calls take a
    fraction of the time of PyTorch's.
    """
    result = 0
    for tensor in tensors:
        tensor = tensor.detach()
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if tensor.nbytes:
            memory = memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))
            words = np.frombuffer(memory, np.int64, tensor.nbytes // WORD)
            step = len(words) // SAMPLE
            sample = memory if step < 2 else np.ascontiguousarray(words[::step]).data
            result = crc32(sample, result)
    return result


def memory_of(contiguous: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a 1-D uint8 view."""
    # A contiguous tensor of one element may have any stride; `view` requires 1.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _multiply_rows(matrix: Tensor, vector: Tensor) -> Tensor:
    if matrix.device.type == "cpu":
        return torch.mv(matrix, vector)
    # CUDA has no matrix products of int64.
    return torch.cat([(rows * vector).sum(1) for rows in torch.split(matrix, ROWS)])


def _make_hash_weights(count: int, device: torch.device) -> Tensor:
    """Return `count` pseudorandom int64 weights: hashes of 1, 2, ... by a variant of SplitMix64."""
    mixed = torch.arange(1, count + 1, device=device) * _MULTIPLIERS[0]
    # SplitMix64 (Steele, Lea and Flood, 2014) shifts by 30, 27 and 31 and fills with zeros; `>>` of
    # int64 tensors copies the sign.
    for factor in _MULTIPLIERS[1:]:
        mixed = (mixed ^ (mixed >> 29)) * factor
    return mixed ^ (mixed >> 32)
