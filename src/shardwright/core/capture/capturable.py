"""Checks of a model and the arguments of its call before capture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.flex import register_block_masks
from shardwright.errors import CaptureError, has_control_characters
from shardwright.plain_data import short_repr


def check_capturable(module: object, args: object, kwargs: object) -> None:
    """Check the model and the arguments of a call before capture.

    Raises:
        CaptureError: if `module` is not an `nn.Module`, `args` not a tuple, `kwargs` not a mapping
            of names, `forward` cannot be called with these arguments, or an argument is not
            supported (`check_argument`).
    """
    check_module(module)
    check_arguments(args, kwargs)
    assert isinstance(module, nn.Module) and isinstance(args, tuple)
    named: Mapping[str, Any] = kwargs if isinstance(kwargs, Mapping) else {}
    _check_signature(module, args, named)


def check_module(module: object) -> None:
    """Check that the model is a module whose names can be printed and written.

    Raises:
        CaptureError: if `module` is not an `nn.Module`, or the name of a submodule, parameter or
            buffer has control characters.
    """
    if isinstance(module, nn.Module):
        _check_names(module)
        return
    if inspect.isclass(module):
        what, remedy = f"the class {module.__name__}", f"pass an instance: {module.__name__}(...)"
    else:
        what = f"a {type(module).__name__}"
        remedy = "pass an nn.Module; wrap a function in the `forward` of a module"
    raise CaptureError(f"the model must be an nn.Module, not {what}\n{remedy}")


def _check_names(module: nn.Module) -> None:
    for path, owner in module.named_modules():
        named = (
            owner.named_children(),
            owner.named_parameters(recurse=False),
            owner.named_buffers(recurse=False),
        )
        for name, _ in chain.from_iterable(named):
            if has_control_characters(name):
                raise CaptureError(
                    f"{path or 'the model'}: the name {short_repr(name)} has control characters"
                    "\nrename it, such as `net.add_module('first', layer)`: plans, programs and"
                    " tables have one name per line"
                )


def check_arguments(args: object, kwargs: object) -> None:
    """Check the types of the arguments of a call.

    Raises:
        CaptureError: if `args` is not a tuple, `kwargs` not a mapping of names, or an argument is
            sparse, quantized, a numpy array or a mapping that pytree does not flatten.
    """
    if not isinstance(args, tuple):
        remedy = "write `(x,)` for one argument"
        if isinstance(args, DataLoader):
            remedy = "pass one batch of it: `tuple(next(iter(loader)))`"
        elif isinstance(args, Iterator):
            remedy = "pass one batch: `tuple(next(batches))`, or `tuple(args)` of its arguments"
        elif isinstance(args, list):
            remedy = "write `tuple(args)`, or `(args,)` if the list is one argument"
        elif isinstance(args, Mapping):
            remedy = (
                "pass named arguments as the third parameter: `plan(net, (), dict(batch), ...)`;"
                " write `(batch,)` if it is one argument"
            )
        raise CaptureError(
            "the positional arguments of a call must be a tuple, not a"
            f" {type(args).__name__}\n{remedy}"
        )
    if not isinstance(kwargs, Mapping | None):
        raise CaptureError(
            "the keyword arguments of a call must be a mapping of names, not a"
            f" {type(kwargs).__name__}\n"
            "pass positional arguments as one tuple, `(x, y)`, named ones as `{'mask': mask}`"
        )
    # Before the arguments are flattened: fields of registered objects are leaves.
    pytree.register_objects((args, dict(kwargs or {})))
    register_block_masks((args, dict(kwargs or {})))
    if unnamed := [key for key in kwargs or {} if not isinstance(key, str)]:
        raise CaptureError(
            f"the keys of keyword arguments must be strings, not {unnamed[0]!r}\n"
            "pass named arguments as `{'mask': mask}`"
        )
    for path, leaf in pytree.tree_flatten_with_path((args, dict(kwargs or {})))[0]:
        # `fake_copy` refuses nested tensors, with advice of its own.
        if not (isinstance(leaf, Tensor) and leaf.is_nested):
            check_argument(f"argument {_format_argument_path(path)}", leaf)


def check_argument(name: str, leaf: object) -> None:
    """Check a leaf of a call's arguments.

    Args:
        name: description of the leaf for the error message, such as `argument args[0]`.
        leaf: the value to check.

    Raises:
        CaptureError: if the leaf is sparse, quantized, a numpy array or a mapping that pytree does
            not flatten.
    """
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        raise CaptureError(
            f"{name} is a sparse tensor ({leaf.layout}), which cannot be sharded\n"
            "pass it dense (`x.to_dense()`), or its indices and values as two tensors"
        )
    if isinstance(leaf, Tensor) and leaf.is_quantized:
        raise CaptureError(
            f"{name} is a quantized tensor, which cannot be sharded\npass `x.dequantize()`"
        )
    if isinstance(leaf, np.ndarray):
        raise CaptureError(f"{name} is a numpy array, not a tensor\npass `torch.from_numpy(x)`")
    # pytree flattens registered mappings only; in others, tensors stay unseen.
    if isinstance(leaf, Mapping):
        raise CaptureError(
            f"{name} is a {type(leaf).__name__}, whose tensors cannot be found\n"
            "pass its entries by name, `net(**batch)`, or `dict(batch)` for one argument"
        )


def _check_signature(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that `forward` accepts these arguments.

    Raises:
        CaptureError: if `forward` cannot be called with these arguments.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return  # A `forward` written in C has no signature.
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = str(signature).partition(" ->")[0]
        raise CaptureError(
            f"{type(module).__name__}.forward{parameters} cannot be called with {len(args)}"
            f" positional and {len(kwargs)} named arguments: {error}\n"
            "pass what the training loop passes: `plan(net, (x, y), {'mask': mask}, ...)`"
        ) from None


def _format_argument_path(path: tuple[Any, ...]) -> str:
    """Format the pytree path of an argument as text, such as `args[0]` or `kwargs['mask']`."""
    (in_kwargs, *inner) = path
    where = pytree.keystr(tuple(inner))
    # The path starts with the index in (args, kwargs).
    return f"kwargs{where}" if getattr(in_kwargs, "idx", 0) else f"args{where}"
