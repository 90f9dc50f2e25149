"""Find the random operators of a model, whose results a check cannot compare."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from shardwright.core.api.trained_steps import (
    TOLERANCE,
    Differences,
    EagerTraining,
    TrainedSteps,
)
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.partition.partitioned import random_operators
from shardwright.errors import PlanError


def refuse_untagged_random_operators(graph: Graph, eager: EagerTraining) -> None:
    """Reject custom operators that draw random numbers without the tag `nondeterministic_seeded`.

    Raises:
        PlanError: if results of the eager training depend on the seed.
    """
    custom_operators = {str(op.target) for op in graph.ops if not _is_builtin_operator(op)}
    # Different with two seeds but equal with one: random numbers, and not kernels that vary from
    # run to run.
    if (
        custom_operators
        and _differs_between_seeds(eager, 0, 1)
        and not _differs_between_seeds(eager, 0, 0)
    ):
        raise PlanError(
            f"custom operator {' or '.join(f'`{each}`' for each in sorted(custom_operators))} "
            "draws random numbers, but is not tagged as random, so ranks would draw different "
            "numbers\ndefine the operator with `tags=torch.Tag.nondeterministic_seeded`"
        )


def find_random_ops(eager: EagerTraining) -> tuple[str, ...]:
    """Return the names of operators whose random numbers change outputs or gradients.

    Outputs alone do not suffice: after a layer of zeros they do not depend on an earlier dropout.
    """
    drawing = random_operators(eager.graph)
    names = tuple(op.name for op in eager.graph.ops if op.name in drawing or _has_random_tag(op))
    if not names:
        return ()
    return names if _differs_between_seeds(eager, 0, 1) else ()


def _differs_between_seeds(eager: EagerTraining, *seeds: int) -> bool:
    """Whether training runs with two seeds differ."""
    first, second = (_train_with_seed(eager, seed) for seed in seeds)
    return Differences.between(first, second).largest > TOLERANCE


def _train_with_seed(eager: EagerTraining, seed: int) -> TrainedSteps:
    torch.manual_seed(seed)
    # A copy, so that all runs start from the same state.
    steps, _ = replace(eager, module=copy.deepcopy(eager.module)).run()
    return steps


def _is_builtin_operator(op: Op) -> bool:
    # Targets without a namespace are no operators of a library.
    return getattr(op.target, "namespace", "aten") in ("aten", "shardwright")


def _has_random_tag(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())
