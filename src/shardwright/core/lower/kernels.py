"""Kernels: functions that compute operators on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.partition.communication import Communication, InnerReduction
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts, LocalSharding, Reduce, ShardingRule
from shardwright.core.runtime.accelerator import forked_generators
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.equal_replicas import EqualReplicas
from shardwright.core.runtime.kernel_collectives import bound_reduction
from shardwright.core.runtime.named_ranges import wrap_reduction
from shardwright.core.torch_internals.operators import OpOverload, schema_of


@dataclass
class Kernels:
    """Kernels of a program's operators, created at first use."""

    devices: Devices
    cuts: Mapping[str, Cuts]
    communication: Communication
    _kernels: dict[Op, Callable[..., Any]] = field(default_factory=dict)

    def of(self, op: Op) -> Callable[..., Any]:
        """Return the function that computes `op` on local tensors.

        It is the kernel of the sharding rule, or `op.target` if the rule has no kernel or `op` is
        not sharded.
        """
        if op not in self._kernels:
            self._kernels[op] = op.target
            rule, is_cut = rule_of(op), any(self.cuts.get(op.name, {}).values())
            # An operator that is not sharded runs unchanged, bitwise as on one device.
            if rule is not None and rule.kernel is not None and is_cut:
                self._kernels[op] = rule.kernel(op, self._make_local_sharding(op, rule))
            # Whether it is sharded or not: its results are compared between replicas.
            if isinstance(op.target, LocalCall):
                self._kernels[op] = self._make_local_map_kernel(op, op.target.name)
        return self._kernels[op]

    def _make_local_map_kernel(self, op: Op, name: str) -> Callable[..., Any]:
        """Return the kernel of a `local_map` operator.

        The kernel checks (`EqualReplicas`) that results are equal on ranks along axes that do not
        shard the operator.
        """
        function, device_matrix = self._kernels[op], self.devices.matrix.device_matrix
        cut_axes = {axis for axes in self.cuts.get(op.name, {}).values() for axis in axes}
        axes = tuple(axis for axis in range(len(device_matrix)) if axis not in cut_axes)
        # On one device the generator of PyTorch draws, as for the original model.
        if isinstance(function, LocalCall) and function.random and self.devices.is_distributed:
            function = function.with_seeded_backward(forked_generators)
        # Without process groups, a program is only printed or dry-run.
        if axes and self.devices.connected:
            function = EqualReplicas(function, self.devices.group(axes), name)
        # `local_map` runs the user's code unchanged, which Dynamo may not support.
        disable: Any = torch.compiler.disable
        disabled: Callable[..., Any] = disable(function, reason=f"{name} is a local_map")
        return disabled

    def _make_local_sharding(self, op: Op, rule: ShardingRule) -> LocalSharding:
        cuts, layouts = self.cuts.get(op.name, {}), self.communication.initial_layouts
        functions = tuple(
            self._bind_reduction(inner) for inner in self.communication.reductions.get(op.name, ())
        )
        return LocalSharding(
            shard_counts=rule.shard_counts(self.devices.matrix, cuts),
            index=lambda factor: self.devices.index(tuple(cuts.get(factor, ()))),
            output_shapes=tuple(layouts[value].shard_shape(value.shape) for value in op.outputs),
            reduce=functions,
        )

    def _bind_reduction(self, inner: InnerReduction) -> Reduce:
        reduction, axes = inner.reduction, inner.axes
        reduce = bound_reduction(self.devices, axes, reduction)
        if self.devices.named_ranges:
            return wrap_reduction(reduce, reduction, axes, self.devices.matrix)
        return reduce


def returns_many(op: Op) -> bool:
    """Whether the operator returns a sequence of tensors, possibly of length 1."""
    if isinstance(op.target, OpOverload):
        returns = schema_of(op.target).returns
        # `split` returns a list, also one of a single tensor.
        return len(returns) > 1 or str(returns[0].type) == "List[Tensor]"
    return len(op.outputs) > 1


def returns_nones(op: Op) -> bool:
    """Whether the operator may return None instead of a tensor.

    A backward operator returns None for an input that needs no gradient.
    """
    if not isinstance(op.target, OpOverload):
        return False
    returns = schema_of(op.target).returns
    # The schema has a result for every input, and the graph only the tensors.
    return all(str(r.type) == "Tensor" for r in returns) and len(returns) != len(op.outputs)


def drop_nones(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Run `function(*args, **kwargs)`, and return its results that are not None."""
    return tuple(result for result in function(*args, **kwargs) if result is not None)
