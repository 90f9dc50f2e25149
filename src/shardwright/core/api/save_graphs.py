"""Write the graph of a model, its plan and the program of rank 0 as text files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from shardwright.core.graph.graph import Graph
from shardwright.core.graph.printer import graph_text
from shardwright.core.lower.emit_program import lower
from shardwright.core.partition.pipeline_spec import ONE_STAGE
from shardwright.core.plan import Plan
from shardwright.core.runtime.devices import Devices
from shardwright.errors import ShardwrightError, printable
from shardwright.text_files import write_text

# Numbered in the order in which they are written.
GRAPH = "1_graph.txt"
PLAN = "2_plan.txt"
ERROR = "2_error.txt"
PROGRAM = "3_program_rank0.txt"


class SavedGraphs:
    """Writer of a plan's text files to a folder; replaces the files of an earlier plan.

    Args:
        folder: the folder, which is created if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._written = set[str]()

    def graph(self, graph: Graph) -> None:
        """Write the captured graph as text, without sharding."""
        self._write_file(GRAPH, graph_text(graph))

    def plan(self, plan: Plan) -> None:
        """Write the graph with sharding and redistributions, and the program of rank 0."""
        self._write_file(PLAN, plan.dump())
        self._write_file(PROGRAM, program_text(plan))

    @contextmanager
    def saving_errors(self) -> Iterator[None]:
        """Context that writes the message of an error of capture or search, and raises it."""
        try:
            yield
        except ShardwrightError as error:
            # A full disk must not replace the error of the plan, which is raised anyway.
            with suppress(OSError):
                self.error(error)
            raise

    def error(self, error: ShardwrightError) -> None:
        """Write the error message of a failed search to a text file."""
        self._write_file(ERROR, f"{type(error).__name__}: {error}\n")

    def _write_file(self, name: str, content: str) -> None:
        # Names in a model may have characters that a terminal executes.
        write_text(self.folder / name, printable(content))
        self._written.add(name)
        # Otherwise the plan of an earlier run could be taken for the plan of this run. Only after
        # the first file is written, so that a full disk deletes nothing.
        for each in {GRAPH, PLAN, ERROR, PROGRAM} - self._written:
            (self.folder / each).unlink(missing_ok=True)


def program_text(plan: Plan) -> str:
    """Return the program of rank 0 as text, without a process group.

    Args:
        plan: a plan with its graph.
    """
    # In one stage, so that the program contains the operators of all stages.
    unstaged = replace(plan.partitioned, pipeline=ONE_STAGE)
    return str(lower(unstaged.chunks[0], Devices.of_rank(plan.mesh, 0)))
