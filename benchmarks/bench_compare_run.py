"""The automatic plan against expert configurations, measured

Tiny variants of three language models, parallelized in all alternatives over 8 local processes with
gloo: a launch for each model, in which its alternatives take turns, so that other load on the
machine affects all alike. *Predicted*: step time for the cluster `local`, calibrated with as many
processes. *Speedup*: over the expert's plan in the same round, median and quartiles. *ρ*:
Spearman's correlation of predicted and measured step times: 1 if the prediction ranks the
alternatives in the measured order. Steps this small are dominated by latency and overhead. Goals:
each alternative predicted within 25% of what is measured, ρ of at least 0.8 for each model, and
auto not slower than its expert within the quartiles.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample
from shardwright.run.launch.log_folder import LogFolder
from shardwright.tools.compare import AUTO, MeasuredComparison, compare_measured

MODELS = ("llama2_7b", "qwen_7b", "pangualpha_13b")
PROCESSES = 8
LEAST, MOST_OFF = 0.8, 0.25
"""Of ρ, and of a prediction."""


def run(size: Size = Size.DEFAULT) -> list[Table]:
    names, rounds = size.of((MODELS[:1], 5), full=(MODELS, 10))
    experts = [ROOT / "configs" / f"{name}_expert.yaml" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        logs = LogFolder(Path(folder))
        found = compare_measured(experts, logs, devices=PROCESSES, rounds=rounds)
    return [table(each, rounds) for each in found]


def table(found: MeasuredComparison, rounds: int) -> Table:
    """A row for each way, and what is missed."""
    shown = Table(
        f"{found.model}: {found.batch} × {found.seq_length} tokens on {found.processes} processes,"
        f" {rounds} rounds; ρ = {found.correlation:.2f}",
        ("data · tensor · pipeline parallel", "predicted, ms", "measured, ms", "ratio", "speedup"),
    )
    for each in found.runs:
        low, high = Sample(each.seconds).quartiles
        slower, middle, faster = found.speed_ups(each)
        shown.add(
            " = ".join(each.names),
            f"{1e3 * each.predicted:.0f}",
            f"{1e3 * each.median:.0f} ({1e3 * low:.0f}–{1e3 * high:.0f})",
            f"{each.ratio:.2f}",
            f"{middle:.0%} ({slower:.0%}–{faster:.0%})",
        )
        if abs(each.ratio - 1) > MOST_OFF:
            shown.missed.append(
                f"{found.model}: {each.names[0]} is predicted in {each.ratio:.2f} of its time"
            )
    if not found.correlation >= LEAST:
        shown.missed.append(f"{found.model}: ρ is {found.correlation:.2f}")
    _, _, faster = found.speed_ups(found.run(AUTO))
    if faster < 1:
        shown.missed.append(f"{found.model}: auto has {faster:.0%} of its expert's speed at most")
    return shown
