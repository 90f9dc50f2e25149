"""What was measured of a plan: the steps that a run profiled on each rank, as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shardwright.core.cost.collective_totals import CollectiveTotal
from shardwright.errors import PlanError
from shardwright.text_files import read_text

FILE = "profile.json"
"""The name of the file in the log folder of a run."""

PROFILE_FORMAT = 1

EXPOSED = "communication"
"""Of kinds of measured seconds: communication with nothing computed beside it."""


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank did in an average step.

    Args:
        stage: its pipeline stage.
        seconds: of the step.
        kinds: seconds of it by what they were spent on, in words of `core/cost/time_parts.py`;
            communication as far as nothing was computed beside it.
        collectives: what it sent; their seconds include those beside computation where an
            accelerator has both.
        peak: bytes that its tensors took at most.
    """

    rank: int
    stage: int
    seconds: float
    kinds: dict[str, float]
    collectives: tuple[CollectiveTotal, ...]
    peak: int


@dataclass(frozen=True)
class Measured:
    """Profiled steps.

    Args:
        fingerprint: of the plan's model.
        device: the type of the devices.
        steps: how many were profiled.
        ranks: in their order.
        predicted: the collectives of each stage as planned.
    """

    fingerprint: str
    device: str
    steps: int
    ranks: tuple[MeasuredRank, ...]
    predicted: tuple[tuple[CollectiveTotal, ...], ...]

    def save(self, path: Path) -> None:
        """Writes a file for `load`."""
        values = {"profile_format": PROFILE_FORMAT, **asdict(self)}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Measured:
        """Reads a file, or the one in a log folder.

        Raises:
            PlanError: if there is none, or it is not one of this version.
        """
        found = [p for p in (path / FILE, path / "1" / FILE) if p.exists()] if path.is_dir() else []
        if path.is_dir() and not found:
            raise PlanError(
                f"{path}: has no {FILE}, which `shardwright train --profile` writes into its log"
                " folder"
            )
        file = found[0] if found else path
        try:
            values = json.loads(read_text(file, PlanError))
            if not isinstance(values, dict) or values.pop("profile_format", None) != PROFILE_FORMAT:
                raise PlanError(f"{file}: is not a profile of this version: profile the run again")
            return TypeAdapter(Measured).validate_python(values)
        except (json.JSONDecodeError, ValidationError) as error:
            first = str(error).partition("\n")[0]
            raise PlanError(f"{file}: is not a whole profile: {first}") from None
