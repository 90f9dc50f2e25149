"""A picture of predicted against measured numbers, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

SIZE, MARGIN = 480, 56
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
WITHIN = 0.3
"""Lines beside the diagonal."""

Point = tuple[str, float, float]


def scatter(title: str, groups: Mapping[str, Sequence[Point]]) -> str:
    """Points on two logarithmic axes, with the diagonal on which predictions are exact.

    Args:
        groups: for each color its name, and its points: a name, measured and predicted.
    """
    numbers = [number for points in groups.values() for _, *pair in points for number in pair]
    low, high = floor(log10(min(numbers))), ceil(log10(max(numbers)))
    high = max(high, low + 1)

    def at(number: float) -> float:
        return MARGIN + (log10(number) - low) / (high - low) * (SIZE - 2 * MARGIN)

    def line(x: float, y: float, x2: float, y2: float, color: str) -> str:
        ends = f'x1="{x:.1f}" y1="{SIZE - y:.1f}" x2="{x2:.1f}" y2="{SIZE - y2:.1f}"'
        return f'<line {ends} stroke="{color}"/>'

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{SIZE - y:.1f}" {more}>{escape(words)}</text>'

    middle = 'text-anchor="middle"'
    first, last = 10.0**low, 10.0**high
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}"'
        f' height="{SIZE}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        text(SIZE / 2, SIZE - 20, title, middle),
        text(SIZE / 2, 14, "measured", middle),
        text(14, SIZE / 2, "predicted", f'{middle} transform="rotate(-90 14 {SIZE / 2})"'),
    ]
    for power in range(low, high + 1):
        place = at(10.0**power)
        parts += [
            line(place, MARGIN, place, SIZE - MARGIN, "#dddddd"),
            line(MARGIN, place, SIZE - MARGIN, place, "#dddddd"),
            text(place, MARGIN - 16, f"{10.0**power:g}", middle),
            text(MARGIN - 6, place - 4, f"{10.0**power:g}", 'text-anchor="end"'),
        ]
    for factor, color in ((1, "black"), (1 + WITHIN, "#999999"), (1 / (1 + WITHIN), "#999999")):
        start, end = max(first, first / factor), min(last, last / factor)
        parts.append(line(at(start), at(start * factor), at(end), at(end * factor), color))
    for number, (name, points) in enumerate(groups.items()):
        color = COLORS[number % len(COLORS)]
        parts.append(text(MARGIN + 8, SIZE - MARGIN - 14 * (number + 1), name, f'fill="{color}"'))
        for label, measured, predicted in points:
            place = f'cx="{at(measured):.1f}" cy="{SIZE - at(predicted):.1f}"'
            hint = f"<title>{escape(label)}: {measured:g} measured, {predicted:g} predicted</title>"
            parts.append(f'<circle {place} r="4" fill="{color}" opacity="0.7">{hint}</circle>')
    return "\n".join([*parts, "</svg>", ""])
