"""Runs training programs on real processes, and collects how each ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from benchmarks.torchrun import torchrun

RANKS, TIMEOUT = 4, 1800


@dataclass(frozen=True)
class Outcome:
    """How a program ended: `end` is one of `program_ranks.ENDS`, `why` empty if it was exact."""

    program: str
    plan: str
    end: str
    why: str


def outcomes(names: Sequence[str] = (), ranks: int = RANKS) -> list[Outcome]:
    """Every program under every plan, as on the rank on which it ended worst.

    Args:
        names: of programs; all if empty.

    Raises:
        RuntimeError: if the processes fail.
    """
    with TemporaryDirectory() as folder:
        output = torchrun("program_ranks", ranks, folder, *names)
    worst: dict[tuple[str, str], Outcome] = {}
    decoder = json.JSONDecoder()
    for start in (i for i, letter in enumerate(output) if output.startswith('{"end', i)):
        for program, plan, end, why in decoder.raw_decode(output[start:])[0]["ends"]:
            before = worst.get((program, plan))
            if before is None or before.end == "exact":
                worst[program, plan] = Outcome(program, plan, end, why)
    return list(worst.values())
