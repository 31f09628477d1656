"""The comparison as a Markdown table. Pure: everything comes from the record that ``compare.py`` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KEEPS_QUALITY = 0.01  # perplexity against the model's file in float32
MISSING = "–"
PREFILL = "prefill"


def markdown(record: Mapping[str, Any]) -> str:
    """Heading line, table, ratios, and what went wrong."""
    batches = [str(batch) for batch in record["batches"]]
    columns = [*batches, PREFILL]
    rows = record["rows"]
    head = ["", "weights: perplexity", *(f"B={batch}" for batch in batches), "prefill (best)", "start-up"]
    lines = [_line(head), _line(["---", "---", *["---:"] * (len(head) - 2)])]
    for row in rows:
        figures = [_number(value_of(row, column)) for column in columns]
        lines.append(_line([row["name"], _quality(row), *figures, _startup(row)]))
    for title, members in (
        ("best rival, any format", rivals(rows)),
        ("best rival that keeps quality", keepers(rivals(rows))),
    ):
        bests = {column: best_of(members, column) for column in columns}
        names = [MISSING if best is None else f"{best[1]:.0f} ({best[0]})" for best in bests.values()]
        lines.append(_line([f"*{title}*", "", *names, ""]))
        for row in rows:
            if row["engine"] == "Shoal":
                ratios = [_ratio(value_of(row, column), best) for column, best in bests.items()]
                lines.append(_line([f"**{row['name']}** over it", "", *ratios, ""]))
    return "\n".join([*_preamble(record), "", *lines, "", *_notes(record)]) + "\n"


def value_of(row: Mapping[str, Any], column: str) -> float | None:
    """A row's median at a batch size (as text), or its best prefill."""
    if column == PREFILL:
        values = [item["median"] for item in row["prefill"].values()]
        return max(values, default=None)
    found = row["decode"].get(column)
    return None if found is None else found["median"]


def rivals(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Everybody but Shoal."""
    return [row for row in rows if row["engine"] != "Shoal"]


def keepers(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those whose weights are known to cost at most 1 % perplexity."""
    return [row for row in rows if row["perplexity_change"] is not None and row["perplexity_change"] <= KEEPS_QUALITY]


def best_of(rows: Sequence[Mapping[str, Any]], column: str) -> tuple[str, float] | None:
    """Name and value of the fastest."""
    found = [(row["name"], value) for row in rows if (value := value_of(row, column)) is not None]
    return max(found, key=lambda item: item[1], default=None)


def _preamble(record: Mapping[str, Any]) -> list[str]:
    machine = record["machine"]
    return [
        f"{record['date']}, {machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instruction_sets'])}), "
        f"{record['model']}, Shoal {record['shoal']}. Decode in tokens per second by batch size B, "
        f"{record['prompt_len']} + {record['output_len']} tokens a sequence, {record['threads']} threads, median of "
        f"{record['rounds']} interleaved rounds; prefill at the batch size that suits each best."
    ]


def _notes(record: Mapping[str, Any]) -> list[str]:
    notes = [f"- {row['name']}: {row['error']}" for row in record["rows"] if row["error"]]
    notes += [f"- {note}" for note in record["notes"]]
    worst = [
        (1 - item["lowest"] / item["highest"], row["name"], batch)
        for row in record["rows"]
        for batch, item in row["decode"].items()
    ]
    if worst and record["rounds"] > 1:
        spread, name, batch = max(worst)
        notes.append(
            f"- Widest spread between rounds: {name} at B={batch}, the slowest {spread:.0%} below the fastest."
        )
    return notes


def _quality(row: Mapping[str, Any]) -> str:
    change = row["perplexity_change"]
    if change is None:
        return "not measured"
    return f"{change:+.1%}" + ("" if change <= KEEPS_QUALITY else ", does not keep quality")


def _startup(row: Mapping[str, Any]) -> str:
    return MISSING if row["startup_s"] is None else f"{row['startup_s']:.1f} s"


def _ratio(value: float | None, best: tuple[str, float] | None) -> str:
    return MISSING if value is None or best is None else f"**{value / best[1]:.2f}**"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
