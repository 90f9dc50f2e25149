import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwright.core.graph.partial_attention import partial_attention, partial_attention_backward


def reference(
    query: Tensor, key: Tensor, value: Tensor, diagonal: int | None
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    read = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    if diagonal is not None:
        read = read.tril(diagonal)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~read, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().nan_to_num(0.0) @ value, lse


def tensors(dtype: torch.dtype, heads: int, size: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(keys)
    shapes = (2, 4, 600, 8), (2, heads, keys, 8), (2, heads, keys, size)
    query, key, value = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("size", [8, 6])  # Of values; with another than that of keys none is fused.
@pytest.mark.parametrize("diagonal", [None, 0, 3, 300, 599, -600])
def test_a_part_is_what_the_formula_says(dtype, heads, size, diagonal) -> None:
    query, key, value = tensors(dtype, heads, size, 600)
    precise = [each.double().requires_grad_() for each in (query, key, value)]
    expected, sums = reference(*precise, diagonal)
    out, lse = partial_attention(query, key, value, diagonal, None)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    at_most = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
    near = {"rtol": at_most, "atol": at_most}
    assert_close(out.double(), expected, **near)
    assert_close(lse.double(), sums, **near)
    gradient = torch.randn_like(out)
    found = partial_attention_backward(gradient, query, key, value, out, lse, diagonal, None)
    if diagonal == -600:
        assert not any(each.any() for each in found)
    else:
        of_inputs = torch.autograd.grad(expected, precise, gradient.double())
        for each, right in zip(found, of_inputs, strict=True):
            assert each.dtype == dtype
            assert_close(each.double(), right, rtol=5 * at_most, atol=5 * at_most)


def test_queries_before_the_first_key_of_a_part_get_nothing() -> None:
    query, key, value = tensors(torch.float64, 4, 8, 500)
    out, lse = partial_attention(query, key, value, -40, None)
    assert not out[..., :40, :].any()
    assert lse[..., :40].isneginf().all()
    expected, sums = reference(query, key, value, -40)
    assert_close((out, lse), (expected, sums))


@pytest.mark.parametrize("size", [8, 6])
def test_what_is_no_number_stays_none(size: int) -> None:
    query, key, value = tensors(torch.float32, 2, size, 600)
    query[0, 0, 7] = torch.nan
    for diagonal in (None, 0):
        out, lse = partial_attention(query, key, value, diagonal, None)
        assert out[0, 0, 7].isnan().all() and lse[0, 0, 7].isnan()
        assert not out[1].isnan().any()


def test_shapes_on_the_meta_device_are_those_of_results() -> None:
    given = tensors(torch.bfloat16, 2, 6, 300)
    out, lse = partial_attention(*given, 0, None)
    gradients = partial_attention_backward(out, *given, out, lse, 0, None)
    meta = [each.to("meta") for each in given]
    fake_out, fake_lse = partial_attention(*meta, 0, None)
    fakes = partial_attention_backward(fake_out, *meta, fake_out, fake_lse, 0, None)
    for one, other in zip((out, lse, *gradients), (fake_out, fake_lse, *fakes), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
