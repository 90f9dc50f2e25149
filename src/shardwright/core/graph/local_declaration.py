"""The declaration of a `local_map`: the dimensions of its tensors, and which dimensions may be
sharded.

In "b s _h, _h -> b s _h", a name such as `b` is a dimension that may be sharded; `_` and names
that begin with `_`, such as `_h`, are dimensions that may not.

- An input that lacks a sharded name is replicated, and its gradient is a partial sum.
- A result that lacks a sharded name must be declared a partial sum or a partial mean.

Local and global sizes of results are inferred from the inputs by name. In two shards along `b`,
inputs `[8, 4, 16]` and `[16]` become `[4, 4, 16]` and `[16]`, and the result `[4, 4, 16]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

DimNames = tuple[str | None, ...]
"""Name of each dimension of a tensor; None for a dimension that is never sharded."""

ShapeEntry = tuple[str, ...]
"""Dimensions of a tensor in the user's notation: names, `_`, `_name`, or sizes of a result."""

Partial = Literal["sum", "mean"] | None
"""Reduction of a result of `local_map` over the shards of dimensions that the result lacks."""


@dataclass(frozen=True)
class Declaration:
    """A user's declaration of the tensors of a `local_map`.

    Args:
        inputs: notation of the dimensions of each tensor argument.
        outputs: notation of the dimensions of each result.
        partial: for each result, its reduction over the shards of names that the result lacks.
        notation: the notation as the user wrote it.
    """

    inputs: tuple[ShapeEntry, ...]
    outputs: tuple[ShapeEntry, ...]
    partial: tuple[Partial, ...]
    notation: str

    @cached_property
    def input_dims(self) -> tuple[DimNames, ...]:
        return tuple(map(_parse_dim_names, self.inputs))

    @cached_property
    def output_dims(self) -> tuple[DimNames, ...]:
        """Names of the dimensions of each result; None for a name that no input has.

        The local size of such a dimension is unknown.
        """
        input_names = {name for dims in self.input_dims for name in dims}
        return tuple(
            tuple(name if name in input_names else None for name in _parse_dim_names(entry))
            for entry in self.outputs
        )

    def sizes(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """Return the size of each dimension name, from the tensor arguments of a call."""
        return {
            name: size
            # Not strict: `tensors` may go on with parameters and buffers, which have no entry.
            for entry, tensor in zip(self.inputs, tensors, strict=False)
            for name, size in zip(entry, tensor.shape, strict=True)
            # A name such as `_h` is never sharded, but its size determines results too.
            if name != "_"
        }

    def shape(
        self, output: int, sizes: dict[str, Any], global_shape: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return the local shape of a result.

        Args:
            output: index of the result.
            sizes: the local size of each dimension name.
            global_shape: the global shape, used for dimensions without a name in `sizes`.
        """
        pairs = zip(self.outputs[output], global_shape, strict=True)
        return tuple(sizes.get(name, size) for name, size in pairs)


def _parse_dim_names(entry: ShapeEntry) -> DimNames:
    # A number is the size of a dimension that no input has.
    return tuple(None if token[0] == "_" or token.isdigit() else token for token in entry)
