"""How fast data × tensor × pipeline parallel can be at most, before it is planned."""

from __future__ import annotations

from itertools import islice
from math import prod

from shardwright.axes import axis_names, prime_factors
from shardwright.compare.ways import Parts
from shardwright.cost.cluster import Cluster
from shardwright.cost.flops import work_of
from shardwright.cost.links import Links
from shardwright.graph.graph import Graph
from shardwright.layout import Layout
from shardwright.models.expert import ROW


def least_seconds(graph: Graph, cluster: Cluster, parts: Parts, micro_batches: int) -> float:
    """Seconds that a step takes at least: matrix products that all devices share equally, and the
    all-reduce behind each linear layer that `models.expert` cuts along its inputs, forward and
    backward. An average stage computes all micro-batches, and waits while the others compute one of
    them besides, unless devices share a processor.

    Args:
        graph: captured with one micro-batch.
    """
    data, model, stages = parts
    device = cluster.device.among(prod(parts))
    outer, inner = prime_factors(data), prime_factors(model)
    mesh = Layout((*outer, *inner), tuple(islice(axis_names(), len(outer) + len(inner))))
    links, axes = Links(cluster, mesh, stages), range(len(outer), len(outer) + len(inner))
    seconds = 0.0
    for op in graph.ops:
        work = work_of(op)
        flops = work.forward_flops + work.backward_flops
        if flops:
            seconds += flops / data / model / device.rate(work.dtype)
        if flops and op.module.rpartition(".")[2] in ROW:
            sent = op.output.numel * op.output.itemsize / data
            passes = 2 if op.inputs[0].requires_grad else 1
            seconds += passes * links.seconds("all_reduce", axes, sent)
    waiting = 0 if cluster.device.shared(prod(parts)) else stages - 1
    return (micro_batches + waiting) * seconds / stages
