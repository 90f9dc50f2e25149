"""Run `flex_attention` without `torch.compile` and with gradients on the CPU, and pass `BlockMask`s
as arguments of calls, by making them pytree nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree


@contextmanager
def flex_gradients_on_cpu() -> Iterator[None]:
    """Return a context in which `flex_attention` has gradients on the CPU.

    PyTorch raises an error as its compiler has no CPU kernel for gradients; its eager
    implementation computes gradients on all devices.
    """

    def accept(query: Tensor, key: Tensor, value: Tensor) -> None:
        """Replacement of PyTorch's device check that accepts tensors on all devices."""

    before = flex_attention._validate_device
    flex_attention._validate_device = accept
    try:
        yield
    finally:
        flex_attention._validate_device = before


@contextmanager
def uncompiled_flex_attention() -> Iterator[None]:
    """Return a context in which `flex_attention` calls its operator without `torch.compile`."""
    before = flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


_SERIALIZED = "torch.nn.attention.flex_attention.BlockMask"


@dataclass(frozen=True, eq=False)
class MaskContext:
    """The pytree context of a `BlockMask`: its contents besides tensors.

    Args:
        description: name of the mask function, sequence lengths and block size, as text.
        context: PyTorch's own context, with the code and the constants of the mask function; None
            if read from a file.
    """

    description: str
    context: Any = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskContext):
            return NotImplemented
        # Read from a file, which has no code of the mask function.
        if self.context is None or other.context is None:
            return self.description == other.description
        return bool(self.context == other.context)

    def __hash__(self) -> int:
        return hash(self.description)


def register_block_masks(value: Any) -> None:
    """Register `BlockMask` as a pytree node if a call or a serialized structure contains one.

    The leaves of a `BlockMask` are its tensors and the tensors that its mask function refers to.

    Args:
        value: a pytree, or the text of a serialized `TreeSpec`.
    """
    is_needed = isinstance(value, str) and _SERIALIZED in value
    if is_needed or any(type(leaf) is BlockMask for leaf in _pytree.tree_leaves(value)):
        # PyTorch raises an error for a class that is registered twice.
        if BlockMask in _pytree.SUPPORTED_NODES:
            return
        _pytree.register_pytree_node(
            *(BlockMask, _flatten_block_mask, _unflatten_block_mask),
            serialized_type_name=_SERIALIZED,
            # The context of PyTorch has the code of the mask function, which has no text.
            to_dumpable_context=lambda context: json.dumps(context.description),
            from_dumpable_context=lambda text: MaskContext(json.loads(text)),
            flatten_with_keys_fn=_flatten_block_mask_with_keys,
        )


def _flatten_block_mask(mask: BlockMask) -> tuple[list[Any], MaskContext]:
    if not vars(mask):
        # `deepcopy` has just created this copy.
        return [], MaskContext("", mask)
    # During a trace PyTorch leaves the mask function's tensors in the context, as constants.
    with patch.object(torch.compiler, "is_compiling", lambda: False):
        leaves, context = mask._flatten()
    # A callable object or `functools.partial` has no `__qualname__`.
    name = getattr(mask.mask_mod, "__qualname__", type(mask.mask_mod).__qualname__)
    return list(leaves), MaskContext(f"{name} {mask.seq_lengths} {mask.BLOCK_SIZE}", context)


def _flatten_block_mask_with_keys(
    mask: BlockMask,
) -> tuple[list[tuple[Any, Any]], MaskContext]:
    leaves, context = _flatten_block_mask(mask)
    return [(_pytree.SequenceKey(i), leaf) for i, leaf in enumerate(leaves)], context


def _unflatten_block_mask(leaves: Any, context: MaskContext) -> BlockMask:
    # The copy that `deepcopy` had just created is its own context.
    if isinstance(context.context, BlockMask):
        return context.context
    return BlockMask._unflatten(tuple(leaves), context.context)
