"""Settings of an optimizer's parameter groups, such as the learning rate, as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.core.checkpoint.manifest import CheckpointWarning
from shardwright.errors import CheckpointError, warn_user

GroupSettings = dict[str, Any]
"""Settings of one parameter group, by name."""


def group_settings(optimizer: Optimizer) -> list[GroupSettings]:
    """Return the settings of each parameter group as JSON values."""
    return [
        {
            # For example a learning rate of an optimizer that is `capturable`.
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def check_group_settings(
    optimizer: Optimizer, saved: Sequence[GroupSettings], folder: Path
) -> None:
    """Check that saved settings have the types of the optimizer's own settings.

    Otherwise a setting of another type would raise an error in the next optimizer step.

    Args:
        optimizer: the optimizer that the settings are loaded into.
        saved: the settings of each parameter group in the checkpoint.
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: if the number of parameter groups differs, or the type of a setting.
    """
    class_name = type(optimizer).__name__
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, but this "
            f"{class_name} has {len(optimizer.param_groups)}\n"
            f"construct the optimizer with {len(saved)} groups, or load without an optimizer"
        )
    for index, (current, new) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        for key, value in new.items():
            if key in current and not _can_replace_setting(value, current[key]):
                raise CheckpointError(
                    f"{folder}: `{key}` of parameter group {index} is {value!r}, which cannot"
                    f" replace {current[key]!r} of {class_name}\n"
                    "load another checkpoint, construct the optimizer with a setting of this form,"
                    " or load only the model: pass `optimizer=None`"
                )


def restored_groups(
    optimizer: Optimizer, current: list[dict[str, Any]], saved: Sequence[GroupSettings]
) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups with the saved settings, and warn about changes.

    Args:
        optimizer: the optimizer.
        current: parameter groups of its state dict.
        saved: the saved settings of each group, checked by `check_group_settings`.
    """
    # Settings that the checkpoint lacks, such as those of a newer PyTorch, keep their current
    # value.
    restored = [
        {**old, **{key: _convert_setting(value, old.get(key)) for key, value in new.items()}}
        for old, new in zip(current, saved, strict=True)
    ]
    # No warning for `lr` with a scheduler (which sets `initial_lr`): it changes in every run.
    replaced = [
        f"{key}={new[key]} replaces {old[key]}"
        for old, new in zip(current, restored, strict=True)
        for key in old
        if new[key] != old[key] and not (key == "lr" and "initial_lr" in new)
    ]
    if replaced:
        shown = ", ".join(replaced[:10])
        more = f" and {len(replaced) - 10} more" if len(replaced) > 10 else ""
        warn_user(
            f"the checkpoint's settings of {type(optimizer).__name__} were restored: {shown}{more}"
            "\nto use other values, set them after loading",
            CheckpointWarning,
        )
    return restored


def _can_replace_setting(value: Any, current: Any) -> bool:
    """Whether a saved JSON value can replace the current value of a setting."""
    if isinstance(current, Tensor):
        current = current.item() if current.numel() == 1 else current.tolist()
    # A setting that may be None or a flag, such as `foreach`.
    if current is None:
        return value is None or isinstance(value, bool | int | float | str)
    if isinstance(current, bool):
        return value is None or isinstance(value, bool)
    if isinstance(current, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (isfinite(value) or not isfinite(current))
    if isinstance(current, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(current)
            and all(map(_can_replace_setting, value, current))
        )
    return not isinstance(current, str) or isinstance(value, str)


def _convert_setting(value: Any, current: Any) -> Any:
    """Convert a saved JSON value to the type of the optimizer's current setting."""
    # For example a learning rate of an optimizer that is `capturable`.
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    # JSON has no tuples, which Adam's `betas` are.
    return tuple(value) if isinstance(value, list) else value
