"""Phases of long calls are counted, and say how long those take that are left."""

import torch
from torch import nn

import shardwright as sw
from shardwright.progress import RemainingTime, nested_progress, share_reporter, subrange, track


def test_a_part_of_a_part_is_named_after_it_and_counts_as_it() -> None:
    heard: list[tuple[str, int, int]] = []

    def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
        heard.append((doing, done, of))

    nested_progress(nested_progress(on_progress, "llama", 1, 3), "auto")("search", 4, 5)
    assert heard == [("llama: auto: search", 1, 3)]


def test_what_is_left_takes_as_long_as_what_was_done() -> None:
    now = 100.0
    left = RemainingTime(lambda: now)
    assert left.seconds(0, 0) is None
    assert left.seconds(2, 10) is None, "nothing is known of how long one takes"
    now = 106.0
    assert left.seconds(4, 10) == 18.0
    assert left.seconds(4, 14) == 30.0, "more was added"
    assert left.seconds(0, 5) is None, "something else is counted"


def test_a_search_under_a_memory_limit_counts_what_waits() -> None:
    heard: list[tuple[int, int]] = []

    def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
        heard.append((done, of))

    net, batch = nn.Linear(64, 64), (torch.zeros(32, 64),)
    sw.plan(net, batch, devices=4, cluster="h100", memory_limit="42KiB", on_progress=on_progress)
    counts = [(done, of) for done, of in heard if of]
    assert counts == sorted(counts, key=lambda each: each[0])
    assert all(done < of for done, of in counts) and len({done for done, _ in counts}) > 1


def test_a_share_is_reported_once_a_second_and_only_if_it_is_larger() -> None:
    heard: list[tuple[str, int, int]] = []
    now = 0.0

    def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
        heard.append((doing, done, of))

    on_share = share_reporter(on_progress, "search", lambda: now)
    for moment, share in ((0.5, 0.1), (1.5, 0.2), (2.0, 0.3), (3.0, 0.2), (4.0, 0.75), (5.5, 1.0)):
        now = moment
        on_share(share)
    assert heard == [("search", 0, 100), ("search", 20, 100), ("search", 75, 100)]


def test_parts_of_a_phase_fill_it() -> None:
    shares: list[float] = []
    assert list(track("ab", subrange(shares.append, 0, 4))) == ["a", "b"]
    assert list(track("ab", subrange(shares.append, 1, 4, size=3))) == ["a", "b"]
    assert shares == [0.0, 0.125, 0.25, 0.25, 0.625, 1.0]


def test_what_is_counted_anew_takes_no_time_of_what_was_counted_before() -> None:
    now = 0.0
    left = RemainingTime(lambda: now)
    left.seconds(0, 4)
    now = 40.0
    left.seconds(3, 4)
    assert left.seconds(0, 8) is None
    now = 41.0
    assert left.seconds(1, 8) == 7.0
