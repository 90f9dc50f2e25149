"""Dispatch keys of the process after a capture that fails."""

import gc

import pytest
import torch
from torch import nn

from shardwright.core.torch_internals.dispatch import preserved_dispatch_keys


def _raise_with_a_guard_in_the_frame() -> None:
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, True):
        # As in the frame that fails to print a tensor. When freed, it restores the keys of now.
        guard = torch._C._DisableFuncTorch()
        raise ValueError(f"with {type(guard).__name__}")


def test_autograd_works_after_an_error_in_a_capture_whose_frames_hold_guards() -> None:
    with pytest.raises(ValueError, match="with "), preserved_dispatch_keys(frees_frames=True):
        _raise_with_a_guard_in_the_frame()
    gc.collect()
    assert nn.Linear(2, 2)(torch.ones(1, 2)).requires_grad
