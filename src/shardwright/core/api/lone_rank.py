"""Run one rank of a process group in a single process, with fake communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.cost.tensor_tracking import LiveBytes
from shardwright.core.parallel.byte_counter import sent_bytes
from shardwright.core.runtime.accelerator import CPU
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.distributed import (
    FAKE,
    FakeStore,
    is_collective,
    is_group_call,
)
from shardwright.errors import PlanError

COLLECTIVE_NAMES = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "allreduce_": "all-reduce",
    "send": "send to a stage",
}


@dataclass(frozen=True)
class Traffic:
    """Number of calls of one type of collective, and the bytes that this rank sends in these calls.

    Args:
        calls: number of calls.
        bytes: bytes that this rank sends in all calls.
    """

    calls: int = 0
    bytes: int = 0


@contextmanager
def fake_process_group(rank: int, size: int, device: torch.device = CPU) -> Iterator[None]:
    """Context manager with a fake process group, in which only this process runs.

    No process group is created for `size` 1.

    Args:
        rank: the rank of this process.
        size: number of ranks.
        device: device of the tensors that are sent.

    Raises:
        PlanError: if a process group is running.
    """
    if dist.is_initialized():
        raise PlanError(
            "`sw.rehearse` cannot run while a process group is initialized\n"
            "rehearse before `init_process_group`, or after `destroy_process_group`"
        )
    if size == 1:
        yield
        return
    devices = dist.Backend.backend_capability[FAKE]
    if device.type not in devices:  # `send` and `recv` of pipeline stages need a backend for it.
        devices.append(device.type)
    dist.init_process_group(FAKE, store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class LoneRank(LiveBytes):  # type: ignore[no-untyped-call]
    """Dispatch mode that computes every collective as if all ranks had this rank's data.

    Reading a value of a meta tensor returns 1, or False for a boolean.

    Attributes:
        traffic: calls and bytes sent of each collective, in the most recent call of a function
            wrapped by `counted`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic: dict[str, Traffic] = {}
        self._counts = self._tracks = False

    def track(self, tensors: list[Tensor], category: str) -> None:
        """Start to track the live bytes of `tensors` and of all tensors created later.

        Args:
            tensors: existing tensors.
            category: memory category of `tensors`.
        """
        self._tracks = True
        self.watch(tensors, category)

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to count the collectives of its latest call in `traffic`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            # Anew in each call, so that `traffic` is that of one training step.
            self.traffic, self._counts = {}, True
            try:
                return function(*args, **kwargs)
            finally:
                self._counts = False

        return call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            # The operators on local tensors that DTensor calls are dispatched to this mode.
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__.partition(".")[0]
        if is_collective(func):
            # A collective has no kernel for the meta device, so its result is computed here.
            self._count_communication(name, args)
            return _make_collective_result(name, args)
        if is_group_call(func):
            return self._run_on_fake_group(func, name, args, kwargs)
        # Code that reads a value, such as a norm for clipping, gets a placeholder in place of the
        # error that meta tensors raise.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return _make_placeholder_values((), args[0].dtype).item()
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            return _copy_meta_tensor(args[0], kwargs)
        return func(*args, **kwargs)

    def _track_operator_result(self, out: Tensor, args: tuple[Any, ...]) -> None:
        if self._tracks:
            super()._track_operator_result(out, args)

    def _count_communication(self, name: str, args: tuple[Any, ...]) -> None:
        collective = COLLECTIVE_NAMES.get(name)
        if collective is None or not self._counts:
            return
        previous = self.traffic.get(collective, Traffic())
        sent = previous.bytes + _count_sent_bytes(name, args)
        self.traffic[collective] = Traffic(previous.calls + 1, sent)

    def _run_on_fake_group(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a `c10d` operator, such as `send`, on the fake group."""
        self._count_communication(name, args)
        # The fake group has no kernels for the meta device, and never reads tensors.
        cpu_args = pytree.tree_map_only(Tensor, lambda t: torch.empty(0) if t.is_meta else t, args)
        result = func(*cpu_args, **kwargs)
        if name in ("recv_", "broadcast_"):
            for tensor in args[0]:
                # Integers are votes by which PyTorch's stages agree on shapes: 1 means yes.
                tensor.fill_(0 if tensor.is_floating_point() else 1)
        return result


def _count_sent_bytes(name: str, args: tuple[Any, ...]) -> int:
    if name == "send":
        # Messages between stages are sent in full, once.
        return sum(tensor.nbytes for tensor in args[0])
    if name == "allreduce_":
        size = dist.ProcessGroup.unbox(args[1]).size()
        # A ring all-reduce sends 2 (size - 1) / size of the tensor; rounded up.
        return sum(-(-2 * (size - 1) * tensor.nbytes // size) for tensor in args[0])
    return sent_bytes(name, args)


def _make_collective_result(name: str, args: tuple[Any, ...]) -> Tensor:
    """Return the result of a functional collective for equal tensors on all ranks."""
    x: Tensor = args[0]
    if name in ("wait_tensor", "all_reduce_"):
        return x
    # All ranks have this rank's data, so the gathered tensor repeats it.
    if name == "all_gather_into_tensor":
        return x.repeat(args[1], *[1] * (x.ndim - 1))
    # The first chunk in place of this rank's chunk: only the shape matters.
    if name == "reduce_scatter_tensor":
        return x.chunk(args[2])[0].clone()
    if name == "all_to_all_single":
        # Numbers of received and sent rows may differ, as in a dispatch to experts.
        rows = sum(args[1])
        out = x.new_zeros(rows, *x.shape[1:])
        copied_rows = min(rows, x.shape[0])
        out[:copied_rows] = x[:copied_rows]
        return out
    return x.clone()


def _copy_meta_tensor(tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
    device = torch.device(kwargs.get("device") or "meta")
    if device.type == "meta":
        out: Tensor = torch.ops.aten._to_copy.default(tensor, **kwargs)
        return out
    return _make_placeholder_values(tensor.shape, kwargs.get("dtype") or tensor.dtype)


def _make_placeholder_values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of ones, or of False for booleans, to read in place of a meta tensor.

    A boolean that a program reads is usually the result of a check whether values differ between
    ranks; False passes the check.
    """
    return torch.full(shape, 0 if dtype == torch.bool else 1, dtype=dtype)
