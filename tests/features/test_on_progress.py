"""A program can follow what `sw.plan` is doing."""

import torch
from torch import nn

import shardwright as sw


def heard_of_plan(net: nn.Module, **options: object) -> list[str]:
    heard: list[str] = []

    def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
        if doing not in heard[-1:]:
            heard.append(doing)

    x = (torch.zeros(32, 64),)
    sw.plan(net, x, devices=4, on_progress=on_progress, **options)  # type: ignore[arg-type]
    return heard


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def test_a_model_is_captured_then_searched() -> None:
    assert heard_of_plan(layers()) == ["capture", "search: mem_coeff=0.1"]


def test_under_a_memory_limit_each_attempt_is_named() -> None:
    heard = heard_of_plan(layers(), memory_limit="1MiB", mode="data_parallel")
    assert heard == ["capture", "search: as requested", "memory: as requested"]


def test_each_number_of_stages_is_named() -> None:
    # A limit under which no number of stages is left out by a bound on its step time.
    options = {"stages": "auto", "micro_batches": 4, "memory_limit": "55KiB"}
    heard = heard_of_plan(layers(), cluster="h100", **options)
    searched = [each for each in heard if each.startswith("search")]
    for end in ("mem_coeff=0.1", "2 stages", "4 stages"):
        assert any(each.endswith(end) for each in searched)
