"""`RankedPlans`: a table of the fastest plan of each kind, with reasons for missing kinds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from json import dumps
from typing import Any

from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.rows import seconds_text
from shardwright.core.plan.text_columns import format_columns, text_width, wrap_sentence

MIN_SHOWN_FRACTION = 1e-3
"""Smallest time difference that tables list, as a fraction of the fastest plan's step time."""

UNSHARDED = "unsharded"
"""Name of plans without ZeRO / FSDP sharding in tables."""

MAX_LISTED_COMPONENTS = 2
"""Maximum number of step-time components listed in the column `slower for`."""


@dataclass(frozen=True, order=True)
class PlanKind:
    """Kind of plan: the properties by which `--top` groups plans.

    Args:
        micro_batches: number of micro-batches.
        stages: number of pipeline stages.
        schedule: the pipeline schedule; empty for one stage.
        level: ZeRO level, such as `level3` for FSDP; empty without sharding of parameters,
            gradients and optimizer state.
        recomputes: whether operators are recomputed.
    """

    micro_batches: int
    stages: int
    schedule: str = ""
    level: str = ""
    recomputes: bool = False

    @property
    def requested(self) -> PlanKind:
        """This kind without `recomputes`, as options request it: whether a plan recomputes depends
        on the memory limit."""
        return replace(self, recomputes=False)

    def __str__(self) -> str:
        return self.describe((self.level,))

    def describe(self, levels: Iterable[str], show_micro_batches: bool = True) -> str:
        """Describe kinds of plans that differ only in their ZeRO level, as one phrase.

        Args:
            levels: the ZeRO levels to list; an empty string means that parameters, gradients and
                optimizer state are not sharded.
            show_micro_batches: whether to include the number of micro-batches.
        """
        words = [
            f"{self.stages} stages ({self.schedule})" if self.stages > 1 else "",
            f"{self.micro_batches} micro-batches"
            if show_micro_batches and self.micro_batches > 1
            else "",
            "/".join(level or UNSHARDED for level in levels),
            "recomputes" if self.recomputes else "",
        ]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True, order=True)
class LeftOut:
    """The reason why no plan of one kind (`PlanKind`) is among the best plans.

    Reasons are sorted by `rank`, then by ascending lower bound on step time or memory.

    Args:
        rank: 0 for a slow step, 1 for too much memory, 2 for any other reason.
        seconds: lower bound on the step time for rank 0; else 0.
        memory: lower bound on the bytes per device for rank 1; else 0.
        text: the reason in words.
    """

    rank: int
    seconds: float = 0.0
    memory: int = 0
    text: str = ""

    @classmethod
    def slower(cls, seconds: float) -> LeftOut:
        """Return the reason for a kind of plan whose step takes at least `seconds`."""
        return cls(0, seconds=seconds, text=f"takes at least {seconds_text(seconds)}")

    @classmethod
    def larger(cls, memory: int) -> LeftOut:
        """Return the reason for a kind of plan that needs at least `memory` bytes per device, above
        the limit."""
        return cls(1, memory=memory, text=f"needs at least {bytes_text(memory)} a device")

    @classmethod
    def because(cls, text: str) -> LeftOut:
        """Return a reason with a given text, such as the error of the planner."""
        return cls(2, text=text)


@dataclass(frozen=True)
class RankedPlans:
    """The fastest plan for each `PlanKind` (storage, recomputation, stages), as a table.

    Args:
        plans: the fastest plans, in order of step time.
        left_out: the reason why `plans` has no plan, by `PlanKind`.
    """

    plans: Mapping[PlanKind, Plan]
    left_out: Mapping[PlanKind, LeftOut]

    def __str__(self) -> str:
        return "\n".join(self._format_table_lines(text_width()))

    def _format_table_lines(self, width: int) -> Iterator[str]:
        best = self.best
        limit = "" if best.memory_limit is None else f", {bytes_text(best.memory_limit)} a device"
        count = best.pipeline.micro_batches
        # With several numbers of micro-batches every row states its own.
        number = (
            f", {count} micro-batches"
            if count > 1 and not self._has_several_micro_batch_counts
            else ""
        )
        cluster = f" of {best.step.cluster}" if best.step is not None else ""
        yield f"{best.devices} devices{cluster}{limit}{number}"
        header = ("plan", "slower for", "step", "÷ first", "memory", "sent")
        yield from format_columns(header, map(self._format_table_row, self.plans), width)
        if self.left_out:
            yield ""
            yield "left out:"
        # Kinds that differ only in their ZeRO level and have the same reason share one line.
        levels_of: dict[tuple[LeftOut, PlanKind], list[str]] = defaultdict(list)
        for plan_kind, reason in self._sort_left_out_kinds():
            levels_of[reason, replace(plan_kind, level="")].append(plan_kind.level)
        for (reason, plan_kind), levels in levels_of.items():
            # Where all plans have one number of micro-batches, the first line of the table says it.
            named = plan_kind.describe(levels, self._has_several_micro_batch_counts)
            yield from wrap_sentence(f"{named}: {reason.text}", width, "  ")

    @property
    def best(self) -> Plan:
        """The fastest of all plans."""
        # `plans` is in order of step time.
        return next(iter(self.plans.values()))

    @property
    def _has_several_micro_batch_counts(self) -> bool:
        """Whether the kinds of plans in this table have different numbers of micro-batches."""
        return len({each.micro_batches for each in (*self.plans, *self.left_out)}) > 1

    def _sort_left_out_kinds(self) -> list[tuple[PlanKind, LeftOut]]:
        """Return the items of `left_out`, sorted by reason: slow step, too much memory, other."""
        # `LeftOut` sorts by its rank; kinds break ties.
        return sorted(self.left_out.items(), key=lambda entry: (entry[1], entry[0]))

    def _format_table_row(self, plan_kind: PlanKind) -> tuple[str, ...]:
        plan, best = self.plans[plan_kind], self.best
        seconds, best_seconds = plan.step_time or 0.0, best.step_time or 0.0
        return (
            plan_kind.describe((plan_kind.level,), self._has_several_micro_batch_counts),
            ", ".join(f"{what} +{seconds_text(more)}" for what, more in self.slower_for(plan_kind)),
            seconds_text(seconds),
            # Without a cluster there are no step times to divide.
            f"{seconds / best_seconds if best_seconds else 1.0:.3f}",
            bytes_text(plan.memory.peak),
            bytes_text(plan.bytes),
        )

    def slower_for(self, kind: PlanKind) -> list[tuple[str, float]]:
        """List the components of step time that are longer than in the fastest plan.

        Returns:
            (component, additional seconds per step), in descending order of seconds; at most
            `MAX_LISTED_COMPONENTS`, and none below `MIN_SHOWN_FRACTION` of the fastest step.
        """
        best_seconds = _sum_seconds_by_component(self.best)
        seconds_of = _sum_seconds_by_component(self.plans[kind])
        added_seconds = [
            # A component that the fastest plan lacks counts in full.
            (component, seconds - best_seconds.get(component, 0.0))
            for component, seconds in seconds_of.items()
        ]
        # Of the step, not of the component: a small component may double without a visible effect.
        min_shown = MIN_SHOWN_FRACTION * (self.best.step_time or 0.0)
        longer = (each for each in added_seconds if each[1] > min_shown)
        return sorted(longer, key=lambda each: -each[1])[:MAX_LISTED_COMPONENTS]

    def to_json(self) -> str:
        """Return the plans and the kinds of plans that are left out, as JSON.

        Each plan has its step time, memory and communication volume; the fastest is first.
        """
        plans = [self._make_json_object(plan_kind) for plan_kind in self.plans]
        left_out = [
            # No plan of this kind was made, so whether it would recompute is unknown.
            {**asdict(plan_kind.requested), "reason": reason.text}
            for plan_kind, reason in self._sort_left_out_kinds()
        ]
        return dumps({"plans": plans, "left_out": left_out}, indent=1)

    def _make_json_object(self, plan_kind: PlanKind) -> dict[str, Any]:
        plan = self.plans[plan_kind]
        return {
            **asdict(plan_kind),
            "step_seconds": plan.step_time,
            "memory": plan.memory.peak,
            "bytes": plan.bytes,
            "slower_for": dict(self.slower_for(plan_kind)),
        }


def _sum_seconds_by_component(plan: Plan) -> dict[str, float]:
    """Return the predicted seconds per step by component, such as communication."""
    seconds: dict[str, float] = defaultdict(float)
    for time_part in () if plan.step is None else plan.step.parts:
        seconds[time_part.kind] += time_part.seconds
    return seconds
