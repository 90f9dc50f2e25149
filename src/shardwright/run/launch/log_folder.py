"""Paths of the log folder of a run."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import ConfigError, ShardwrightWarning, warn_user


class LogWarning(ShardwrightWarning):
    """Warning that logs of a run are lost."""


@dataclass(frozen=True)
class LogFolder:
    """The log folder of a run, with a subfolder `<root>/1/rank.N` for each rank."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "1"

    def rank(self, rank: int) -> Path:
        return self.run / f"rank.{rank}"

    def stdout(self, rank: int) -> Path:
        return self.rank(rank) / "stdout"

    def stderr(self, rank: int) -> Path:
        return self.rank(rank) / "stderr"

    def error(self, rank: int) -> Path:
        """JSON file to which `torch.distributed`'s `record` writes the rank's exception."""
        return self.rank(rank) / "error.json"

    def steps(self, rank: int) -> Path:
        """JSON Lines file with one line per training step."""
        return self.rank(rank) / "steps.jsonl"

    @property
    def plan(self) -> Path:
        return self.run / "plan.json"

    def clear(self, num_ranks: int, keep_steps: bool = False) -> None:
        """Remove the logs of an earlier run, and create a folder for each of `num_ranks` ranks.

        Args:
            keep_steps: whether to keep the step log, to which a resumed run appends.

        Raises:
            ConfigError: if a file or link has the name of the folder of a rank. Nothing is removed.
        """
        # The step log stays where it is: a failure on the way must not lose it.
        steps_to_keep = self.steps(0) if keep_steps else None
        # Folders of all ranks, because the earlier run may have had more than this one.
        rank_folders = list(self.run.glob("rank.[0-9]*"))
        for folder in rank_folders:
            # Through a link, files elsewhere would be removed.
            if folder.is_symlink() or not folder.is_dir():
                raise ConfigError(
                    f"{folder} is a link or a file, not a folder with logs of a rank\n"
                    "move it, or choose another folder with --log-dir"
                )
        for rank_folder in rank_folders:
            for entry in rank_folder.iterdir():
                # `rmtree` refuses symbolic links.
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry != steps_to_keep:
                    entry.unlink()
            # The folder is not empty if it has the step log that is kept.
            with suppress(OSError):
                rank_folder.rmdir()
        for rank in range(num_ranks):
            self.rank(rank).mkdir(parents=True, exist_ok=True)

    def warn_if_deleted(self, *files: Path) -> None:
        """Warn if files of a run that has succeeded were deleted during the run."""
        deleted = [str(file) for file in files if not file.exists()]
        if deleted:
            warn_user(
                f"logs were deleted during the run, which has succeeded: {', '.join(deleted[:4])}\n"
                f"keep {self.root} until a run has ended, or choose another folder with --log-dir",
                LogWarning,
            )

    def archive_attempt(self, rank: int | None = None) -> None:
        """Rename the log files of one or all ranks before a restart, for example `stdout` to
        `stdout.attempt-0`.

        Args:
            rank: rank whose logs are renamed; None for all ranks.
        """
        for folder in self.run.glob("rank.[0-9]*") if rank is None else [self.rank(rank)]:
            # Counted by `stdout`, which every attempt has; `error.json` exists only after an
            # exception.
            attempt = len(list(folder.glob("stdout.attempt-*")))
            # Not the step log, to which the next attempt appends.
            for name in ("stdout", "stderr", "error.json"):
                if (folder / name).exists():
                    (folder / name).rename(folder / f"{name}.attempt-{attempt}")
