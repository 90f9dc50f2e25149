"""Matches the names of saved tensors to those of a model, with and without adapters: those of LoRA,
and tuned prefixes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shardwright.core.checkpoint.state import first_names, original_module
from shardwright.errors import CheckpointError

_WHOLE = "base_model.model."
"""Prefix of all names in a model that `peft` wraps."""

_LAYER = ".base_layer."
"""Path of the original layer inside the module that adds an adapter to it."""

_ADAPTER = re.compile(r"\.(lora_\w+)(\.default\b)?")
"""The matrices of an adapter; `peft` omits the adapter's name when it saves only adapters."""

_ADDED = re.compile(r"\.lora_\w+|^prefix_tuning\.")
"""What is trained beside the weights of a model, and may be new."""


def match_saved_names(
    net: nn.Module,
    saved: Mapping[str, torch.Size],
    where: str,
    *,
    new_adapters: bool = False,
    strict: bool = True,
) -> dict[str, str]:
    """Maps each tensor of the whole model, including all stages, to its name in `saved`.

    A layer matches with and without an adapter; a tied tensor goes by the first of its names.

    Args:
        saved: the shape of each saved tensor.
        where: the checkpoint, for error messages.
        new_adapters: accept that `saved` has no adapters; the result then has none either.
        strict: whether all tensors of the model must be in `saved`; else the result lacks them too.

    Raises:
        CheckpointError: if names or shapes differ; the message names the first that does.
    """
    first = first_names(net)
    saved_name_of = _matched(first, saved)
    state = original_module(net).state_dict()
    tensors = {first[name]: value for name, value in state.items() if isinstance(value, Tensor)}
    left_out = new_adapters and not any(_ADDED.search(name) for name in saved)
    required = {
        name: value
        for name, value in tensors.items()
        if (strict or name in saved_name_of) and not (left_out and _ADDED.search(name))
    }
    for name, value in required.items():
        if name not in saved_name_of:
            raise CheckpointError(
                f"{where} belongs to another model: the model has {name!r}, the checkpoint does not"
            )
        if saved[saved_name_of[name]] != value.shape:
            raise CheckpointError(
                f"{where} belongs to another model: {name!r} has shape"
                f" {tuple(saved[saved_name_of[name]])} in the checkpoint, {tuple(value.shape)} in"
                " the model"
            )
    for name in saved_name_of:
        if name not in required:
            raise CheckpointError(
                f"{where} belongs to another model: the checkpoint has {name!r}, the model does not"
            )
    return {name: saved_name_of[name] for name in required}


def trained_but_not_in(net: nn.Module, saved: Iterable[str]) -> set[str]:
    """Names of the trained parameters and the buffers of a model that `saved` does not name."""
    first = first_names(net)
    frozen = {first[name] for name, p in net.named_parameters() if not p.requires_grad}
    return set(first.values()) - frozen - _matched(first, saved).keys()


def _matched(first: dict[str, str], saved: Iterable[str]) -> dict[str, str]:
    """For each saved name the name in the model, or itself if the model has none like it."""
    of_plain = {_plain(name): name for name in reversed(first)}
    result: dict[str, str] = {}
    for name in saved:
        known = name if name in first else of_plain.get(_plain(name))
        result.setdefault(name if known is None else first[known], name)
    return result


def _plain(name: str) -> str:
    """The name of a tensor without `peft`'s prefixes, or of an adapter matrix without its name."""
    plain = name.removeprefix(_WHOLE).replace(_LAYER, ".")
    return _ADAPTER.sub(r".\1", plain)
