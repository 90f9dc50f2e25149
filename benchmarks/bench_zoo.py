"""Architectures

Models of `transformers` as they are, built tiny from their configurations with random weights and
without dropout, and models as researchers write them, each planned for 8 devices and trained on
simulated ranks beside the module itself, in float64: outputs, gradients of the loss, and parameters
and buffers after two steps are compared. *Cut* is the share of the 8 devices that matrix products
keep busy: 100% if all of them are cut in 8 equal parts. Goals: 95% are exact, none is wrong, none
ends in an error from inside PyTorch.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import prod

import transformers
from torch import Tensor

import shardwright as sw
from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import in_fork
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.tiny import model
from benchmarks.zoo.written import WRITTEN, written
from shardwright.core.cost.flops import work_of
from shardwright.core.rules import rule_of

DEVICES, EXACT_SHARE = 8, 0.95
SITE_PACKAGES = re.compile(r"\S*site-packages/")
EXACT, REFUSED, WRONG, RAW = "exact", "refused", "wrong", "raw error"


@dataclass(frozen=True)
class Ending:
    """How an architecture ended, and what else there is to say."""

    end: str
    cut: float | None = None
    why: str = ""


def run(size: Size = Size.DEFAULT) -> list[Table]:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("shardwright").setLevel(logging.ERROR)
    own = {kind: [each.__name__ for each in models] for kind, models in WRITTEN.items()}
    every = [
        (kind, name) for kind, names in (*ARCHITECTURES.items(), *own.items()) for name in names
    ]
    ends = {
        (kind, name): in_fork(partial(ending, kind, name))
        for kind, name in every[:: size.of(12, full=1)]
    }
    return [_summary(list(ends.values()), size), _all(ends)]


def ending(kind: str, name: str) -> Ending:
    """How an architecture ends: exact, refused by name, wrong, or in another error."""
    net, inputs = (written if kind in WRITTEN else model)(kind, name)
    outputs = net(**inputs)
    (outputs if isinstance(outputs, Tensor) else outputs.loss).backward()
    net.zero_grad()
    try:
        plan = sw.plan(net, (), inputs, devices=DEVICES)
        check = sw.check(net, (), inputs, plan)
    except sw.ShardwrightError as error:
        return Ending(REFUSED, why=str(error).partition(". ")[0])
    except Exception as error:
        return Ending(RAW, why=f"{type(error).__name__}: {error}")
    return Ending(EXACT if check.passes() else WRONG, cut(plan), check.cause)


def cut(plan: sw.Plan) -> float:
    """The share of the devices that the matrix products of a plan keep busy."""
    whole = busiest = 0.0
    for op in plan.graph.ops:
        work, rule = work_of(op), rule_of(op)
        counts = rule.shard_counts(plan.mesh, plan.decisions.cuts.get(op.name, {})) if rule else {}
        whole += work.forward_flops
        busiest += work.forward_flops / prod(counts.values())
    return whole / (DEVICES * busiest) if busiest else 0.0


def _summary(ends: list[Ending], size: Size) -> Table:
    table = Table("How architectures end", ("ended", "number"))
    counts = Counter(each.end for each in ends)
    for end in (EXACT, REFUSED, WRONG, RAW):
        table.add(end, counts[end])
    if size is Size.FULL and counts[EXACT] < EXACT_SHARE * len(ends):
        table.missed.append(f"{counts[EXACT]} of {len(ends)} are exact")
    if counts[WRONG] or counts[RAW]:
        table.missed.append(f"{counts[WRONG]} are wrong, {counts[RAW]} end in a raw error")
    return table


def _all(ends: dict[tuple[str, str], Ending]) -> Table:
    table = Table("Each of them", ("architecture", "kind", "ended", "cut", "why"))
    for (kind, name), each in ends.items():
        share = "" if each.cut is None else f"{each.cut:.0%}"
        why = (
            SITE_PACKAGES.sub("", each.why)
            .replace(f"{ROOT}/", "")
            .replace("\n", " ")
            .replace("|", "/")[:160]
        )
        table.add(f"`{name}`", kind, each.end, share, why)
    return table
