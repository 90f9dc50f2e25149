"""Count the bytes that simulated ranks send."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.core.torch_internals.dispatch import TorchDispatchMode, in_backward_pass
from shardwright.core.torch_internals.distributed import group_named, is_collective


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes that one device sends in collectives.

    `backward` counts bytes of collectives that autograd calls in a backward pass; `sent` counts
    all.

    Bytes are counted for ring algorithms (Thakur et al., 2005) over p ranks: all-gather (p-1)/p of
    the result, reduce-scatter (p-1)/p of the input, all-reduce twice that, all-to-all (p-1)/p of
    the tensor, a permutation the full tensor.
    """

    sent = 0
    backward = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_collective(func):
            num_bytes = sent_bytes(func.__name__.split(".")[0], args)
            self.sent += num_bytes
            # The program of a step has forward and backward passes of all micro-batches in one run.
            if in_backward_pass():
                self.backward += num_bytes
        return func(*args, **(kwargs or {}))


def sent_bytes(collective: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that one device sends in a functional collective, rounded up.

    Args:
        collective: name of the operator in `_c10d_functional`.
        args: arguments of the operator: the local tensor first, then sizes or the group's name.
    """
    if collective == "wait_tensor":
        return 0
    tensor: Tensor = args[0]
    local = int(tensor.numel() * tensor.element_size())
    if collective == "all_gather_into_tensor":
        # The argument is the local shard, 1/p of the result.
        return local * int(args[1] - 1)
    # Arguments are (tensor, op, group size, group).
    if collective == "reduce_scatter_tensor":
        return -(-int(args[2] - 1) * local // int(args[2]))
    if collective in ("all_reduce", "all_reduce_"):
        size = _get_group_size(args[2])
        return -(-2 * (size - 1) * local // size)
    assert collective == "all_to_all_single", collective
    size = len(args[2])
    # Unequal split sizes are a permutation or an all-to-all of uneven blocks, where a rank may keep
    # nothing: an upper bound.
    equal = all(isinstance(s, int) for s in args[2]) and len(set(args[2])) == 1
    return -(-(size - 1) * local // size) if equal else local


def _get_group_size(name: str) -> int:
    return int(group_named(name).size())
