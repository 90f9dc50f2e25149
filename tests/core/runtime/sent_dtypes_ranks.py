"""What `test_sent_dtypes.py` runs on two processes: collectives on tensors of all dtypes."""

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.layout.layout import Layout
from shardwright.core.runtime.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.sent_dtypes import broadcast
from shardwright.core.torch_internals.distributed import functional_collectives as c10d

DTYPES = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
# Numbers of quantized tensors, and of less than 8 bits, which PyTorch does not convert.
DTYPES = {each for each in DTYPES if "q" not in str(each) and "bits" not in str(each)}
DTYPES -= {getattr(torch, f"{sign}int{bits}") for sign in ("u", "") for bits in range(1, 8)}
DTYPES.discard(getattr(torch, "float4_e2m1fn_x2", None))

dist.init_process_group("gloo")
devices = Devices.of_process(Layout((2,), ("tp",)), torch.device("cpu"))
group, rank = devices.group((0,)), dist.get_rank()
NUMBERS = torch.tensor([[1.0, 2.0], [4.0, 8.0]])


def check(result: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    # 8-bit numbers that are powers of 2 hold no sums of two.
    result, wanted = result.to(torch.complex64), wanted.to(dtype).to(torch.complex64)
    assert torch.equal(result, wanted), (dtype, result)


assert {torch.int16, torch.uint64, torch.float8_e5m2, torch.complex128, torch.bool} < DTYPES
for dtype in sorted(DTYPES, key=str):
    numbers = NUMBERS > 3 if dtype == torch.bool else NUMBERS
    part = numbers[rank : rank + 1].to(dtype)
    check(all_gather(0, group)(part), numbers, dtype)
    check(all_to_all(0, 1, group)(part), numbers[:, rank : rank + 1], dtype)
    gathered = c10d.all_gather_into_tensor(part, 2, group.name)
    check(c10d.wait_tensor(gathered), numbers, dtype)
    sent = part.clone()
    broadcast(sent, None, 0)
    check(sent, numbers[:1], dtype)
    if dtype != torch.bool:
        total = numbers.sum(0, keepdim=True)
        check(all_reduce(group)(part), total, dtype)
        whole = part.repeat(1, 2)
        check(reduce_scatter(1, group)(whole), total, dtype)

print(f"rank {rank} has sent every dtype", flush=True)
dist.destroy_process_group()
