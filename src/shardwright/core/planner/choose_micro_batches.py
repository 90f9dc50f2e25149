"""Choose the number of micro-batches with the shortest predicted step time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from shardwright.core.micro_batches.batch_norms import takes_statistics
from shardwright.core.planner.best_candidate import best_candidate
from shardwright.core.planner.candidate import Candidate, PlanTask
from shardwright.core.planner.ranking import Ranking
from shardwright.errors import (
    CaptureError,
    MemoryLimitError,
    MixedSamplesError,
    PlanError,
    PlanInterrupted,
    ShardwrightError,
    StrategyError,
)

log = logging.getLogger("shardwright.search")

Prepare = Callable[[int, bool], PlanTask]
"""Function that captures the model for a number of micro-batches.

The second argument is whether the graph must be captured; if not, it may be derived from those for
other numbers (`core/micro_batches/interpolated_graph.py`).
"""


def with_best_micro_batches(
    counts: Sequence[int], prepare: Prepare, ranking: Ranking | None = None
) -> Candidate:
    """Return the candidate with the shortest predicted step; ties go to the fewest micro-batches.

    Skips numbers of micro-batches with which the model cannot be planned. Skips all numbers but 1
    if the loss cannot be computed by micro-batches (`core/micro_batches`), or depends on the number
    of micro-batches, as with batch norm in training.

    One search covers all numbers. Each has its own graph, memory of activations and best number of
    stages, so the result is never slower than a plan with a fixed number of micro-batches.

    Args:
        counts: numbers of micro-batches to try, ascending.
        prepare: captures the model for a number of micro-batches.
        ranking: records the fastest candidate of each kind.

    Raises:
        MemoryLimitError: if no plan with any number fits into the memory limit; the error is raised
            for the number with the least memory.
        StrategyError: if the model can only be trained with one micro-batch, and cannot be planned
            with one.
        ShardwrightError: if no number can be planned for another reason; the error is raised for
            the smallest number.
    """
    return _MicroBatchChoice(counts, prepare, ranking).best()


class _MicroBatchChoice:
    """The choice among numbers of micro-batches, with the errors of those that are impossible."""

    def __init__(self, counts: Sequence[int], prepare: Prepare, ranking: Ranking | None) -> None:
        self._counts, self._prepare, self._ranking = counts, prepare, ranking
        self._errors: list[ShardwrightError] = []
        self._mixed: MixedSamplesError | None = None

    def best(self) -> Candidate:
        """Return the best candidate. Raises: see `with_best_micro_batches`."""
        best: Candidate | None = None
        for tasks in self._groups():
            try:
                candidate = self._confirmed(tasks)
            except KeyboardInterrupt as stopped:
                self._stop(stopped, best, tasks)
            except (PlanError, StrategyError, MemoryLimitError) as error:
                self._errors.append(error)
                log.info("%s", error)
                continue
            if best is None or candidate.seconds < best.seconds:
                best = candidate
            graph = candidate.model.graph
            # Without a loss the model is not trained, so one micro-batch is enough. With another
            # number, statistics of batch norm would be of other samples.
            if graph.loss is None or any(takes_statistics(op) for op in graph.ops):
                break
        if best is None:
            raise self._error()
        return best

    def _stop(
        self, stopped: KeyboardInterrupt, best: Candidate | None, tasks: list[PlanTask]
    ) -> NoReturn:
        """Raise the error after Ctrl-C: `PlanInterrupted` if a plan was found.

        Args:
            stopped: error that the search of `tasks` raised.
            best: best candidate of other searches.
        """
        candidate = stopped.candidate if isinstance(stopped, PlanInterrupted) else None
        if candidate is not None and (best is None or candidate.seconds < best.seconds):
            raise PlanInterrupted(lambda: self._captured(candidate, tasks).plan()) from None
        if best is None:
            raise stopped
        raise PlanInterrupted(best.plan) from None

    def _captured(self, candidate: Candidate, tasks: list[PlanTask]) -> Candidate:
        """Return `candidate` with a captured graph.

        Raises:
            KeyboardInterrupt: if that graph differs from the derived one.
        """
        count = candidate.pipeline.micro_batches
        task = next(task for task in tasks if task.options.num_micro_batches == count)
        if task.is_derived and self._replace_by_captured(tasks, task):
            raise KeyboardInterrupt
        return self._with_captured_graphs(candidate, tasks)

    def _groups(self) -> Iterator[list[PlanTask]]:
        """Yield the tasks that one search covers: all, or one after the other."""
        tasks: list[PlanTask] = []
        for task in self._tasks():
            graph, options = task.model.graph, task.options
            statistics = any(takes_statistics(op) for op in graph.ops)
            # With `mem_coeff="auto"` each number has the smallest value with which it fits.
            if graph.loss is None or statistics or options.has_auto_mem_coeff:
                yield [task]
            else:
                tasks.append(task)
        if tasks:
            yield tasks

    def _tasks(self) -> Iterator[PlanTask]:
        for count in self._counts:
            try:
                yield self._prepare(count, False)
            except MixedSamplesError as error:
                # The loss mixes samples, so every number but 1 raises this error.
                self._mixed = error
                return
            except (CaptureError, MemoryLimitError, PlanError, StrategyError) as error:
                self._errors.append(error)
                log.info("%d micro-batches: %s", count, error)

    def _confirmed(self, tasks: list[PlanTask]) -> Candidate:
        """Return the best candidate of `tasks`, all of whose graphs that matter were captured.

        A graph that turns out to differ from the derived one is searched again.
        """
        while tasks:
            candidate = best_candidate(tasks, self._ranking)
            chosen = [candidate, *(self._ranking.best() if self._ranking is not None else ())]
            counts = {each.pipeline.micro_batches for each in chosen}
            derived = [
                task
                for task in tasks
                if task.is_derived and task.options.num_micro_batches in counts
            ]
            changed = [self._replace_by_captured(tasks, task) for task in derived]
            if not any(changed):
                return self._with_captured_graphs(candidate, tasks)
            if self._ranking is not None:
                self._ranking.clear()
        raise self._error()

    def _replace_by_captured(self, tasks: list[PlanTask], derived: PlanTask) -> bool:
        """Replace a task by one whose graph is captured, or remove it if the model cannot be
        planned; return whether candidates may differ."""
        index = tasks.index(derived)
        try:
            captured = self._prepare(derived.options.num_micro_batches, True)
        except (CaptureError, PlanError, StrategyError) as error:
            self._errors.append(error)
            del tasks[index]
            return True
        if derived.model.graph.fingerprint != captured.model.graph.fingerprint:
            tasks[index] = captured
            return True
        # The caches of the search stay.
        model = replace(derived.model, graph=captured.model.graph)
        tasks[index] = replace(captured, model=model)
        return False

    def _with_captured_graphs(self, candidate: Candidate, tasks: Sequence[PlanTask]) -> Candidate:
        models = {task.options.num_micro_batches: task.model for task in tasks}
        if self._ranking is not None:
            self._ranking.replace_models(models)
        return replace(candidate, model=models[candidate.pipeline.micro_batches])

    def _error(self) -> ShardwrightError:
        if self._mixed is not None and self._errors:
            error = StrategyError(
                f"micro_batches='auto': this model can be trained with one micro-batch only:"
                f" {self._mixed}\nset micro_batches=1 and resolve its error: {self._errors[0]}"
            )
            error.__cause__ = self._mixed
            return error
        over_limit = [error for error in self._errors if isinstance(error, MemoryLimitError)]
        if over_limit:
            return min(over_limit, key=lambda error: error.needed)
        return self._errors[0]
