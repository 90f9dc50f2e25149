"""Training programs as users write them, on real processes."""

from __future__ import annotations

import pytest
from benchmarks.program_ranks import EXACT, REFUSED
from benchmarks.programs.outcomes import outcomes


@pytest.mark.slow
@pytest.mark.distributed
def test_every_program_trains_as_on_one_device_or_is_refused() -> None:
    ends = outcomes()
    assert [one for one in ends if one.end not in (EXACT, REFUSED)] == []
    assert sum(one.end == EXACT for one in ends) > len(ends) / 2
    other_batches = [one for one in ends if one.program == "each rank has a batch of its own"]
    assert {one.end for one in other_batches} == {REFUSED}
    assert all(
        "dataset_strategy" in one.why and "same global batch" in one.why for one in other_batches
    )


@pytest.mark.distributed
def test_what_is_changed_between_steps_takes_effect_or_is_refused() -> None:
    exact = [
        "hooks of parameters that forward changes",
        "a forward hook is removed on the way",
        "a graph is kept over a step",
        "weights are scaled by data",
        "more layers on the way",
        "data of weights are replaced",
    ]
    refused = ["a layer is parametrized after planning"]
    ends = {one.program: one.end for one in outcomes([*exact, *refused], ranks=2)}
    assert ends == dict.fromkeys(exact, EXACT) | dict.fromkeys(refused, REFUSED)


@pytest.mark.distributed
def test_what_pytorch_offers_around_a_model_works_or_is_refused() -> None:
    exact = [
        "whole tensors are loaded",
        "a penalty on parameters",
        "a deep copy is trained",
        "a target network follows",
        "weights are averaged",
    ]
    refused = ["anomalies are detected", "the whole module is saved"]
    ends = {(one.program, one.end) for one in outcomes([*exact, *refused], ranks=2)}
    assert ends == {(name, EXACT) for name in exact} | {(name, REFUSED) for name in refused}


@pytest.mark.distributed
def test_what_a_loop_does_between_steps_works_or_is_refused() -> None:
    exact = [
        "a queue of keys in a buffer",
        "a state goes from call to call",
        "weights get noise",
        "numbers of weights are read",
        "evaluation in inference mode",
        "an auxiliary loss in an attribute",
    ]
    refused = [
        "a jacobian by vmap",
        "gradients are reduced by hand",
    ]
    ends = {(one.program, one.end) for one in outcomes([*exact, *refused], ranks=2)}
    assert ends == {(name, EXACT) for name in exact} | {(name, REFUSED) for name in refused}
