"""A lower bound on the seconds of a step, from its computation alone.

    T >= m max(W / S, w) + (S - 1) P / C + overheads

    W      forward and backward seconds of one micro-batch on the devices of one stage, if every
           operator is cut in the fastest way for it and nothing is sent
    w      those of the longest operator, which no stage shares
    m, S   micro-batches and stages
    P, C   until the last stage computes, the first micro-batch passes through all other stages:
           seconds of its forward pass (and backward, unless weight gradients fill the end of the
           step), and number of chunks

The bound takes no search, so options whose bound exceeds the best step time are never searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.core.cost.flops import Work, work_of
from shardwright.core.cost.time_model import ForwardBackward, TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.options import PlanOptions
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import ShardingRule

MAX_COMBINATIONS = 300
"""Maximum number of ways to cut an operator that are compared; an operator with more is taken to be
divided equally over all devices."""


class StepBounds:
    """Lower bounds on step times for a graph on a cluster, with a cache.

    Args:
        graph: graph of one micro-batch.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._passes: dict[int, tuple[float, float, float]] = {}

    def min_seconds(self, options: PlanOptions) -> float:
        """Return a lower bound in seconds on the step time of all plans with `options`.

        Args:
            options: options with a cluster, a number of stages and a schedule. The bound is 0 for
                a number of stages that does not divide the devices.
        """
        stages, cluster = options.stages, options.resolved_cluster
        if not isinstance(stages, int) or options.devices % stages:
            return 0.0
        if stages not in self._passes:
            mesh = prime_mesh(options.devices // stages)
            self._passes[stages] = self._pass_seconds(TimeModel(cluster, mesh, stages))
        forward, backward, longest = self._passes[stages]
        each, micro_batches = forward + backward, options.num_micro_batches
        if stages == 1:
            return micro_batches * each
        if cluster.device.shared(options.devices):
            return micro_batches * each / stages
        schedule, device = SCHEDULES[options.schedule], cluster.device
        chunks = schedule.min_chunks
        busy = micro_batches * (max(each / stages, longest) + 2 * chunks * device.pass_overhead)
        passed = forward if schedule.splits_backward else each
        fill = (stages - 1) * passed / (stages * chunks)
        return busy + fill + device.step_overhead

    def _pass_seconds(self, model: TimeModel) -> tuple[float, float, float]:
        """Return the seconds of the forward pass, of the backward pass and of the longest operator
        in both, for one micro-batch."""
        fastest: dict[int, ForwardBackward] = {}
        forward = backward = longest = 0.0
        for op in self._graph.ops:
            work = work_of(op)
            if id(work) not in fastest:
                fastest[id(work)] = _fastest(model, work, rule_of(op))
            op_forward, op_backward = fastest[id(work)]
            forward, backward = forward + op_forward, backward + op_backward
            longest = max(longest, op_forward + op_backward)
        return forward, backward, longest


def _fastest(model: TimeModel, work: Work, rule: ShardingRule | None) -> ForwardBackward:
    """Return the seconds (forward, backward) of the fastest way to cut an operator."""
    if rule is None:
        return model.work(work, {})
    combinations = list(_shard_counts(rule, model.mesh.device_matrix))
    if not combinations:
        forward, backward = model.work(work, {})
        return forward / model.mesh.num_devices, backward / model.mesh.num_devices
    return min((model.work(work, counts) for counts in combinations), key=sum)


def _shard_counts(rule: ShardingRule, sizes: tuple[int, ...]) -> Iterator[Mapping[str, int]]:
    """Yield the numbers of shards of each factor, for each way to cut an operator over axes of
    `sizes`; nothing if there are more than `MAX_COMBINATIONS`."""
    factors = tuple(rule.factors)
    counts = {(1,) * len(factors)}
    for size in sizes:
        counts |= {
            (*each[:n], each[n] * size, *each[n + 1 :])
            for each in counts
            for n, factor in enumerate(factors)
            if rule.capacity[factor] % (each[n] * size) == 0
        }
        if len(counts) > MAX_COMBINATIONS:
            return
    for each in counts:
        yield dict(zip(factors, each, strict=True))
