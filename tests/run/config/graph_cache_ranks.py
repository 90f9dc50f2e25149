"""What `test_graph_cache.py` runs on two ranks that read and write one cache at the same time."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from shardwright.core.api import parallelize
from shardwright.run.config import Run
from shardwright.run.config.graph_cache import graphs_folder
from torchrun import run_checks

TINY = Path(__file__).parents[3] / "configs" / "tiny" / "llama2_7b.yaml"


def tiny_run() -> Run:
    run = Run.from_file(TINY)
    parallel = run.config.parallel.model_copy(update={"mode": "data_parallel"})
    return replace(run, config=run.config.model_copy(update={"parallel": parallel}))


def losses() -> list[float]:
    """Of two steps with the cached graph, if there is one."""
    run = tiny_run()
    net = parallelize(run.model(), run.plan(2))
    optimizer = run.optimizer(net)
    found = []
    for _, batch in zip(range(2), run.batches.epoch(0), strict=False):
        loss = net(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@cache
def losses_without_cache() -> list[float]:
    os.environ["SHARDWRIGHT_GRAPH_CACHE"] = "off"
    try:
        return losses()
    finally:
        del os.environ["SHARDWRIGHT_GRAPH_CACHE"]


class Warnings(logging.Handler):
    """The warnings about the cache while it is entered."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("shardwright.capture").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("shardwright.capture").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trains_alike_after(damage: Callable[[bytes], bytes]) -> None:
    tiny_run().plan(2)
    (file,) = graphs_folder().iterdir()
    before = file.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(damage(before))
    dist.barrier()
    with Warnings() as lines:
        assert losses() == losses_without_cache()
    # The rank that is later may find what the other has written anew.
    damaged = [None] * 2
    dist.all_gather_object(damaged, lines)
    assert max(map(len, damaged)) == 1, damaged
    dist.barrier()
    with Warnings() as lines:
        tiny_run().plan(2)
    assert not lines
    assert [each.name for each in graphs_folder().iterdir()] == [file.name]


def an_undamaged_graph_trains_as_without_the_cache() -> None:
    tiny_run().plan(2)
    with Warnings() as lines:
        assert losses() == losses_without_cache()
    assert not lines


def a_flipped_bit_of_an_epsilon_changes_no_loss() -> None:
    trains_alike_after(flipped(b"], 1e-05]", b"], 1e-01]"))


def a_flipped_bit_of_a_dropout_changes_no_loss() -> None:
    trains_alike_after(flipped(b"null, 0.0, true]", b"null, 0.1, true]"))


def flipped(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Puts `new` in the place of the first `old`, from which one bit tells it."""
    bits = [(one ^ other).bit_count() for one, other in zip(old, new, strict=True)]
    assert sum(bits) == 1

    def damage(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return damage


def a_flipped_bit_of_the_checksum_changes_no_loss() -> None:
    trains_alike_after(lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:])


def a_missing_half_changes_no_loss() -> None:
    trains_alike_after(lambda content: content[: len(content) // 2])


CHECKS = (
    an_undamaged_graph_trains_as_without_the_cache,
    a_flipped_bit_of_an_epsilon_changes_no_loss,
    a_flipped_bit_of_a_dropout_changes_no_loss,
    a_flipped_bit_of_the_checksum_changes_no_loss,
    a_missing_half_changes_no_loss,
)

if __name__ == "__main__":
    run_checks(CHECKS)
