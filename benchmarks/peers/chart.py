"""The comparison as a chart: one panel of horizontal bars per batch size, and one for prefill. Pure.

Plain SVG, so that it needs no plotting library. Shoal's bars are dark; a bar whose weights lose quality is hatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from table import KEEPS_QUALITY, PREFILL, value_of

PANELS_A_ROW = 3
PANEL_WIDTH, NAME_WIDTH, NUMBER_WIDTH = 370, 142, 48
BAR, STEP = 13, 19
TITLE, PANEL_TITLE, MARGIN, FOOT = 52, 26, 18, 44
SHOAL, RIVAL = "#14506e", "#9fb2ba"


def svg(record: Mapping[str, Any]) -> str:
    """The whole chart."""
    columns = [*(str(batch) for batch in record["batches"]), PREFILL]
    rows = record["rows"]
    panel_height = PANEL_TITLE + STEP * len(rows) + MARGIN
    lines = -(-len(columns) // PANELS_A_ROW)
    width = PANELS_A_ROW * PANEL_WIDTH + MARGIN
    height = TITLE + lines * panel_height + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" ',
        'font-family="sans-serif" font-size="12">',
        '<defs><pattern id="loses" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="5" height="5" fill="white"/><rect width="2.5" height="5" fill="{RIVAL}"/></pattern></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="17" font-weight="bold">'
        f"{escape(record['model'])}: tokens per second by batch size</text>",
        f'<text x="{MARGIN}" y="42" fill="#555">{escape(_subtitle(record))}</text>',
    ]
    for place, column in enumerate(columns):
        x = MARGIN + place % PANELS_A_ROW * PANEL_WIDTH
        y = TITLE + place // PANELS_A_ROW * panel_height
        parts += _panel(rows, column, x, y)
    parts += _legend(height)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(rows: Sequence[Mapping[str, Any]], column: str, x: int, y: int) -> list[str]:
    title = "prefill, best batch size" if column == PREFILL else f"decode, {column} at once"
    parts = [f'<text x="{x}" y="{y + 17}" font-size="14" font-weight="bold">{title}</text>']
    values = [(row, value_of(row, column)) for row in rows]
    highest = max((value for _, value in values if value is not None), default=1.0)
    room = PANEL_WIDTH - NAME_WIDTH - NUMBER_WIDTH - MARGIN
    for number, (row, value) in enumerate(values):
        top = y + PANEL_TITLE + number * STEP
        base = top + BAR - 2
        weight = ' font-weight="bold"' if row["engine"] == "Shoal" else ""
        begin = x + NAME_WIDTH
        parts.append(f'<text x="{begin - 6}" y="{base}" text-anchor="end"{weight}>{escape(row["name"])}</text>')
        if value is None:
            parts.append(f'<text x="{begin}" y="{base}" fill="#555">not measured</text>')
            continue
        length = room * value / highest
        parts.append(f'<rect x="{begin}" y="{top}" width="{length:.1f}" height="{BAR}" {_fill(row)}/>')
        parts.append(f'<text x="{begin + length + 5:.1f}" y="{base}"{weight}>{value:.0f}</text>')
    return parts


def _fill(row: Mapping[str, Any]) -> str:
    if row["engine"] == "Shoal":
        return f'fill="{SHOAL}"'
    change = row["perplexity_change"]
    if change is not None and change > KEEPS_QUALITY:
        return f'fill="url(#loses)" stroke="{RIVAL}"'
    return f'fill="{RIVAL}"'


def _legend(height: int) -> list[str]:
    y = height - 22
    parts = []
    for x, fill, text in (
        (MARGIN, f'fill="{SHOAL}"', "Shoal"),
        (MARGIN + 90, f'fill="{RIVAL}"', "others"),
        (MARGIN + 180, f'fill="url(#loses)" stroke="{RIVAL}"', "weights that lose more than 1 % perplexity"),
    ):
        parts.append(f'<rect x="{x}" y="{y - 11}" width="13" height="13" {fill}/>')
        parts.append(f'<text x="{x + 19}" y="{y}">{text}</text>')
    return parts


def _subtitle(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    return (
        f"{record['date']}, {machine['cores']} cores of {machine['cpu']}, {record['prompt_len']} + "
        f"{record['output_len']} tokens a sequence, median of {record['rounds']} rounds"
    )
