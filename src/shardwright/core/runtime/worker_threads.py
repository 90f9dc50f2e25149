"""What the two worker threads of a gloo process group do wrong, and how programs avoid it.

Both faults are PyTorch's (2.11 to 2.13), and both end the process; no value is ever changed.
"""

from __future__ import annotations

import atexit
import time
from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from shardwright.core.torch_internals.distributed import functional_collectives


def make_safe() -> None:
    """Avoids both faults in this process; further calls do nothing."""
    _let_threads_finish_at_exit()
    _gather_under_a_short_name()


@cache
def _let_threads_finish_at_exit() -> None:
    """A worker thread of gloo drops the tensors of its last collective some time after that has
    ended, and needs the interpreter's lock for it; one that still waits for the lock when the
    interpreter ends aborts the process. So the end of the program leaves them a moment."""
    atexit.register(time.sleep, 0.2)


@cache
def _gather_under_a_short_name() -> Library:
    """Has functional all-gathers of host tensors run under a name of at most 15 characters.

    After each collective, a worker thread notes its name in a string that both threads share and
    no lock guards (`ProcessGroupGloo::runLoop`). A longer name lies on the heap, where both may
    free the same memory. Of the functional collectives only all-gathers have such a name,
    `ALLGATHER_COALESCED`; the variant that writes to a given tensor is called `ALLGATHER`.
    """
    kernels = Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in (
        ("all_gather_into_tensor", _all_gather),
        ("all_gather_into_tensor_coalesced", _all_gather_each),
    ):
        kernels.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    return kernels


def _all_gather(x: Tensor, size: int, name: str) -> Tensor:
    if x.is_complex():  # gloo has no complex numbers; PyTorch's own kernel sends them so too.
        return torch.view_as_complex(_all_gather(torch.view_as_real(x.resolve_conj()), size, name))
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    gathered: Tensor = functional_collectives.all_gather_into_tensor_out(x, size, name, out=out)
    return gathered


def _all_gather_each(tensors: list[Tensor], size: int, name: str) -> list[Tensor]:
    return [_all_gather(x, size, name) for x in tensors]
