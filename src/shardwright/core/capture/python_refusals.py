"""Checks of the side effects of a traced call on Python objects and tensors of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwright.core.torch_internals.dynamo import DynamoCapture
from shardwright.core.torch_internals.modules import own_buffers, own_modules, own_parameters
from shardwright.errors import CaptureError


def module_slots(module: nn.Module) -> dict[str, Any]:
    """Return a model's registered parameters, buffers and submodules by path, None entries too."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, submodule in module.named_modules()
        for registry in (own_parameters(submodule), own_buffers(submodule), own_modules(submodule))
        for name, value in registry.items()
    }


def assigned_buffers(
    before: Mapping[str, Any], after: Mapping[str, Any], output_indices: Mapping[int, int]
) -> dict[str, int]:
    """Return the outputs of Dynamo's graph that a call assigns to buffers.

    Args:
        before: parameters, buffers and submodules (`module_slots`) before the call.
        after: parameters, buffers and submodules after the call.
        output_indices: index of each output of Dynamo's graph, by `id()` of its tensor.

    Returns:
        Indices of outputs, by path of the buffer.

    Raises:
        CaptureError: if the call changes a parameter or submodule, or removes a buffer.
    """
    # Not None, which is the entry of an absent bias.
    missing = object()
    changed = [
        name
        for name in {**before, **after}
        if before.get(name, missing) is not after.get(name, missing)
    ]
    for name in changed:
        old = before.get(name)
        # `old` is None for a name that the call registers.
        if not isinstance(old, Tensor) or isinstance(old, nn.Parameter):
            raise CaptureError(
                f"`forward` registers or replaces {name!r}\nregister it before `plan`"
            )
        if id(after.get(name)) not in output_indices:
            raise CaptureError(
                f"`forward` removes the buffer {name!r}, or assigns to the buffer a tensor that"
                " `forward` did not compute\nassign a new tensor, or use a plain attribute"
            )
    return {name: output_indices[id(after[name])] for name in changed}


def check_changes(dynamo: DynamoCapture) -> None:
    """Check the Python objects that a call changes.

    Raises:
        CaptureError: if TorchDynamo would change an object in another way than Python.
    """
    for name in dynamo.impure_caches:
        raise CaptureError(
            f"`forward` calls {name!r} under `functools.lru_cache`, but the function draws random"
            " numbers or changes objects, or its cached result is modified\n"
            "remove `lru_cache` from the function"
        )


def check_state(tensor: Any) -> None:
    """Check an input of Dynamo's graph that is not a parameter, buffer, argument or number.

    Raises:
        CaptureError: if its value cannot be passed to the captured program in each call.
    """
    if not isinstance(tensor, Tensor):
        raise CaptureError(
            f"`forward` computes with {tensor!r}, a Python number that is random or changes in "
            "each call\ndraw it with `torch`, or pass it as a tensor"
        )
    if tensor.requires_grad:
        raise CaptureError(
            "`forward` reads a tensor that an earlier call computed and that requires a gradient\n"
            "store it without a gradient: `self.last = x.detach()`"
        )
    if tensor.is_meta:
        raise CaptureError(
            "`forward` reads a tensor on the meta device that is not a parameter, buffer or "
            "argument\nregister it: `self.register_buffer(name, tensor)`"
        )
