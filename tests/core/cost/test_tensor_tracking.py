"""Live bytes are counted by storage, from the operator that makes it to its last reference."""

from __future__ import annotations

import torch

from shardwright.core.cost.tensor_tracking import PARAMETERS, WEIGHTS, LiveBytes


def test_a_storage_counts_once_however_many_views_it_has() -> None:
    with LiveBytes() as live:
        x = torch.zeros(100)
        _, _ = x.view(10, 10), x[3:]
        assert live.current_bytes == 400


def test_what_nothing_refers_to_is_gone() -> None:
    with LiveBytes() as live:
        x = torch.zeros(100)
        y = x.view(10, 10)
        del x
        assert live.current_bytes == 400
        del y
        assert live.current_bytes == 0


def test_the_peak_is_found_between_two_moments() -> None:
    with LiveBytes() as live:
        a = torch.zeros(100)
        del a
        start = len(live.history)
        b = torch.zeros(10)
        c = b + 1
        del c
        assert sum(live.bytes_between(live.events_until_peak()).values()) == 400
        assert sum(live.bytes_between(live.events_until_peak(start)).values()) == 80


def test_what_autograd_keeps_counts_until_the_backward_pass() -> None:
    with LiveBytes() as live:
        w = torch.ones(100, requires_grad=True)
        loss = (w * 2).exp().sum()
        kept = live.current_bytes
        loss.backward()
        del loss
        # The result of exp is kept for its gradient; the gradient of w stays.
        assert kept == 400 + 400 + 4
        assert live.current_bytes == 400 + 400


def test_tensors_that_were_there_before_are_counted_if_they_are_watched() -> None:
    x, y = torch.zeros(100), torch.zeros(50)
    with LiveBytes() as live:
        live.watch([x, x.view(10, 10)], PARAMETERS)
        assert live.bytes_between(len(live.history)) == {PARAMETERS: 400}
        z = y + 1
        assert live.current_bytes == 600
        del z


def test_what_is_made_of_parameters_alone_is_told_apart() -> None:
    weight, x = torch.zeros(100), torch.zeros(100)
    with LiveBytes() as live:
        live.watch([weight], PARAMETERS)
        cast = weight.to(torch.bfloat16)
        joined = torch.cat([cast, cast])
        mixed = joined[:100] * x
        live.label("activations")
        assert live.bytes_between(len(live.history)) == {
            PARAMETERS: 400,
            WEIGHTS: 600,
            "activations": 400,
        }
        del mixed
        assert live.bytes_between(len(live.history))["activations"] == 0
