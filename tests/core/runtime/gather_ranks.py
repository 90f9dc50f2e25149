"""What `test_worker_threads.py` runs on both processes: many all-gathers at once."""

import torch
import torch.distributed as dist

from shardwright.core.layout.layout import Layout
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.distributed import functional_collectives as c10d

dist.init_process_group("gloo")
Devices.of_process(Layout((2,), ("tp",)), torch.device("cpu"))
name = dist.distributed_c10d._get_default_group().group_name
rank = dist.get_rank()
expected = torch.tensor([[1.0, 2.0], [2.0, 4.0]])

for dtype in (torch.complex64, torch.bfloat16, torch.int64, torch.bool):
    parts = [(torch.eye(2)[each : each + 1] * (1 + each)).to(dtype) for each in range(2)]
    one = c10d.all_gather_into_tensor(parts[rank], 2, name)
    (many,) = c10d.all_gather_into_tensor_coalesced([parts[rank]], 2, name)
    for each in (one, many):
        assert torch.equal(c10d.wait_tensor(each), torch.cat(parts)), dtype
turned = c10d.all_gather_into_tensor((torch.ones(1, dtype=torch.cfloat) * 1j).conj(), 2, name)
assert c10d.wait_tensor(turned).tolist() == [-1j, -1j]

for _ in range(1500):
    mine = torch.tensor([[1.0, 2.0]]) * (1 + rank)
    gathered = [c10d.all_gather_into_tensor(mine, 2, name) for _ in range(14)]
    gathered += c10d.all_gather_into_tensor_coalesced([mine, mine], 2, name)
    for each in gathered:
        assert torch.equal(c10d.wait_tensor(each), expected)

print(f"rank {rank} gathered everything", flush=True)
dist.destroy_process_group()
