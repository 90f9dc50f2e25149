"""Which saved tensor belongs to which of a model, also where adapters stand around its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwright.errors import CheckpointError
from shardwright.train.checkpoint_state import first_names, original_module

_WHOLE = "base_model.model."
"""What `peft` puts before all names of a model that it wraps."""

_LAYER = ".base_layer."
"""Where the layer itself stands inside the module that adds an adapter to it."""

_ADAPTER = re.compile(r"\.(lora_\w+)(\.default\b)?")
"""The matrices of an adapter; `peft` leaves the adapter's name out where it saves them alone."""


def saved_names(
    net: nn.Module, saved: Mapping[str, torch.Size], where: str, new_adapters: bool = False
) -> dict[str, str]:
    """For each tensor of the whole model, of all stages, its name in `saved`. A layer goes by one
    name with an adapter and without it; a tied tensor by the first of its names.

    Args:
        saved: the shape of each saved tensor.
        where: what they are in, for errors.
        new_adapters: adapters may be missing, all together; they are then not in the result.

    Raises:
        CheckpointError: the tensors differ in a name or a shape; names the first that does.
    """
    first = first_names(net)
    of_plain = {_plain(name): name for name in reversed(first)}
    theirs: dict[str, str] = {}
    for name in saved:
        known = name if name in first else of_plain.get(_plain(name))
        theirs.setdefault(name if known is None else first[known], name)
    state = original_module(net).state_dict()
    mine = {first[name]: value for name, value in state.items() if isinstance(value, Tensor)}
    left_out = new_adapters and not any(_ADAPTER.search(name) for name in saved)
    wanted = {n: v for n, v in mine.items() if not (left_out and _ADAPTER.search(n))}
    for name, value in wanted.items():
        if name not in theirs:
            raise CheckpointError(f"{where} is of another model: it has no {name!r}")
        if saved[theirs[name]] != value.shape:
            raise CheckpointError(
                f"{where} is of another model: {name!r} has shape {tuple(saved[theirs[name]])}"
                f" there, {tuple(value.shape)} here"
            )
    for name in theirs:
        if name not in wanted:
            raise CheckpointError(f"{where} is of another model: it has {name!r}, this one has not")
    return {name: theirs[name] for name in wanted}


def _plain(name: str) -> str:
    """The name of a tensor as it is without adapters; of an adapter, without the adapter's name."""
    plain = name.removeprefix(_WHOLE).replace(_LAYER, ".")
    return _ADAPTER.sub(r".\1", plain)
