"""Objects of samples are gathered once, also where several ranks load one data shard."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch.distributed as dist

from shardwright.integrations.accelerate_metrics import gather_distinct_objects
from shardwright.integrations.rank_data import DataShards


@pytest.mark.parametrize("owners", [((0, 1), (2, 3)), ((0, 2), (1, 3))])
def test_ranks_of_one_shard_give_their_objects_once(
    owners: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_shards = ["a", "b"], ["c", "a"]

    def all_gather_object(of_ranks: list[Any], objects: Any) -> None:
        assert objects == of_shards[0]
        for objects, ranks in zip(of_shards, owners, strict=True):
            for rank in ranks:
                of_ranks[rank] = objects

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    shards = DataShards(2, 0, owners)
    assert gather_distinct_objects(of_shards[0], shards, None, 0) == ["a", "b", "c", "a"]
