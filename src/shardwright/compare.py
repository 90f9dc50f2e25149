"""The automatic plan against what experts configure by hand, by the predicted time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwright.api.planning import plan
from shardwright.config.build import Run
from shardwright.config.parts import mark_recomputed
from shardwright.errors import ConfigError, MemoryLimitError, ShardwrightError
from shardwright.graph.capture import capture
from shardwright.graph.graph import Graph
from shardwright.graph.tags import attached
from shardwright.models.expert import expert_stages, pin_expert
from shardwright.plan import Plan

AUTO, EXPERT, DATA_PARALLEL, TENSOR_PARALLEL, GRID = (
    "auto",
    "expert",
    "data parallel",
    "tensor parallel",
    "best of grid",
)


@dataclass(frozen=True)
class Way:
    """One way of dividing a model, priced.

    Args:
        kind: `auto`, `expert`, `data parallel`, `tensor parallel` or `best of grid`.
        parts: data, model and pipeline parallel; None where each operator has its own.
        seconds: predicted, of a step.
        tokens_per_second: predicted, of all devices together.
        memory: bytes that a device needs at most.
        bytes: that a device sends in a step.
        fits: whether that is within the memory limit.
    """

    kind: str
    parts: tuple[int, int, int] | None
    seconds: float
    tokens_per_second: float
    memory: int
    bytes: int
    fits: bool


@dataclass(frozen=True)
class Comparison:
    """All ways of dividing one model over the same devices, with the same batch.

    Args:
        ways: those that could be planned; `auto` and `expert` among them.
    """

    model: str
    devices: int
    cluster: str
    global_batch: int
    ways: tuple[Way, ...]

    def way(self, kind: str) -> Way | None:
        """The way of this kind, if it could be planned."""
        return next((way for way in self.ways if way.kind == kind), None)

    @property
    def speed_up(self) -> float:
        """Tokens per second of `auto` over those of `expert`."""
        auto, expert = self.way(AUTO), self.way(EXPERT)
        assert auto is not None and expert is not None
        return auto.tokens_per_second / expert.tokens_per_second

    @property
    def holds(self) -> bool:
        """Whether `auto` fits, and is as fast as any other way that fits; to a thousandth."""
        auto = self.way(AUTO)
        assert auto is not None
        others = [way.tokens_per_second for way in self.ways if way.fits]
        return auto.fits and auto.tokens_per_second >= 0.999 * max(others, default=0.0)


def compare(expert: str | Path, cluster: str, devices: int | None = None) -> Comparison:
    """Plans a language model automatically, as its expert's configuration says, and in all ways of
    data × tensor × pipeline parallel, with the same batch, micro-batches and memory.

    Args:
        expert: a configuration in `semi_auto` mode.
        devices: by default as many as the configuration has.

    Raises:
        ConfigError: the configuration is not an expert's of a language model.
    """
    run = Run.from_file(expert)
    if run.language is None or run.config.parallel.expert is None:
        raise ConfigError(
            f"{expert}: compare takes an expert's configuration of a language model:"
            " parallel_mode 1 with data_parallel, model_parallel and pipeline_stage"
        )
    number = devices or run.language.parallelism.devices
    course = _Course(run, cluster, number)
    return Comparison(
        run.language.name, number, cluster, run.config.data.batch_size, tuple(course.ways())
    )


class _Course:
    """The ways of one model, on one captured graph."""

    def __init__(self, run: Run, cluster: str, devices: int) -> None:
        assert run.language is not None
        self.run, self.cluster, self.devices = run, cluster, devices
        self.limit = run.language.memory_limit
        self.net = run.model_to_plan()
        half = torch.bfloat16 if run.config.parallel.compute_dtype == "bfloat16" else None
        self.graph = capture(self.net, run.micro_batch_to_plan(), compute_dtype=half)
        parallel = run.config.parallel
        if parallel.recompute is not None and not parallel.recomputes_as_needed:
            mark_recomputed(self.net, parallel.recompute)
        data = run.config.data
        assert data.seq_length is not None
        self.tokens = data.batch_size * data.seq_length

    def ways(self) -> Iterator[Way]:
        said = self.run.config.parallel
        assert said.expert is not None
        own = (said.expert.data_parallel, said.expert.model_parallel, int(said.stages))
        extra = {
            "seq_parallel": said.expert.seq_parallel,
            "vocab_emb_dp": said.expert.vocab_emb_dp,
        }
        yield self._way(EXPERT, own, self._by_hand(own, **extra))
        yield self._way(AUTO, None, self._automatic())
        grid = {parts: found for parts in self._grid() if (found := self._tried(parts)) is not None}
        for kind, parts in (
            (DATA_PARALLEL, (self.devices, 1, 1)),
            (TENSOR_PARALLEL, (1, self.devices, 1)),
        ):
            if parts in grid:
                yield self._way(kind, parts, grid[parts])
        # What a plan needs is known only after a rehearsal: the fastest that fits is the first.
        for parts, found in sorted(grid.items(), key=lambda entry: entry[1].step_time or 0.0):
            way = self._way(GRID, parts, found)
            if way.fits:
                yield way
                return

    def _grid(self) -> Iterator[tuple[int, int, int]]:
        for stages in _divisors(self.devices):
            if stages <= self.run.config.parallel.micro_batches:
                for parts in _divisors(self.devices // stages):
                    yield self.devices // stages // parts, parts, stages

    def _tried(self, parts: tuple[int, int, int]) -> Plan | None:
        """The plan of a way of the grid; None where sizes do not divide so."""
        try:
            return self._by_hand(parts, seq_parallel=parts[1] > 1)
        except ShardwrightError:
            return None

    def _automatic(self) -> Plan:
        try:
            return self._plan(self.graph, memory_limit=self.limit)
        except MemoryLimitError:
            return self._plan(self.graph, memory_limit=None)

    def _plan(self, graph: Graph, memory_limit: int | None) -> Plan:
        return plan(
            graph,
            devices=self.devices,
            cluster=self.cluster,
            stages="auto",
            memory_limit=memory_limit,
            **self._common(),
        )

    def _by_hand(self, parts: tuple[int, int, int], **ways: bool) -> Plan:
        data, model, stages = parts
        pin_expert(self.net, data_parallel=data, model_parallel=model, **ways)
        graph = replace(self.graph, module_tags=attached(self.net))
        return plan(
            graph,
            devices=self.devices,
            mode="sharding_propagation",
            cluster=self.cluster,
            stage_config=expert_stages(self.net, stages) if stages > 1 else None,
            **self._common(),
        )

    def _common(self) -> dict[str, Any]:
        parallel = self.run.config.parallel
        return {
            "micro_batches": parallel.micro_batches,
            "schedule": parallel.schedule,
            "hsdp": None if parallel.hsdp is None else parallel.hsdp.model_dump(),
        }

    def _way(self, kind: str, parts: tuple[int, int, int] | None, found: Plan) -> Way:
        assert found.step is not None
        peak = found.memory.peak
        return Way(
            kind,
            parts,
            found.step.seconds,
            self.tokens / found.step.seconds,
            peak,
            found.bytes,
            self.limit is None or peak <= self.limit,
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
