"""The automatic plan against expert configurations, predicted

All nine language models at full size on Ascend 910B, by predicted step time. *Expert*: the data ·
model · pipeline parallelism of `configs/*_expert.yaml`. *Best of grid*: the fastest combination of
data · tensor · pipeline parallelism that fits into the memory limit of the configuration. All have
the same batch and micro-batches. *Speedup*: tokens per second of the automatic plan over those of
the expert. *Published*: the same ratio as measured by MindSpore on devices (MindFormers r1.5.0 and
r1.3.0, `docs/feature_cards/Auto_Parallel.md`). *Gap*: by what share the automatic plan costs more
at most than the best with the same device matrix and stages, by a proven lower bound. Goals: at
least 100% in each row, no alternative that fits is faster than the automatic plan, and a median gap
of at most 5%.
"""

from __future__ import annotations

from statistics import median

from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table
from shardwright.core.cost.memory import bytes_text
from shardwright.tools.compare import AUTO, EXPERT, GRID, Alternative, Comparison, compare_predicted

CLUSTER = "ascend910b"
PUBLISHED = {
    "llama2_7b": "101.2%",
    "llama2_13b": "99.8%",
    "llama2_70b": "93.5%",
    "baichuan2_7b": "97.4%",
    "baichuan2_13b": "98.0%",
    "qwen_7b": "96.2%",
    "qwen_14b": "111.3%",
    "pangualpha_2_6b": "–",
    "pangualpha_13b": "–",
}
WHOLE = 0.9995
"""What is shown as 100.0%."""

GAP_GOAL = 0.05


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table(
        "Thousand tokens/s (peak memory per device)",
        ("model", "devices", "expert", "best of grid", "auto", "gap", "speedup", "published"),
    )
    gaps = []
    for name in size.of(("llama2_7b", "pangualpha_2_6b"), full=tuple(PUBLISHED)):
        found = compare_predicted(ROOT / "configs" / f"{name}_expert.yaml", CLUSTER)
        gaps.append(add(table, found, PUBLISHED[name]))
    table.add("median", *[""] * 4, f"{median(gaps):.1%}", "", "")
    if size is Size.FULL and median(gaps) > GAP_GOAL:
        table.missed.append(f"the median gap is {median(gaps):.1%}")
    return [table]


def add(table: Table, found: Comparison, published: str) -> float:
    """Adds a row, and what it misses; the gap of the automatic plan."""
    automatic = found.of_kind(AUTO)
    assert automatic is not None and automatic.gap is not None
    alternatives = (found.of_kind(kind) for kind in (EXPERT, GRID, AUTO))
    table.add(
        *(found.model, found.devices, *map(shown, alternatives)),
        *(f"{automatic.gap:.1%}", f"{found.speed_up:.1%}", published),
    )
    if found.speed_up < WHOLE:
        table.missed.append(f"{found.model}: {found.speed_up:.1%} of the expert's speed")
    if not found.auto_is_fastest:
        table.missed.append(f"{found.model}: another way that fits is faster, or auto does not fit")
    return automatic.gap


def shown(way: Alternative | None) -> str:
    """Speed, parts and memory."""
    if way is None:
        return "–"
    parts = "" if way.parts is None else f" {'·'.join(map(str, way.parts))}"
    over = "" if way.fits else ", too large"
    return f"{way.tokens_per_second / 1e3:.1f}{parts} ({bytes_text(way.memory)}{over})"
