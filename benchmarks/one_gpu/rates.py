"""What the accelerator reaches, kernel by kernel, and the cluster file that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import log, prod
from statistics import linear_regression, median, pstdev

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.one_gpu.sizes import Sizes
from benchmarks.table import Table
from shardwright.core.cost.cluster import Cluster, Device
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.measure import measure_device
from shardwright.core.runtime.accelerator import pinned, seconds_of

HALVES = (0.0, *(2.0**power for power in range(3, 12)))
"""Values of `matrix_half` that are tried."""


def measured_cluster(
    device: torch.device, sizes: Sizes, name: str, links: str
) -> tuple[Cluster, list[Table]]:
    """The cluster of such devices, and the tables with all figures.

    Args:
        links: the cluster whose levels it gets, since one device has no links.
    """
    found = measure_device(device=device)
    products, of_matrices = _products(device, sizes, found)
    attention, attention_share, attention_half = _attention(device, sizes, found)
    memory_bound, memory_share = _memory_bound(device, sizes, found)
    matrix_share, half = matrix_figures(list(of_matrices), list(of_matrices.values()))
    shares = {
        "matrix_efficiency": matrix_share,
        "matrix_half": half,
        "attention_efficiency": attention_share,
        "attention_half": attention_half,
        "memory_efficiency": memory_share,
    }
    cluster = Cluster(name, replace(found, **shares), load_cluster(links).levels)
    figures = Table("The device, as the cluster file has it", ("", "measured"))
    for dtype, rate in found.rates.items():
        figures.add(f"matrix products, {dtype}", f"{rate / 1e12:.3g} TFLOP/s")
    figures.add("memory bandwidth", f"{found.memory_bandwidth / 1e9:.4g} GB/s")
    figures.add("matrix efficiency, of large products in the first dtype", f"{matrix_share:.0%}")
    figures.add("matrix half: of d rows, columns or inner products d / (d + this)", f"{half:g}")
    figures.add("attention efficiency, over many keys", f"{attention_share:.0%}")
    figures.add("attention half: of t keys of a query t / (t + this)", f"{attention_half:.0f}")
    figures.add("memory efficiency, median of what is memory-bound", f"{memory_share:.0%}")
    figures.add("overhead of an operator", f"{found.overhead * 1e6:.2f} µs")
    figures.add("memory", f"{found.memory / 2**30:.1f} GiB")
    return cluster, [
        figures,
        products,
        attention,
        memory_bound,
        _copies(device, sizes),
    ]


def seconds(work: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    """The median time of a call, after two measurements that are not counted."""

    def calls() -> None:
        for _ in range(sizes.calls):
            work()

    times = [seconds_of(calls, device) / sizes.calls for _ in range(sizes.repeats + 2)]
    return median(times[2:])


def matrix_figures(
    shapes: Sequence[tuple[int, int, int]], shares: Sequence[float]
) -> tuple[float, float]:
    """What large matrix products reach, and `matrix_half`: those of which the least is left to
    explain of the shares of the peak that products of m, n and k reach."""

    def large(half: float) -> list[float]:
        reached = (prod(d / (d + half) for d in shape) for shape in shapes)
        return [share / each for share, each in zip(shares, reached, strict=True)]

    half = min(HALVES, key=lambda half: pstdev(map(log, large(half))))
    return min(1.0, median(large(half))), half


def attention_figures(keys: Sequence[float], shares: Sequence[float]) -> tuple[float, float]:
    """`attention_efficiency` and `attention_half`: those that fit the shares of the peak that
    attention reaches best, by mean number of keys of a query: half / keys + 1 = efficiency / share
    is linear in 1 / keys."""
    if len(keys) < 2:
        return median(shares), 0.0
    fitted = linear_regression([1 / each for each in keys], [1 / share for share in shares])
    efficiency = min(1.0, 1 / fitted.intercept) if fitted.intercept > 0 else 1.0
    return efficiency, max(0.0, fitted.slope * efficiency)


def _products(
    device: torch.device, sizes: Sizes, found: Device
) -> tuple[Table, dict[tuple[int, int, int], float]]:
    names = [str(dtype).removeprefix("torch.") for dtype in sizes.dtypes]
    table = Table("Matrix products, TFLOP/s", ("m × n × k", *names, f"of the peak, {names[0]}"))
    shares: dict[tuple[int, int, int], float] = {}
    for m, n, k in sizes.matrices:
        rates = []
        for dtype in sizes.dtypes:
            a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((m, k), (k, n)))
            rates.append(2 * m * n * k / seconds(partial(torch.mm, a, b), device, sizes))
        share = min(1.0, rates[0] / found.rate(sizes.dtypes[0]))
        cells = (f"{rate / 1e12:.3g}" for rate in rates)
        table.add(f"{m:,} × {n:,} × {k:,}", *cells, f"{share:.0%}")
        # A product that takes less time than its launch measures the host, on an accelerator.
        if device.type == "cpu" or 2 * m * n * k / rates[0] > found.overhead:
            shares[m, n, k] = share
    return table, shares


def _attention(device: torch.device, sizes: Sizes, found: Device) -> tuple[Table, float, float]:
    table = Table(
        f"Causal attention, {sizes.block.heads} heads of {sizes.block.head_width}, bfloat16",
        ("batch × positions", "forward, TFLOP/s", "and backward, TFLOP/s", "of the products' peak"),
    )
    tokens, shares = max(sizes.sequences), []
    for sequence in sizes.sequences:
        shape = (tokens // sequence, sizes.block.heads, sequence, sizes.block.head_width)
        q, k, v = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)

        def both(forward: Callable[[], Tensor] = forward, gradient: Tensor = gradient) -> None:
            forward().backward(gradient)  # type: ignore[no-untyped-call]

        # Half of the two products of each pair of positions is masked.
        flops = 2 * q.numel() * sequence
        alone = flops / seconds(forward, device, sizes)
        together = 3.5 * flops / seconds(both, device, sizes)
        cells = (f"{rate / 1e12:.3g}" for rate in (alone, together))
        shares.append(min(1.0, together / found.rate(torch.bfloat16)))
        table.add(f"{shape[0]} × {sequence:,}", *cells, f"{shares[-1]:.0%}")
    # A query of causal attention has half of the keys in the mean.
    return table, *attention_figures([sequence / 2 for sequence in sizes.sequences], shares)


def _memory_bound(device: torch.device, sizes: Sizes, found: Device) -> tuple[Table, float]:
    table = Table(
        "Operators that read and write",
        ("operator", "GB/s", "of the bandwidth"),
    )
    shares = []
    for name, moved, work in _streams(device, sizes):
        rate = moved / seconds(work, device, sizes)
        shares.append(min(1.0, rate / found.memory_bandwidth))
        table.add(name, f"{rate / 1e9:.4g}", f"{rate / found.memory_bandwidth:.0%}")
    return table, median(shares)


def _streams(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes read and written, and call."""
    width = sizes.block.width
    for dtype in (torch.bfloat16, torch.float32):
        x, y = (torch.randn(sizes.elements // width, width, device=device) for _ in range(2))
        x, y, kind = x.to(dtype), y.to(dtype), str(dtype).removeprefix("torch.")
        size = x.nbytes
        yield f"copy, {kind}", 2 * size, partial(y.copy_, x)
        yield f"x + y, {kind}", 3 * size, partial(torch.add, x, y)
        yield f"silu, {kind}", 2 * size, partial(F.silu, x)
        yield f"RMS norm, {kind}", 2 * size, partial(F.rms_norm, x, (width,))
        yield f"softmax, {kind}", 2 * size, partial(torch.softmax, x, -1)
    for fused in (False, True):
        parameter = torch.zeros(sizes.elements // 4, device=device, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], fused=fused or None)
        optimizer.step()
        name = "fused AdamW" if fused else "AdamW"
        # Parameter, gradient and two moments are read, three of them written.
        yield f"{name}, float32", 7 * parameter.nbytes, optimizer.step


def _copies(device: torch.device, sizes: Sizes) -> Table:
    table = Table("Copies between host and device", ("direction", "GB/s"))
    there = torch.zeros(sizes.elements // 4, device=device)
    here = torch.zeros(sizes.elements // 4)
    hosts = {"pageable": here}
    if device.type != "cpu":
        hosts["pinned"] = pinned(here)
    for kind, host in hosts.items():
        for direction, work in (
            ("to the device", partial(there.copy_, host, non_blocking=True)),
            ("to the host", partial(host.copy_, there, non_blocking=True)),
        ):
            rate = host.nbytes / seconds(work, device, sizes)
            table.add(f"{direction}, {kind}", f"{rate / 1e9:.3g}")
    return table
