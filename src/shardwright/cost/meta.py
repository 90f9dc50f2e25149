"""The meta device, made to do as other devices do, and fast."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwright.cost.live import LiveBytes

META = torch.device("meta")

_PLAIN = int | float | str | torch.dtype | torch.device | torch.layout | torch.memory_format
_LONGEST = 64
"""Of lists among the arguments of operators that are looked up."""


class Rehearsing(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts bytes on the meta device. An operator is run once for each shape of its tensors; then
    only results like those are made: so a model whose blocks repeat is rehearsed fast.

    What is sent is held until its collective is waited for, as process groups do.

    Args:
        known: results of operators that were met before.
    """

    def __init__(self, known: dict[Any, Any]) -> None:
        super().__init__()
        self._known = known
        self._sent: dict[int, list[Tensor]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "_c10d_functional":
            return self._communicate(func, args, kwargs)
        if not _returns_new_tensors(func):
            return func(*args, **kwargs)
        try:
            key = (func, _described(args), *(_described(pair) for pair in kwargs.items()))
        except _NotPlainError:
            return func(*args, **kwargs)
        if key in self._known:
            return _like(self._known[key])
        out = func(*args, **kwargs)
        results = out if isinstance(out, list | tuple) else (out,)
        if all(result is None or result.is_meta for result in results):
            self._known[key] = _described(out)
        return out

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # On the meta device it would return another tensor.
            self._sent.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        out: Tensor = func(*args, **kwargs)
        sent = [args[0]]
        if func is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            # Gloo adds up in a copy. Other backends need less, by what is under way at a time.
            sent.append(torch.empty_like(args[0]))
            self._see(sent[-1], "")
        self._sent[out.untyped_storage()._cdata] = sent
        return out


class _NotPlainError(Exception):
    """An argument that is not made of tensors and plain values."""


@cache
def _returns_new_tensors(func: Any) -> bool:
    schema = func._schema
    tensors = all(str(each.type) == "Tensor" for each in schema.returns)
    aliases = any(each.alias_info for each in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and tensors and bool(schema.returns) and not aliases


def _described(argument: Any) -> Any:
    """What a result depends on; of a tensor shape, strides, dtype and device.

    Raises:
        _NotPlainError: if that cannot be said.
    """
    if isinstance(argument, Tensor):
        return _Like(argument)
    if argument is None or isinstance(argument, _PLAIN):
        return type(argument), argument
    if isinstance(argument, list | tuple) and len(argument) <= _LONGEST:
        return tuple(map(_described, argument))
    raise _NotPlainError


class _Like(tuple[Any, ...]):
    """A tensor without numbers."""

    __slots__ = ()

    def __new__(cls, tensor: Tensor) -> _Like:
        # A number among tensors is a tensor of the CPU, and promotes dtypes in its own way.
        of = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_meta)
        return super().__new__(cls, of)


def _like(described: Any) -> Any:
    if isinstance(described, _Like):
        shape, stride, dtype, _ = described
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)
    if described and isinstance(described[0], type):
        return described[1]
    return tuple(map(_like, described))


class FusedAttention:
    """A context in which attention takes its fused kernel, as on CPU and CUDA; the meta device has
    none and would hold the scores of all pairs.

    It is registered for the meta device and not a mode: modes are off while a backward pass runs,
    which computes segments again.
    """

    def __enter__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library.impl(  # type: ignore[no-untyped-call]
            "scaled_dot_product_attention", _attention, "AutogradMeta"
        )

    def __exit__(self, *_: object) -> None:
        self._library._destroy()  # type: ignore[no-untyped-call]


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    found = _fused(*args, **kwargs)
    if found is None:
        found, _ = torch.ops.aten._scaled_dot_product_attention_math.default(*args, **kwargs)
    assert found is not None
    return found


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The fused kernel's output; None where PyTorch does not take it."""
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    masked = attn_mask is not None and attn_mask.requires_grad
    if query.ndim != 4 or len(sizes) > 1 or dropout_p > 0 or masked:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask.logical_not(), float("-inf"), zero)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out: Tensor
    out, _ = kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return out
