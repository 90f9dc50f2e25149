"""The declaration of a `local_map`: the dimensions of its tensors, and which may be sharded.

    "b s _h, _h -> b s _h"   a name is a dimension that may be sharded, `_` or `_h` one that may not

- An input without a sharded name is read in full, and its gradient is a partial sum.
- A result without a sharded name must be declared a partial sum or a partial mean.

Local and global sizes follow from those of the inputs by name. Example, sharded into two along
`b`: inputs `[8, 4, 16]` and `[16]` become `[4, 4, 16]` and `[16]`, the result `[4, 4, 16]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

DimNames = tuple[str | None, ...]
"""The name of each dimension of a tensor; None for one that is never sharded."""

ShapeEntry = tuple[str, ...]
"""The notation of each dimension of a tensor: a name, `_`, `_name`, or the size of a result."""

Partial = Literal["sum", "mean"] | None
"""Reduction of the local results over a sharded name that a result lacks."""


@dataclass(frozen=True)
class Declaration:
    """A user's declaration of the tensors of a `local_map`.

    Args:
        inputs: one entry per tensor argument.
        outputs: one entry per result.
        partial: for each result, its reduction over the sharded names that it lacks.
        text: the notation as the user wrote it.
    """

    inputs: tuple[ShapeEntry, ...]
    outputs: tuple[ShapeEntry, ...]
    partial: tuple[Partial, ...]
    text: str

    @cached_property
    def input_dims(self) -> tuple[DimNames, ...]:
        return tuple(map(_dims, self.inputs))

    @cached_property
    def output_dims(self) -> tuple[DimNames, ...]:
        """Names that no input has are not sharded: nothing says which part a rank computes."""
        given = {name for dims in self.input_dims for name in dims}
        return tuple(
            tuple(name if name in given else None for name in _dims(entry))
            for entry in self.outputs
        )

    def sizes(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The size of each name, of the tensors of a call."""
        return {
            name: size
            for entry, tensor in zip(self.inputs, tensors, strict=False)
            for name, size in zip(entry, tensor.shape, strict=True)
            if name != "_"
        }

    def shape(self, output: int, sizes: dict[str, Any], whole: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of a result for these sizes; dimensions without a size are as in `whole`."""
        pairs = zip(self.outputs[output], whole, strict=True)
        return tuple(sizes.get(name, size) for name, size in pairs)


def _dims(entry: ShapeEntry) -> DimNames:
    return tuple(None if token[0] == "_" or token.isdigit() else token for token in entry)
