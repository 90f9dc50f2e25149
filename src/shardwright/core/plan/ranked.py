"""The best plans of different kinds, side by side, and why none of another kind is among them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from json import dumps
from typing import Any

from shardwright.core.cost.memory import binary
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.rows import seconds_text
from shardwright.core.plan.text_columns import in_columns, text_width, wrapped

SMALLEST_SHARE = 1e-3
"""Of a step: a difference of less is not worth a word."""

UNSHARDED = "unsharded"
"""How parameters and optimizer state are stored at no level."""

MOST_REASONS = 2
"""For which a plan is slower that are named."""


@dataclass(frozen=True, order=True)
class PlanKind:
    """What plans of one kind have in common.

    Args:
        schedule: of the stages; none of a single one.
        level: at which parameters and optimizer state are stored in shards; none if they are not.
        recomputes: whether operators are recomputed.
    """

    micro_batches: int
    stages: int
    schedule: str = ""
    level: str = ""
    recomputes: bool = False

    @property
    def requested(self) -> PlanKind:
        """What is requested of it; whether it recomputes follows from memory."""
        return replace(self, recomputes=False)

    def __str__(self) -> str:
        return self.in_words((self.level,))

    def in_words(self, levels: Iterable[str], counted: bool = True) -> str:
        """Likewise for all kinds that differ from it in the level.

        Args:
            counted: whether to say the number of micro-batches.
        """
        words = [
            f"{self.stages} stages ({self.schedule})" if self.stages > 1 else "",
            f"{self.micro_batches} micro-batches" if counted and self.micro_batches > 1 else "",
            "/".join(level or UNSHARDED for level in levels),
            "recomputes" if self.recomputes else "",
        ]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True, order=True)
class LeftOut:
    """Why no plan of a kind is among the best. Of two reasons the smaller is nearer to one: that a
    step takes longer, that it needs more memory than there is, another.

    Args:
        seconds: that a step takes at least, if that is the reason.
        memory: bytes that a device needs at least, if that is.
    """

    rank: int
    seconds: float = 0.0
    memory: int = 0
    text: str = ""

    @classmethod
    def slower(cls, seconds: float) -> LeftOut:
        """A step takes so long, or longer."""
        return cls(0, seconds=seconds, text=f"takes at least {seconds_text(seconds)}")

    @classmethod
    def larger(cls, memory: int) -> LeftOut:
        """A device needs so many bytes, or more, which it does not have."""
        return cls(1, memory=memory, text=f"needs at least {binary(memory)} a device")

    @classmethod
    def because(cls, text: str) -> LeftOut:
        """Why there is no such plan."""
        return cls(2, text=text)


@dataclass(frozen=True)
class RankedPlans:
    """The best plans of different kinds.

    Args:
        plans: by kind, the fastest first.
        left_out: by kind why it has no plan among them.
    """

    plans: Mapping[PlanKind, Plan]
    left_out: Mapping[PlanKind, LeftOut]

    def __str__(self) -> str:
        return "\n".join(self._lines(text_width()))

    def _lines(self, width: int) -> Iterator[str]:
        best = self.best
        limit = "" if best.memory_limit is None else f", {binary(best.memory_limit)} a device"
        pieces = best.pipeline.micro_batches
        number = f", {pieces} micro-batches" if pieces > 1 and not self._counted else ""
        cluster = f" of {best.step.cluster}" if best.step is not None else ""
        yield f"{best.devices} devices{cluster}{limit}{number}"
        header = ("plan", "slower for", "step", "÷ first", "memory", "sent")
        yield from in_columns(header, map(self._row, self.plans), width)
        if self.left_out:
            yield ""
            yield "left out:"
        alike: dict[tuple[LeftOut, PlanKind], list[str]] = defaultdict(list)
        for kind, reason in self._sorted_out():
            alike[reason, replace(kind, level="")].append(kind.level)
        for (reason, kind), levels in alike.items():
            named = kind.in_words(levels, self._counted)
            yield from wrapped(f"{named}: {reason.text}", width, "  ")

    @property
    def best(self) -> Plan:
        """The fastest."""
        return next(iter(self.plans.values()))

    @property
    def _counted(self) -> bool:
        """Whether kinds differ in their number of micro-batches."""
        return len({kind.micro_batches for kind in (*self.plans, *self.left_out)}) > 1

    def _sorted_out(self) -> list[tuple[PlanKind, LeftOut]]:
        """What was left out, the nearest to a plan first."""
        return sorted(self.left_out.items(), key=lambda one: (one[1], one[0]))

    def _row(self, kind: PlanKind) -> tuple[str, ...]:
        plan, best = self.plans[kind], self.best
        seconds, least = plan.step_time or 0.0, best.step_time or 0.0
        return (
            kind.in_words((kind.level,), self._counted),
            ", ".join(f"{what} +{seconds_text(more)}" for what, more in self.slower_for(kind)),
            seconds_text(seconds),
            f"{seconds / least if least else 1.0:.3f}",
            binary(plan.memory.peak),
            binary(plan.bytes),
        )

    def slower_for(self, kind: PlanKind) -> list[tuple[str, float]]:
        """What takes more of a step than in the first plan, and how many seconds, most first."""
        mine, others = _seconds(self.plans[kind]), _seconds(self.best)
        more = [(what, seconds - others.get(what, 0.0)) for what, seconds in mine.items()]
        least = SMALLEST_SHARE * (self.best.step_time or 0.0)
        longer = sorted((one for one in more if one[1] > least), key=lambda one: -one[1])
        return longer[:MOST_REASONS]

    def to_json(self) -> str:
        """The plans in a few figures each, the fastest first, and what was left out."""
        plans = [self._figures(kind) for kind in self.plans]
        left = [
            {**asdict(kind.requested), "reason": reason.text} for kind, reason in self._sorted_out()
        ]
        return dumps({"plans": plans, "left_out": left}, indent=1)

    def _figures(self, kind: PlanKind) -> dict[str, Any]:
        plan = self.plans[kind]
        return {
            **asdict(kind),
            "step_seconds": plan.step_time,
            "memory": plan.memory.peak,
            "bytes": plan.bytes,
            "slower_for": dict(self.slower_for(kind)),
        }


def _seconds(plan: Plan) -> dict[str, float]:
    """Of a step by kind of work."""
    found: dict[str, float] = defaultdict(float)
    for part in () if plan.step is None else plan.step.parts:
        found[part.kind] += part.seconds
    return found
