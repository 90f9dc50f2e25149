"""Workarounds for two bugs of the worker threads of gloo process groups (PyTorch 2.11 to 2.13).

Both bugs crash the process; neither affects results.
"""

from __future__ import annotations

import atexit
import time
from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from shardwright.core.runtime.sent_dtypes import sent_dtype
from shardwright.core.torch_internals.distributed import functional_collectives


def apply_workarounds() -> None:
    """Work around two crashes of gloo's worker threads in this process; idempotent."""
    _wait_for_threads_at_exit()
    _replace_cpu_all_gather_kernels()


@cache
def _wait_for_threads_at_exit() -> None:
    """Register an exit handler that waits 0.2 seconds, until worker threads have released tensors.

    A worker thread releases the tensors of its last collective some time after the collective has
    finished, and needs the GIL to do so. A thread that still waits for the GIL when the interpreter
    ends aborts the process.
    """
    # Exit handlers run while threads can still take the GIL.
    atexit.register(time.sleep, 0.2)


@cache
def _replace_cpu_all_gather_kernels() -> Library:
    """Replace the CPU kernels of functional all-gathers by kernels that gloo names `ALLGATHER`.

    After each collective, a worker thread assigns its name to a string that both worker threads
    share without a lock (`ProcessGroupGloo::runLoop`). Names of at most 15 characters are stored in
    the string itself; memory is allocated for longer names, and both threads may free the same
    memory. Of the functional collectives, only all-gathers have a longer name,
    `ALLGATHER_COALESCED`; the variant that writes to an output tensor is named `ALLGATHER`.
    """
    # The registration lasts as long as the library object, which `cache` keeps alive.
    kernels = Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in (
        ("all_gather_into_tensor", _all_gather_on_cpu),
        ("all_gather_into_tensor_coalesced", _all_gather_list_on_cpu),
    ):
        kernels.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    return kernels


def _all_gather_on_cpu(x: Tensor, size: int, name: str) -> Tensor:
    if x.is_complex():  # gloo supports no complex numbers; PyTorch's kernel does the same
        return torch.view_as_complex(
            _all_gather_on_cpu(torch.view_as_real(x.resolve_conj()), size, name)
        )
    sent = x.view(sent_dtype(x.dtype))
    out = sent.new_empty((x.shape[0] * size, *x.shape[1:]))
    gathered: Tensor = functional_collectives.all_gather_into_tensor_out(sent, size, name, out=out)
    return gathered.view(x.dtype)


def _all_gather_list_on_cpu(tensors: list[Tensor], size: int, name: str) -> list[Tensor]:
    return [_all_gather_on_cpu(x, size, name) for x in tensors]
