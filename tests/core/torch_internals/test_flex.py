"""`flex_attention` on the CPU, and block masks as pytree nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.flex import (
    flex_gradients_on_cpu,
    register_block_masks,
    uncompiled_flex_attention,
)


def mask_of(documents: Tensor, window: int) -> BlockMask:
    def is_kept(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[b, q] == documents[b, k]) & (q - k < window)

    return create_block_mask(is_kept, 2, None, 8, 8, device="cpu", BLOCK_SIZE=4)


def test_the_cpu_has_gradients() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with pytest.raises(NotImplementedError):
        flex_attention(q, q, q)
    with flex_gradients_on_cpu(), uncompiled_flex_attention():
        flex_attention(q, q, q).sum().backward()
    assert q.grad is not None


def test_a_mask_is_a_pytree_of_its_tensors_and_those_of_its_function() -> None:
    documents = torch.zeros(2, 8, dtype=torch.long)
    mask = mask_of(documents, 3)
    register_block_masks((mask,))
    register_block_masks((mask,))
    leaves, spec = pytree.tree_flatten(mask)
    assert leaves[-2] is documents and leaves[-1] == 3
    other = pytree.tree_unflatten([*leaves[:-2], documents + 1, 4], spec)
    assert pytree.tree_leaves(other)[-2].sum() == 16
    assert pytree.tree_structure(mask_of(documents, 4)) == spec
    assert pytree.tree_leaves(copy.deepcopy(mask))[-1] == 3


def test_a_trace_takes_the_tensors_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = torch.zeros(2, 8, dtype=torch.long)
    mask = mask_of(documents, 3)
    register_block_masks((mask,))
    compiling: Callable[[], bool] = lambda: True  # noqa: E731
    monkeypatch.setattr(torch.compiler, "is_compiling", compiling)
    assert any(leaf is documents for leaf in pytree.tree_leaves(mask))


def test_files_have_the_name_of_the_function() -> None:
    mask = mask_of(torch.zeros(2, 8, dtype=torch.long), 3)
    register_block_masks((mask,))
    spec = pytree.tree_structure((mask, 1))
    text = pytree.treespec_dumps(spec)
    assert "mask_of.<locals>.is_kept" in text
    assert pytree.treespec_loads(text) == spec
