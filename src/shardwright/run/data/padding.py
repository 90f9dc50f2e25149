"""Samples of many lengths in batches of few, each of which is captured once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from shardwright.errors import DataError


@dataclass(frozen=True)
class PadToMultiple:
    """A `collate_fn` that makes the samples of a batch as long as the longest, rounded up.

    A language model whose labels are padded with -100 (and whose mask, if its attention sees later
    tokens, with 0) returns the loss of the samples as they were. Where `dataset_strategy` gives
    each rank its own samples, ranks do not know the longest of others: use a multiple that no
    sample exceeds.

    Args:
        values: by the name of a field of samples with what its dimension 0 is filled up; other
            fields are joined as they are.
        multiple: of which the length of a batch is one.

    Raises:
        DataError: if the multiple is less than 1, or samples lack a field.
    """

    values: Mapping[str, float]
    multiple: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.multiple, int) or self.multiple < 1:
            raise DataError(f"multiple={self.multiple!r}: use a whole number of at least 1")

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch, by the names of fields."""
        if not all(isinstance(sample, Mapping) for sample in samples):
            raise DataError(f"samples are no dicts with the fields {', '.join(self.values)}")
        columns: dict[str, Any] = {
            name: [sample.get(name) for sample in samples] for name in {**self.values, **samples[0]}
        }
        for name in self.values:
            if any(value is None for value in columns[name]):
                raise DataError(f"a sample has no {name!r}, only {', '.join(samples[0])}")
            columns[name] = [torch.as_tensor(value) for value in columns[name]]
        longest = max((len(value) for name in self.values for value in columns[name]), default=0)
        length = -(-longest // self.multiple) * self.multiple
        for name, filling in self.values.items():
            columns[name] = [_filled(value, length, filling) for value in columns[name]]
        return {name: default_collate(values) for name, values in columns.items()}


def _filled(tensor: Tensor, length: int, value: float) -> Tensor:
    """`tensor` with dimension 0 of this length."""
    rest = tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)
    return torch.cat([tensor, rest])
