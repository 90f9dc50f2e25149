"""Save and load the profile of a run: the average measured step of each rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shardwright.core.cost.collective_totals import CollectiveTotal
from shardwright.errors import PlanError
from shardwright.plain_data import parse_json
from shardwright.text_files import read_text, write_text

PROFILE_FILE = "profile.json"
"""File name of the profile in the log folder of a run."""

PROFILE_FORMAT = 2
"""Version of the profile's file format."""

EXPOSED_COMMUNICATION = "communication"
"""Key of exposed communication in `MeasuredRank.component_seconds`."""


@dataclass(frozen=True)
class MeasuredRank:
    """The average profiled step of one rank.

    Args:
        rank: the global rank.
        stage: the rank's pipeline stage.
        seconds: duration of the step.
        component_seconds: seconds by component of the step time, with the keys of
            `core/cost/time_parts.py`. Communication is exposed communication only.
        collectives: number, bytes and seconds of the rank's collectives; on an accelerator the
            seconds include overlapped communication.
        peak_bytes: peak memory of the rank's tensors.
    """

    rank: int
    stage: int
    seconds: float
    component_seconds: dict[str, float]
    collectives: tuple[CollectiveTotal, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Measured:
    """The profile of a run: the average measured step of each rank.

    Args:
        fingerprint: fingerprint of the plan's model.
        device: the device type, such as `cuda`.
        steps: number of profiled steps.
        ranks: the average step of each rank, in ascending order of ranks.
        predicted: the planned collectives of each pipeline stage.
    """

    fingerprint: str
    device: str
    steps: int
    ranks: tuple[MeasuredRank, ...]
    predicted: tuple[tuple[CollectiveTotal, ...], ...]

    def save(self, path: Path) -> None:
        """Save the profile as a JSON file, which `Measured.load` reads."""
        values = {"profile_format": PROFILE_FORMAT, **asdict(self)}
        write_text(path, json.dumps(values, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Measured:
        """Load a profile.

        Args:
            path: the profile's file, or the log folder of a run.

        Raises:
            PlanError: if the file does not exist, is invalid or has another format version.
        """
        # `path` may be the root of the run's log folder, which has its files in subfolder 1.
        candidates = (path / PROFILE_FILE, path / "1" / PROFILE_FILE)
        files = [p for p in candidates if p.exists()] if path.is_dir() else []
        if path.is_dir() and not files:
            raise PlanError(
                f"{path} has no file `{PROFILE_FILE}`\nprofile a run with `shardwright train"
                " --profile`, which writes the file into the run's log folder"
            )
        file = files[0] if files else path
        try:
            location = f"{file} is not a valid profile"
            values = parse_json(read_text(file, PlanError), location, PlanError)
            # Before validation, which would report the missing fields of an old file.
            if not isinstance(values, dict) or values.pop("profile_format", None) != PROFILE_FORMAT:
                raise PlanError(
                    f"{file} is not a profile of format version {PROFILE_FORMAT}\nprofile the run"
                    " again with `shardwright train --profile`"
                )
            # This also makes tuples of the lists of JSON.
            return TypeAdapter(Measured).validate_python(values)
        except ValidationError as error:
            # The first line counts the errors; the others name fields that users do not write.
            reason = str(error).partition("\n")[0]
            raise PlanError(
                f"{file} is not a valid profile: {reason}\nprofile the run again with"
                " `shardwright train --profile`"
            ) from None
