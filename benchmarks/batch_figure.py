"""Draws decode speed by batch size: `python benchmarks/batch_figure.py FIGURE.json FIGURE.svg`.

The JSON is what `shoal bench engine --json` prints, or holds a title, a note, the batch sizes and one series of
tokens/s per engine (null where not measured). Plain SVG, so that it needs no plotting library and reads well in black
and white: engines differ in tone and are labelled.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 64, 64
TONES = ("#1b5e7d", "#b9c4c9", "#7d5a1b")


def from_record(record: dict[str, Any]) -> dict[str, Any]:
    """The figure of one run of the benchmark."""
    machine = record["machine"]
    return {
        "title": f"Decode tokens per second, {record['model']['name']}",
        "note": f"{record['date'][:10]}, {machine['cores']} cores of {machine['cpu']}, {record['prompt_len']} + "
        f"{record['output_len']} tokens a sequence",
        "batches": [item["batch"] for item in record["results"]],
        "series": [
            {
                "name": f"Shoal, {record['precision']}",
                "tokens_per_s": [round(item["decode_tokens_per_s"]) for item in record["results"]],
            }
        ],
    }


def draw(data: dict[str, Any]) -> str:
    """The SVG of one figure."""
    batches, series = data["batches"], data["series"]
    highest = max(value for item in series for value in item["tokens_per_s"] if value is not None)
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    group = plot_width / len(batches)
    bar = group * 0.8 / len(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" ',
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="16" font-weight="bold">{escape(data["title"])}</text>',
    ]
    for number, item in enumerate(series):
        x = LEFT + number * 260
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{TONES[number]}"/>')
        parts.append(f'<text x="{x + 18}" y="45">{escape(item["name"])}</text>')
    base = TOP + plot_height
    parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#333"/>')
    for place, batch in enumerate(batches):
        begin = LEFT + place * group + group * 0.1
        for number, item in enumerate(series):
            value = item["tokens_per_s"][place]
            x = begin + number * bar
            if value is None:
                continue
            height = plot_height * value / highest
            parts.append(
                f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{bar - 4:.1f}" height="{height:.1f}" '
                f'fill="{TONES[number]}"/>'
            )
            parts.append(
                f'<text x="{x + (bar - 4) / 2:.1f}" y="{base - height - 5:.1f}" text-anchor="middle">{value}</text>'
            )
        middle = LEFT + (place + 0.5) * group
        parts.append(f'<text x="{middle:.1f}" y="{base + 18}" text-anchor="middle">{batch}</text>')
    parts.append(
        f'<text x="{LEFT + plot_width / 2}" y="{base + 36}" text-anchor="middle">sequences in the batch</text>'
    )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" font-size="11" fill="#555">{escape(data["note"])}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(draw(from_record(given) if "results" in given else given), encoding="utf-8")
