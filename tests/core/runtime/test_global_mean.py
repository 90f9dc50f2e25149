"""`sw.global_mean` divides in at least float32."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import shardwright as sw


@pytest.fixture(params=[False, True], ids=["one process", "a group of ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if request.param:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.float16, 100_000), (torch.bfloat16, 1_001)], ids=str
)
@pytest.mark.usefixtures("ranks")
def test_a_count_that_the_dtype_of_the_total_cannot_hold_is_exact(
    dtype: torch.dtype, count: int
) -> None:
    total = torch.tensor([60_000.0, 30_000.0], dtype=dtype, requires_grad=True)
    mean = sw.global_mean(total, torch.tensor(count))
    mean.sum().backward()
    expected = total.detach().double() / count
    torch.testing.assert_close(mean.detach(), expected.to(dtype), rtol=0, atol=0)
    assert total.grad is not None
    torch.testing.assert_close(
        total.grad, torch.full((2,), 1 / count, dtype=torch.float64).to(dtype), rtol=0, atol=0
    )


@pytest.mark.usefixtures("ranks")
def test_no_gradient_flows_into_a_count() -> None:
    total, count = torch.ones(2, requires_grad=True), torch.tensor(4.0, requires_grad=True)
    sw.global_mean(total, count).sum().backward()
    assert count.grad is None
    assert total.grad is not None and total.grad.tolist() == [0.25, 0.25]


@pytest.mark.usefixtures("ranks")
def test_a_count_that_is_a_python_number_is_not_rounded() -> None:
    total = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    mean = sw.global_mean(total, 0.1)
    mean.sum().backward()
    assert mean.item() == 1.0 / 0.1
    assert total.grad is not None and total.grad.item() == 1.0 / 0.1


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
@pytest.mark.usefixtures("ranks")
def test_a_mean_of_counts_is_a_fraction(dtype: torch.dtype) -> None:
    mean = sw.global_mean(torch.tensor([1, 0]).to(dtype), torch.tensor([4]))
    assert mean.dtype == torch.float32
    assert mean.tolist() == [0.25, 0.0]


@pytest.mark.usefixtures("ranks")
def test_a_count_with_several_values_is_refused() -> None:
    with pytest.raises(sw.DataError, match=r"`count` of `global_mean` is a tensor of shape \(3,\)"):
        sw.global_mean(torch.ones(3), torch.ones(3))
