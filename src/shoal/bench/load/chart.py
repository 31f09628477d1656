"""Throughput against latency, one point for each load of a sweep, as plain SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shoal.bench.load.report import LoadReport

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 60, 70
_SERIES = (("median gap between tokens", "#1b5e7d", "p50"), ("95th percentile", "#b9762b", "p95"))


def draw_sweep(reports: Sequence[LoadReport], labels: Sequence[str], *, title: str, note: str) -> str:
    """The picture; ``labels`` say which load each point is."""
    points = [(report, label) for report, label in zip(reports, labels, strict=True) if report.itl is not None]
    right = _round_up(max((report.output_tokens_rate for report, _ in points), default=1.0))
    top = _round_up(max((report.itl.p95 * 1e3 for report, _ in points if report.itl), default=1.0))
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    base = TOP + plot_height

    def place(report: LoadReport, rank: str) -> tuple[float, float]:
        gap = getattr(report.itl, rank) * 1e3
        return LEFT + plot_width * report.output_tokens_rate / right, base - plot_height * gap / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    for step in range(5):
        value_x, value_y = right * step / 4, top * step / 4
        x, y = LEFT + plot_width * step / 4, base - plot_height * step / 4
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value_y:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{value_x:g}</text>')
    for number, (name, tone, rank) in enumerate(_SERIES):
        x = LEFT + number * 250
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{tone}"/>')
        parts.append(f'<text x="{x + 18}" y="45">{name}, ms</text>')
        line = " ".join("{:.1f},{:.1f}".format(*place(report, rank)) for report, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{tone}" stroke-width="2"/>')
        for report, label in points:
            at_x, at_y = place(report, rank)
            parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="{tone}"/>')
            if number == len(_SERIES) - 1:  # above the upper line nothing is in the way
                parts.append(f'<text x="{at_x:.1f}" y="{at_y - 10:.1f}" text-anchor="middle">{escape(label)}</text>')
    middle = LEFT + plot_width / 2
    parts.append(f'<text x="{middle:.1f}" y="{base + 38}" text-anchor="middle">output tokens per second</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" font-size="11" fill="#555">{escape(note)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 or 10 times a power of ten: the end of an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 4, 5, 8, 10) if factor * power >= value)
