"""What was decided for a model, before all that follows from it is written into a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from shardwright.api.options import MB, Options
from shardwright.communication import as_used
from shardwright.cost.memory import Memory, memory
from shardwright.cost.predicted import Predicted, predict
from shardwright.cost.rehearsals import Rehearsals
from shardwright.cost.time import TimeModel, operator_seconds
from shardwright.decided import Decided, Storage
from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph
from shardwright.layout import Layout, TensorLayout
from shardwright.pins import Pins
from shardwright.pipelining import Pipelining
from shardwright.plan import Plan, make_plan
from shardwright.recompute import recompute_of
from shardwright.rules.rule import Cuts
from shardwright.search.modes import MODES, check_takes_pins
from shardwright.search.stages import balanced
from shardwright.search.storage import sharded_storage
from shardwright.strategy import arrivals, fix, input_entries, storage_as_said


@dataclass(frozen=True)
class Model:
    """A captured model and what its user attached to it.

    Args:
        modules: names that can be stages.
        training: the mode it was captured in.
        rehearsals: of its parts, whose results serve every draft.
        searched: what was decided before, by what the search was asked.
    """

    graph: Graph
    pins: Pins
    modules: tuple[str, ...]
    training: bool
    rehearsals: Rehearsals = field(default_factory=Rehearsals)
    searched: dict[object, tuple[Mapping[str, Cuts], float]] = field(default_factory=dict)

    @property
    def is_pinned(self) -> bool:
        """Whether the user has said anything of operators or parameters."""
        return bool(self.pins.strategies or self.pins.parameters)


@dataclass(frozen=True)
class Draft:
    """Decisions with the options that they were made for.

    Args:
        mesh: the device matrix of one stage.
    """

    model: Model
    options: Options
    mesh: Layout
    decided: Decided
    pipeline: Pipelining
    search_seconds: float

    @cached_property
    def predicted(self) -> Predicted | None:
        """What a step takes; None if no cluster was named."""
        if self.options.cluster is None:
            return None
        self._told("time")
        return predict(self.model.graph, self.mesh, self.decided, self.options.on, self.pipeline)

    @property
    def seconds(self) -> float:
        """Of a step; 0 if no cluster was named."""
        return 0.0 if self.predicted is None else self.predicted.seconds

    @property
    def weighed(self) -> float:
        """Seconds of a step, and what `mem_coeff` counts for the parameters that a device keeps, as
        the search by seconds does."""
        pricing = self.options.pricing(self.pipeline)
        assert pricing is not None
        used = as_used(self.model.graph, self.mesh, self.decided.cuts)
        parameters = self.model.graph.parameters
        kept = (
            prod(TensorLayout(self.mesh, used[value.name]).shard_shape(value.shape))
            * value.stored_dtype.itemsize
            for value in parameters
        )
        return self.seconds + pricing.kept * sum(kept)

    def memory(self, decided: Decided | None = None) -> Memory:
        """What each device needs, with these decisions or with others."""
        self._told("memory")
        return memory(
            self.model.graph,
            self.mesh,
            self.decided if decided is None else decided,
            self.pipeline,
            self.options.optimizer,
            self.model.rehearsals,
        )

    def _told(self, doing: str) -> None:
        self.options.on_progress(f"{doing}: {self.options.in_words()}")

    def plan(self) -> Plan:
        """The plan."""
        model, options = self.model, self.options
        return make_plan(
            model.graph,
            self.mesh,
            self.decided,
            mode=options.mode,
            options=options.of_search,
            search_seconds=self.search_seconds,
            training=model.training,
            pipeline=self.pipeline,
            pins=model.pins.strategies,
            predicted=self.predicted,
            memory_limit=options.device_memory,
            optimizer=options.optimizer,
            rehearsals=model.rehearsals,
        )


def draft(model: Model, options: Options) -> Draft:
    """Decides a model with exactly these options. Of a search by seconds the objective is simpler
    than what is predicted for a whole plan, so data parallel is taken where it is predicted to be
    better. Raises: as `plan`."""
    found = _decided(model, options, options.mode)
    if options.mode != "recursive_programming" or options.cost_model != "time" or model.is_pinned:
        return found
    try:
        other = _decided(model, options, "data_parallel")
    except StrategyError:  # The batch cannot be divided so.
        return found
    return min((found, other), key=lambda one: one.weighed)


def _decided(model: Model, options: Options, mode: str) -> Draft:
    graph, pins = model.graph, model.pins
    check_takes_pins(mode, pins.strategies)
    pipeline = options.asked.pipelining(graph, options.devices, model.modules)
    entries = input_entries(graph, options.dataset_strategy)
    of_stage = options.devices // pipeline.stages
    fixed = fix(graph, of_stage, pins.strategies, {**pins.parameters, **entries})
    arriving = arrivals(graph, fixed.mesh, options.dataset_strategy)
    pricing = options.pricing(pipeline)
    asked = {
        **options.of_search,
        "log_costs": options.log_costs,
        "pricing": pricing,
        "arrivals": arriving,
    }
    shared = None if pricing is None else pricing.sharing
    times = pipeline.stages, pipeline.micro_batches
    key = (fixed.mesh, mode, *options.of_search.values(), *times, shared)
    if key not in model.searched:
        options.on_progress(f"search: {options.in_words()}")
        started = time.perf_counter()
        found = MODES[mode](graph, fixed, asked)
        model.searched[key] = found, time.perf_counter() - started
    cuts, seconds = model.searched[key]
    if pipeline.stages > 1 and options.asked.stage_config is None and options.cluster is not None:
        work = operator_seconds(graph, TimeModel(options.on, fixed.mesh, pipeline.stages), cuts)
        pipeline = replace(pipeline, part_of=balanced(graph, pipeline.parts, work))
    decided = Decided(
        cuts,
        _storage(model, fixed.mesh, cuts, options),
        fixed.outputs,
        arriving,
        sharding=options.sharding,
        bucket_bytes=int(options.bucket_mb * MB),
        recompute=recompute_of(graph),
    )
    return Draft(model, options, fixed.mesh, decided, pipeline, seconds)


def _storage(model: Model, mesh: Layout, cuts: Mapping[str, Cuts], options: Options) -> Storage:
    """How each parameter is stored: as used, as said, else sharded further where that is asked."""
    graph, said = model.graph, model.pins.parameters
    storage: Storage = storage_as_said(graph, mesh, said, as_used(graph, mesh, cuts))
    if options.sharding is None:
        return storage
    return sharded_storage(graph, mesh, cuts, storage, options.sharding, said)
