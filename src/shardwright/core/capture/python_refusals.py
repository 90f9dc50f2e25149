"""What a traced call may not do to Python objects and to the tensors of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwright.core.torch_internals.dynamo import DynamoCapture
from shardwright.core.torch_internals.modules import own_buffers, own_modules, own_parameters
from shardwright.errors import CaptureError


def module_slots(module: nn.Module) -> dict[str, Any]:
    """The parameters, buffers and submodules of a model by path, also those that are None."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, part in module.named_modules()
        for own in (own_parameters(part), own_buffers(part), own_modules(part))
        for name, value in own.items()
    }


def assigned_buffers(
    before: Mapping[str, Any], after: Mapping[str, Any], made: Mapping[int, int]
) -> dict[str, int]:
    """The outputs of Dynamo's graph that buffers get, by name.

    Raises:
        CaptureError: if anything else has changed.
    """
    changed = [
        name for name in {**before, **after} if before.get(name, made) is not after.get(name, made)
    ]
    for name in changed:
        old = before.get(name)
        if not isinstance(old, Tensor) or isinstance(old, nn.Parameter):
            raise CaptureError(f"`forward` registers or replaces {name!r}: do it before `plan`")
        if id(after.get(name)) not in made:
            raise CaptureError(f"`forward` removes the buffer {name!r}, or makes it another tensor")
    return {name: made[id(after[name])] for name in changed}


def check_changes(dynamo: DynamoCapture) -> None:
    """Raises:
    CaptureError: if TorchDynamo would replay the changes of a call otherwise than Python.
    """
    for name in dynamo.impure_caches:
        raise CaptureError(
            f"`forward` calls {name!r} under `functools.lru_cache`, which draws random numbers, or"
            " changes an object, or whose result is changed"
        )
    for change in dynamo.changes:
        if isinstance(change.value, deque) and change.value.maxlen is not None:
            # TorchDynamo 2.13 appends to it without dropping what no longer fits.
            raise CaptureError("`forward` appends to a `deque` with `maxlen`")


def check_state(tensor: Any) -> None:
    """Check an input of Dynamo's graph that is no parameter, buffer, argument or number.

    Raises:
        CaptureError: if its current value cannot be passed to a program.
    """
    if not isinstance(tensor, Tensor):
        raise CaptureError(
            f"`forward` computes with {tensor!r}, a number that is drawn or changes in each call:"
            " draw with `torch`, or pass it as a tensor"
        )
    if tensor.requires_grad:
        raise CaptureError(
            "`forward` reads a tensor of an earlier call that requires a gradient: `detach()` it"
        )
    if tensor.is_meta:
        raise CaptureError(
            "`forward` reads a tensor on the meta device that is no parameter, buffer or argument:"
            " register it as a buffer"
        )
