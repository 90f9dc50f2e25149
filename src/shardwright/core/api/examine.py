"""List which operators of a model have a sharding rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import Tensor, nn

from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph
from shardwright.core.planner.pipeline import Pipeline
from shardwright.core.rules import rule_of


@dataclass(frozen=True)
class Examination:
    """Summary of the operators of a model before planning.

    Args:
        operators: number of operators.
        main: names of the operators whose sharding the search chooses by cost.
        without_rule: name and target of each operator without a sharding rule, which is replicated.
        parameters: number of elements of all parameters.
    """

    operators: int
    main: tuple[str, ...]
    without_rule: tuple[tuple[str, str], ...]
    parameters: int

    def __str__(self) -> str:
        lines = [
            f"{self.operators} operators, {len(self.main)} of them main, "
            f"{self.parameters:,} parameters"
        ]
        if self.without_rule:
            lines.append("no sharding rule, computed in full on every device:")
            lines += [f"  {name}: {target}" for name, target in self.without_rule]
        else:
            lines.append("every operator has a sharding rule")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def examine(
    net: nn.Module | Graph, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Examination:
    """List which operators of a model have a sharding rule, without planning.

    Args:
        net: a model, or a captured graph.
        args, kwargs: example arguments of the model; only shapes and dtypes matter.

    Raises:
        CaptureError: if the model cannot be captured.
    """
    # A `Pipeline` adds no operators to the model.
    net = net.net if isinstance(net, Pipeline) else net
    graph = net if isinstance(net, Graph) else capture(net, args, kwargs)
    rules = [(op, rule_of(op)) for op in graph.ops]
    return Examination(
        operators=len(graph.ops),
        main=tuple(op.name for op, rule in rules if rule is not None and rule.main is not None),
        without_rule=tuple((op.name, str(op.target)) for op, rule in rules if rule is None),
        # The graph lists tied parameters once.
        parameters=sum(value.numel for value in graph.parameters),
    )


class WithLoss(nn.Module):
    """A model and its loss as one module: `forward(x, y) = loss_fn(net(x), y)`.

    Args:
        net: the model.
        loss_fn: function or module that returns the scalar loss, given outputs and targets.
    """

    def __init__(self, net: nn.Module, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss_fn = loss_fn

    def forward(self, x: Any, y: Any) -> Tensor:
        return self.loss_fn(self.net(x), y)
