"""Pad batches to few distinct lengths, because the graph is captured once per length."""

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
    """A `collate_fn` that pads samples to the longest of the batch, rounded up to a multiple.

    The loss of a language model is unchanged if labels are padded with -100 (and, unless attention
    is causal, the attention mask with 0). All ranks must pad to the same length, so if
    `dataset_strategy` gives each rank its own samples, use a multiple that no sample exceeds.

    Args:
        values: padding value of each padded field, by name; padding extends dimension 0.
        multiple: the padded length is a multiple of this number.

    Raises:
        DataError: if `multiple` is less than 1, or a sample lacks a field.
    """

    values: Mapping[str, float]
    multiple: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.multiple, int) or self.multiple < 1:
            raise DataError(
                f"PadToMultiple: multiple={self.multiple!r} is not a positive int\n"
                "use for example 64"
            )

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `samples`, dicts with the same fields, into one batch."""
        if not all(isinstance(sample, Mapping) for sample in samples):
            raise DataError(
                "PadToMultiple: samples must be dicts with the fields"
                f" {', '.join(map(repr, self.values))}\nreturn a dict for each sample"
            )
        # Also fields that only other samples or only `values` have, which are reported below.
        columns: dict[str, Any] = {
            name: [sample.get(name) for sample in samples] for name in {**self.values, **samples[0]}
        }
        for name in self.values:
            if any(value is None for value in columns[name]):
                raise DataError(
                    f"PadToMultiple: a sample has no field {name!r}; the first sample has"
                    f" {', '.join(map(repr, samples[0]))}\n"
                    "return the same fields for every sample, or remove the field from `values`"
                )
            # Samples of `datasets` have lists of numbers as fields.
            columns[name] = [torch.as_tensor(value) for value in columns[name]]
        longest = max((len(value) for name in self.values for value in columns[name]), default=0)
        length = -(-longest // self.multiple) * self.multiple
        for name, padding_value in self.values.items():
            columns[name] = [_pad_dim_0(value, length, padding_value) for value in columns[name]]
        return {name: default_collate(values) for name, values in columns.items()}


def _pad_dim_0(tensor: Tensor, length: int, value: float) -> Tensor:
    """Pad dimension 0 of `tensor` at its end to `length`, with `value`."""
    padding = tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)
    return torch.cat([tensor, padding])
