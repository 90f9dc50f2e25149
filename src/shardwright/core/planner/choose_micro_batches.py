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

PrepareTask = Callable[[int, bool], PlanTask]
"""Function that returns the task of planning the model with a number of micro-batches.

If the second argument is true, the graph is captured; if false, it may be derived from graphs of
other numbers of micro-batches (`core/micro_batches/interpolated_graph.py`).
"""


def fastest_over_micro_batches(
    counts: Sequence[int], prepare: PrepareTask, ranking: Ranking | None = None
) -> Candidate:
    """Return the candidate with the shortest predicted step; ties go to the fewest micro-batches.

    Skips numbers of micro-batches with which the model cannot be planned. Skips all numbers but 1
    if the loss cannot be computed by micro-batches (`core/micro_batches`), or depends on the number
    of micro-batches, as with batch norm in training.

    One search covers all numbers. Each has its own graph, memory of activations and best number of
    stages, so the result is never slower than a plan with a fixed number of micro-batches.

    Args:
        counts: numbers of micro-batches to try, ascending.
        prepare: function that captures the model for a number of micro-batches.
        ranking: records the fastest candidate of each kind of plan.

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
    """Search over numbers of micro-batches that records the errors of invalid numbers."""

    def __init__(
        self, counts: Sequence[int], prepare: PrepareTask, ranking: Ranking | None
    ) -> None:
        self._counts, self._prepare, self._ranking = counts, prepare, ranking
        self._errors: list[ShardwrightError] = []
        self._mixed_samples_error: MixedSamplesError | None = None

    def best(self) -> Candidate:
        """Return the candidate with the shortest predicted step over all numbers of micro-batches.

        Raises:
            ShardwrightError: if the model cannot be planned with any of the numbers.
        """
        best: Candidate | None = None
        for tasks in self._group_tasks_by_search():
            try:
                candidate = self._best_candidate_with_captured_graph(tasks)
            except KeyboardInterrupt as interrupt:
                self._raise_interrupt_with_best_plan(interrupt, best, tasks)
            except (PlanError, StrategyError, MemoryLimitError) as error:
                # Another number of micro-batches may be possible; without any,
                # `_make_no_plan_error` chooses an error.
                self._errors.append(error)
                log.info("%s", error)
                continue
            # Strictly shorter: numbers ascend, and ties go to the fewest micro-batches.
            if best is None or candidate.seconds < best.seconds:
                best = candidate
            graph = candidate.model.graph
            # Without a loss the model is not trained, so one micro-batch is enough. With another
            # number, statistics of batch norm would be of other samples.
            if graph.loss is None or any(takes_statistics(op) for op in graph.ops):
                break
        if best is None:
            raise self._make_no_plan_error()
        return best

    def _raise_interrupt_with_best_plan(
        self, interrupt: KeyboardInterrupt, best: Candidate | None, tasks: list[PlanTask]
    ) -> NoReturn:
        """Raise `PlanInterrupted` with the best plan so far, or `interrupt` if there is no plan.

        Args:
            interrupt: error that the interrupted search of `tasks` raised.
            best: best candidate of the earlier searches; None if none was found.
        """
        candidate = interrupt.candidate if isinstance(interrupt, PlanInterrupted) else None
        if candidate is not None and (best is None or candidate.seconds < best.seconds):
            raise PlanInterrupted(
                lambda: self._replace_derived_graph(candidate, tasks).plan()
            ) from None
        if best is None:
            raise interrupt
        raise PlanInterrupted(best.plan) from None

    def _replace_derived_graph(self, candidate: Candidate, tasks: list[PlanTask]) -> Candidate:
        """Return `candidate` with its derived graph replaced by a captured one.

        Raises:
            KeyboardInterrupt: if the captured graph differs from the derived graph, so that the
                candidate of the interrupted search is invalid.
        """
        count = candidate.pipeline.micro_batches
        task = next(task for task in tasks if task.options.num_micro_batches == count)
        if task.is_derived and self._capture_graph_of_task(tasks, task):
            # The candidate is for another graph, and the user has stopped the search for this one.
            raise KeyboardInterrupt
        return self._use_captured_models(candidate, tasks)

    def _group_tasks_by_search(self) -> Iterator[list[PlanTask]]:
        """Yield the tasks of each search.

        All tasks are in one search, except tasks without a loss, with batch statistics or with
        `mem_coeff="auto"`, which are searched one by one.
        """
        tasks: list[PlanTask] = []
        # A generator, so that no further graphs are captured once `best` needs none.
        for task in self._prepare_tasks():
            graph, options = task.model.graph, task.options
            statistics = any(takes_statistics(op) for op in graph.ops)
            # With `mem_coeff="auto"` each number has the smallest value with which it fits.
            if graph.loss is None or statistics or options.has_auto_mem_coeff:
                yield [task]
            else:
                tasks.append(task)
        if tasks:
            yield tasks

    def _prepare_tasks(self) -> Iterator[PlanTask]:
        for count in self._counts:
            try:
                yield self._prepare(count, False)
            except MixedSamplesError as error:
                # The loss mixes samples, so every number but 1 raises this error.
                self._mixed_samples_error = error
                return
            except (CaptureError, MemoryLimitError, PlanError, StrategyError) as error:
                self._errors.append(error)
                log.info("%d micro-batches: %s", count, error)

    def _best_candidate_with_captured_graph(self, tasks: list[PlanTask]) -> Candidate:
        """Return the best candidate of `tasks`, whose graph is captured rather than derived.

        The search is repeated if the captured graph differs from the derived graph.
        """
        # Ends, as each repetition has replaced a derived graph by a captured one or removed a task.
        while tasks:
            candidate = best_candidate(tasks, self._ranking)
            # Ranked plans are returned too, so their graphs must be captured as well.
            chosen = [candidate, *(self._ranking.best() if self._ranking is not None else ())]
            counts = {each.pipeline.micro_batches for each in chosen}
            derived = [
                task
                for task in tasks
                if task.is_derived and task.options.num_micro_batches in counts
            ]
            changed = [self._capture_graph_of_task(tasks, task) for task in derived]
            if not any(changed):
                return self._use_captured_models(candidate, tasks)
            if self._ranking is not None:
                # Its candidates belong to a graph that was replaced.
                self._ranking.clear()
        raise self._make_no_plan_error()

    def _capture_graph_of_task(self, tasks: list[PlanTask], task: PlanTask) -> bool:
        """Replace `task` in `tasks` by a task with a captured graph; remove it if capturing fails.

        Returns:
            Whether the search must be repeated, since the captured graph differs from the derived
            graph or the task was removed.
        """
        index = tasks.index(task)
        try:
            captured = self._prepare(task.options.num_micro_batches, True)
        except (CaptureError, PlanError, StrategyError) as error:
            self._errors.append(error)
            del tasks[index]
            return True
        if task.model.graph.fingerprint != captured.model.graph.fingerprint:
            tasks[index] = captured
            return True
        # The graphs are equal, so the model keeps its cached searches and dry runs.
        model = replace(task.model, graph=captured.model.graph)
        tasks[index] = replace(captured, model=model)
        return False

    def _use_captured_models(self, candidate: Candidate, tasks: Sequence[PlanTask]) -> Candidate:
        models = {task.options.num_micro_batches: task.model for task in tasks}
        if self._ranking is not None:
            self._ranking.replace_models(models)
        return replace(candidate, model=models[candidate.pipeline.micro_batches])

    def _make_no_plan_error(self) -> ShardwrightError:
        if self._mixed_samples_error is not None and self._errors:
            error = StrategyError(
                f"micro_batches='auto': this model can be trained with one micro-batch only:"
                f" {self._mixed_samples_error}\n"
                f"set micro_batches=1 and resolve its error: {self._errors[0]}"
            )
            error.__cause__ = self._mixed_samples_error
            return error
        over_limit = [error for error in self._errors if isinstance(error, MemoryLimitError)]
        if over_limit:
            # The smallest limit with which the model could be planned, over all numbers.
            return min(over_limit, key=lambda error: error.needed)
        # Numbers ascend, so the first error is that of the fewest micro-batches.
        return self._errors[0]
