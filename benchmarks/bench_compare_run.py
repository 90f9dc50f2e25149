"""The automatic plan against experts' configurations, really run

Tiny variants of three language models, each divided in all ways by 8 local processes with gloo: one
launch, in which all ways of a model take turns, so that what else the machine does hits all alike.
*Predicted*: seconds of a step for the cluster `local`, measured before with as many processes.
*SpeedUp*: over the expert's plan within a round, median and quartiles. *ρ*: Spearman's correlation
between predicted and measured seconds: 1 where the model ranks the ways in the order in which they
really ran. Steps so small are spent in latency and overhead; what counts is the order. Goal: ρ of
at least 0.8 for each model, and auto not slower than its expert within the quartiles.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.page import ROOT
from benchmarks.table import Table
from benchmarks.timing import Sample
from shardwright.compare import AUTO, RealComparison, compare_measured
from shardwright.train.launch import LogFolder

MODELS = ("llama2_7b", "qwen_7b", "pangualpha_13b")
PROCESSES, ROUNDS = 8, 10
LEAST = 0.8
"""Of ρ."""


def run() -> list[Table]:
    experts = [ROOT / "configs" / f"{name}_expert.yaml" for name in MODELS]
    with tempfile.TemporaryDirectory() as folder:
        logs = LogFolder(Path(folder))
        found = compare_measured(experts, logs, devices=PROCESSES, rounds=ROUNDS)
    return [table(each) for each in found]


def table(found: RealComparison) -> Table:
    """A row for each way, and what is missed."""
    shown = Table(
        f"{found.model}: {found.batch} × {found.seq_length} tokens on {found.processes} processes,"
        f" {ROUNDS} rounds; ρ = {found.correlation:.2f}",
        ("data · tensor · pipeline parallel", "predicted, ms", "measured, ms", "SpeedUp"),
    )
    for each in found.runs:
        low, high = Sample(each.seconds).quartiles
        slower, middle, faster = found.speed_ups(each)
        shown.add(
            " = ".join(each.ways),
            f"{1e3 * each.predicted:.0f}",
            f"{1e3 * each.median:.0f} ({1e3 * low:.0f}–{1e3 * high:.0f})",
            f"{middle:.0%} ({slower:.0%}–{faster:.0%})",
        )
    if not found.correlation >= LEAST:
        shown.missed.append(f"{found.model}: ρ is {found.correlation:.2f}")
    _, _, faster = found.speed_ups(found.run(AUTO))
    if faster < 1:
        shown.missed.append(f"{found.model}: auto has {faster:.0%} of its expert's speed at most")
    return shown
