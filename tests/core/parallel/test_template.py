"""The copy of a model from which calls of other shapes and modes are captured."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from shardwright.core.parallel.template import template_of


def test_a_process_group_is_shared_and_tensors_have_no_values() -> None:
    group = dist.ProcessGroup(0, 1)
    template = template_of(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4, process_group=group)))
    assert template[1].process_group is group  # type: ignore[index]
    assert all(tensor.is_meta for tensor in template.state_dict().values())
