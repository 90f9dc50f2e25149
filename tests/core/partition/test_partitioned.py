"""A model is partitioned once: plan, costs and programs start from the same chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardwright as sw
from sample_models import mlp
from shardwright.core.lower.emit_program import lower
from shardwright.core.partition import chunk as chunk_file
from shardwright.core.partition.communication import Communication, communication
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.devices import Devices


def planned(stages: int = 2) -> sw.Plan:
    net, args, _ = mlp(8)
    of_pipeline = {"stages": stages, "micro_batches": stages}
    return sw.plan(net, args, devices=4, mode="data_parallel", cluster="a100", **of_pipeline)


def test_plan_costs_and_programs_derive_the_communication_of_a_chunk_once_for_each_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    derived = []

    def counted(*args: Any) -> Communication:
        derived.append(args)
        return communication(*args)

    monkeypatch.setattr(chunk_file, "communication", counted)
    plan = planned()
    assert plan.memory.peak > 0
    assert plan.timeline().seconds > 0
    devices = Devices.of_rank(plan.mesh, 0)
    programs = [lower(chunk, devices) for chunk in plan.partitioned.chunks]
    # On the prime axes of the search, and on the folded ones of the plan.
    assert len(derived) == 2 * len(programs) == 4


def test_the_bytes_of_the_busiest_stage_are_those_of_the_plan() -> None:
    plan = planned()
    assert max(plan.partitioned.step_bytes, key=sum) == (plan.forward_bytes, plan.backward_bytes)


def test_every_parameter_lies_in_the_stages_whose_chunks_read_it() -> None:
    partitioned = planned().partitioned
    names = {value.name for value in partitioned.graph.parameters}
    assert set(partitioned.stages_of_parameters) == names
    for stage in range(2):
        parameters, _ = partitioned.tensors_of(stage)
        assert {value.name for value in parameters} == {
            name for name, stages in partitioned.stages_of_parameters.items() if stage in stages
        }


def test_a_plan_with_other_decisions_is_partitioned_anew() -> None:
    plan = planned(stages=1)
    other = replace(plan, pipeline=PipelineSpec(micro_batches=2))
    assert other.partitioned is not plan.partitioned
    assert other.partitioned.pipeline.micro_batches == 2


def test_a_plan_is_equal_to_what_its_file_holds_after_it_was_partitioned() -> None:
    plan = planned()
    assert len(plan.partitioned.chunks) == 2
    assert sw.Plan.from_json(plan.to_json()) == plan
