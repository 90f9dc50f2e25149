"""Steps of which one collective does two: on a plan that the search finds by itself."""

import shardwright as sw
from random_plans import random_plan
from sample_models import mlp
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.redistribution import joined_step, redistribution_steps
from shardwright.core.partition.communication import communication

MESH = Layout((2, 2), ("a", "b"))


def test_two_all_to_alls_in_a_row_are_one_step_with_fewer_bytes() -> None:
    source, target = MESH("a", "b"), MESH("None", ("a", "b"))
    first, second = redistribution_steps(source, target, (8, 8))
    assert first.operation == second.operation == "all_to_all"
    step = joined_step(first, second, (8, 8), 4)
    assert step is not None
    assert (step.operation, step.source, step.target) == ("all_to_all_v", source, target)
    # Of a block of 64 bytes half and then three quarters; all of it at once.
    assert first.forward_bytes((8, 8), 4) + second.forward_bytes((8, 8), 4) == 32 + 48
    assert step.forward_bytes((8, 8), 4) == step.backward_bytes((8, 8), 4) == 64


def test_steps_of_other_kinds_are_not_joined() -> None:
    first, second = redistribution_steps(MESH("a", "b"), MESH("None", "None"), (8, 8))
    assert joined_step(first, second, (8, 8), 4) is None


def test_a_plan_that_exchanges_in_one_step_computes_as_one_device() -> None:
    net, args, kwargs = mlp()
    graph = sw.capture(net, args, kwargs)
    plan = random_plan(graph, 8, seed=0)
    flow = communication(graph, plan.mesh, plan.decisions)
    assert "all_to_all_v" in [transfer.step.operation for transfer in flow.transfers]
    result = sw.check(net, args, kwargs, plan)
    assert result.passes(1e-9), str(result)
    assert result.counted_bytes == result.planned_bytes
