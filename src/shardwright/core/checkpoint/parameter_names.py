"""Match the names of saved tensors to the names in a model, with or without `peft` adapters (LoRA
and prefix tuning)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shardwright.core.checkpoint.state import first_names, original_module
from shardwright.errors import CheckpointError

_PEFT_PREFIX = "base_model.model."
"""Prefix that `peft` adds to all names in a model."""

_BASE_LAYER = ".base_layer."
"""Name of the original layer within the module that wraps the layer with an adapter."""

_ADAPTER_MATRIX = re.compile(r"\.(lora_\w+)(\.default\b)?")
"""Pattern of LoRA matrices in parameter names, optionally with the adapter's name `default`, which
is missing in files of adapters only."""

_ADAPTER_PARAMETER = re.compile(r"\.lora_\w+|^prefix_tuning\.")
"""Pattern of the names of adapter parameters."""


def match_saved_names(
    net: nn.Module,
    saved: Mapping[str, torch.Size],
    where: str,
    *,
    new_adapters: bool = False,
    strict: bool = True,
) -> dict[str, str]:
    """Map the name of each tensor of the model, over all pipeline stages, to its name in `saved`.

    Names match even if an adapter wraps the layer only in the model or only in `saved`. A tied
    tensor is listed once, under its first name.

    Args:
        net: the model, parallelized or not.
        saved: the shape of each saved tensor, by name.
        where: path of the checkpoint, for errors.
        new_adapters: whether adapters may be missing in `saved`; the result then lacks them.
        strict: whether all other tensors of the model must be in `saved`; otherwise the result
            lacks missing tensors.

    Raises:
        CheckpointError: for the first name or shape that differs.
    """
    first = first_names(net)
    saved_name_of = _map_model_names_to_saved(first, saved)
    state = original_module(net).state_dict()
    tensors = {first[name]: value for name, value in state.items() if isinstance(value, Tensor)}
    # A checkpoint with any adapter must have all of them; only one without is the model's base
    # weights.
    skip_adapters = new_adapters and not any(_ADAPTER_PARAMETER.search(name) for name in saved)
    required = {
        name: value
        for name, value in tensors.items()
        if (strict or name in saved_name_of)
        and not (skip_adapters and _ADAPTER_PARAMETER.search(name))
    }
    for name, value in required.items():
        if name not in saved_name_of:
            raise CheckpointError(
                f"{where} belongs to another model: the model has {name!r}, the checkpoint does"
                " not\nload the checkpoint into the model that saved it"
            )
        if saved[saved_name_of[name]] != value.shape:
            raise CheckpointError(
                f"{where} belongs to another model: {name!r} has shape"
                f" {tuple(saved[saved_name_of[name]])} in the checkpoint, {tuple(value.shape)} in"
                " the model\nload the checkpoint into the model that saved it"
            )
    # Also with `strict=False`, which only allows tensors of the model that were not saved.
    for name in saved_name_of:
        if name not in required:
            raise CheckpointError(
                f"{where} belongs to another model: the checkpoint has {name!r}, the model does"
                " not\nload the checkpoint into the model that saved it"
            )
    return {name: saved_name_of[name] for name in required}


def unsaved_trained_names(net: nn.Module, saved: Iterable[str]) -> set[str]:
    """Return the names of trained parameters and buffers of the model that are not in `saved`.

    Args:
        net: the model, parallelized or not.
        saved: names of saved tensors.
    """
    first = first_names(net)
    frozen = {first[name] for name, p in net.named_parameters() if not p.requires_grad}
    return set(first.values()) - frozen - _map_model_names_to_saved(first, saved).keys()


def _map_model_names_to_saved(first: dict[str, str], saved: Iterable[str]) -> dict[str, str]:
    """Map parameter names of the model to saved names, with or without the affixes of `peft`.

    Saved names without a match in the model map to themselves.

    Args:
        first: the first name of each tensor of the model, by each of its (tied) names.
        saved: the saved names.
    """
    # Reversed, so that the first of tied names wins.
    by_plain_name = {_remove_peft_affixes(name): name for name in reversed(first)}
    result: dict[str, str] = {}
    for name in saved:
        # An exact name has precedence over one that matches only without the affixes of `peft`.
        model_name = name if name in first else by_plain_name.get(_remove_peft_affixes(name))
        # Files of `torch.save` have all names of a tied tensor; the first in the file is read.
        result.setdefault(name if model_name is None else first[model_name], name)
    return result


def _remove_peft_affixes(name: str) -> str:
    """Remove `base_model.model`, `base_layer` and the adapter's name, which `peft` adds."""
    layer_name = name.removeprefix(_PEFT_PREFIX).replace(_BASE_LAYER, ".")
    return _ADAPTER_MATRIX.sub(r".\1", layer_name)
