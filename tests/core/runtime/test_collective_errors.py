"""What is said of the place where communication failed; real ranks hang in `test_faults.py`."""

import re

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.parallel.simulate_ranks import simulate
from shardwright.core.runtime import buckets, collectives
from shardwright.core.runtime.collective_errors import (
    ProgramLine,
    naming_redistributions,
    program_line,
)
from shardwright.errors import CommunicationError

SOURCE_VARIABLE = """def program(parameters, buffers, inputs, seed):
    x_1 = all_gather_dim0_a(x); del x
    # net.first: b over a; with net.first.bias
    net_first = aten.linear.default(x_1, w); del x_1, w
    y = slice_dim0_a(net_first)
    return [y], []
"""


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().sum()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (2, "`x_1 = all_gather_dim0_a(x)` (line 2 of the program, net.first)"),
        (4, "`net_first = aten.linear.default(x_1, w)` (line 4 of the program, net.first)"),
        (5, "`y = slice_dim0_a(net_first)` (line 5 of the program)"),
    ],
)
def test_a_place_is_told_by_its_line_and_its_operator(line: int, said: str) -> None:
    assert str(ProgramLine(SOURCE_VARIABLE, line)) == said


def test_a_long_line_is_cut() -> None:
    text = f"def program():\n    {', '.join(f'name_{n}' for n in range(100))} = finish(bucket)\n"
    assert len(str(ProgramLine(text, 2))) < 160


def fail(x: torch.Tensor, *_: object) -> torch.Tensor:
    raise RuntimeError("[/a/place/in/gloo.cc:78] Timed out waiting 5ms for recv operation")


def failing_plan() -> tuple[Loss, torch.Tensor, sw.Plan]:
    net, x = Loss(), torch.ones(4, 4)
    return net, x, sw.plan(net, (x,), devices=2, mode="data_parallel")


def run(net: Loss, x: torch.Tensor, plan: sw.Plan) -> None:
    assert plan.graph is not None
    gradients = [torch.ones(())]
    parameters = dict(net.named_parameters())
    simulate(plan.partitioned, parameters, {}, [x], output_gradients=gradients)


def test_an_error_of_a_collective_names_the_redistribution(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, plan = failing_plan()
    run(net, x, plan)
    monkeypatch.setattr(collectives, "wait", fail)
    said = (
        r"^communication failed in `sum_1 = all_reduce_dp\(sum\)` \(line \d+ of the program\), as "
        r"another rank has ended or does not respond: Timed out waiting 5ms for recv operation\n"
    )
    with pytest.raises(CommunicationError, match=said), naming_redistributions():
        run(net, x, plan)


def test_an_error_of_a_bucket_names_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, plan = failing_plan()
    monkeypatch.setattr(buckets, "complete", fail)
    said = r"^communication failed in bucket 0 of layer\.weight, layer\.bias, as .*: Timed out"
    with pytest.raises(CommunicationError, match=said), naming_redistributions():
        run(net, x, plan)


def test_an_error_of_something_else_is_left_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes$") as caught, naming_redistributions():
        raise RuntimeError("shapes")
    assert caught.type is RuntimeError


def collective(text: str) -> None:
    """An error from within torch.distributed."""
    inside = {"__name__": "torch.distributed.distributed_c10d", "text": text}
    exec("def wait():\n    raise RuntimeError(text)", inside)
    inside["wait"]()  # type: ignore[operator]


@pytest.mark.parametrize(
    "reason",
    [
        "Connection closed by peer [127.0.0.1]:2345",
        "Timed out waiting 3000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "wait timeout after 3000ms, keys: /0",
        "Broken pipe",
    ],
)
def test_another_rank_that_is_gone_outside_of_programs_is_told_with_who_waited(reason: str) -> None:
    said = (
        r"^communication failed in `collective` \(.*test_collective_errors.py, line \d+\), as "
        rf"another rank has ended or does not respond: {re.escape(reason)}\n"
    )
    with pytest.raises(CommunicationError, match=said), naming_redistributions():
        collective(f"[/a/place/in/gloo.cc:78] {reason}")


def test_a_collective_inside_a_known_call_is_named_by_the_call_and_its_line() -> None:
    said = "communication failed in parallelize 1 .train.py, line 7., as .*\n.* make the same calls"
    call = naming_redistributions("parallelize 1 (train.py, line 7)")
    with pytest.raises(CommunicationError, match=said), call:
        collective("Connection closed by peer")


def test_a_collective_that_is_called_wrongly_is_not_blamed_on_others() -> None:
    with pytest.raises(RuntimeError, match="contiguous") as caught, naming_redistributions():
        collective("Tensors must be contiguous")
    assert caught.type is RuntimeError


def test_outside_a_program_there_is_no_place() -> None:
    assert program_line() is None
