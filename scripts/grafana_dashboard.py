"""Writes deploy/grafana-dashboard.json: what an operator looks at, from the metrics of ``/metrics``.

The panels stand here as rows of titles and queries, so that places and ids need no counting.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "deploy" / "grafana-dashboard.json"
_WIDTH, _HEIGHT = 24, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_MINE = '{instance=~"$instance"}'


def _rate(name: str, by: str = "") -> str:
    return f"sum{by and f' by ({by})'} (rate(shoal_{name}{_MINE}[$__rate_interval]))"


def _sum(name: str) -> str:
    return f"sum (shoal_{name}{_MINE})"


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    buckets = _rate(f"{name}_bucket", "le")
    return tuple((f"p{share}", f"histogram_quantile(0.{share}, {buckets})") for share in (50, 95, 99))


def _mean(name: str) -> str:
    return f"{_rate(f'{name}_sum')} / {_rate(f'{name}_count')}"


# A panel's title, unit, what it tells, and (legend, query) pairs.
_Panel = tuple[str, str, str, tuple[tuple[str, str], ...]]

_ROWS: tuple[tuple[str, tuple[_Panel, ...]], ...] = (
    (
        "What clients see",
        (
            ("Time to first token", "s", "Arrival to the first token, waiting included.",
             _quantiles("time_to_first_token_seconds")),
            ("Between tokens", "s", "Gaps between deliveries of one completion: the price of a larger batch.",
             _quantiles("inter_token_seconds")),
            ("Whole request", "s", "Arrival to the end.", _quantiles("request_seconds")),
            ("Requests by status", "reqps", "499: the client left before the answer's end.",
             (("{{endpoint}} {{status}}", _rate("http_requests_total", "endpoint, status")),)),
            ("Errors by code", "reqps", "docs/api.md says what each means.",
             (("{{code}}", _rate("http_errors_total", "code")),)),
            ("Time per token after the first", "s", "A mean of each request.",
             _quantiles("time_per_output_token_seconds")),
        ),
    ),
    (
        "Is it full?",
        (
            ("Running and waiting", "short", "Completions. Waiting for long: more than this machine can do.",
             (("running", _sum("completions_running")), ("waiting", _sum("completions_waiting")))),
            ("Time in the queue", "s", "Arrival to the first computation.", _quantiles("queue_seconds")),
            ("Part of the time in steps", "percentunit", "At 100 % the engine never rests.",
             (("busy", _rate("busy_seconds_total")),)),
            ("Mean batch", "short", "Sequences of a step, and steps a second.",
             (("sequences", _mean("batch_size")), ("steps a second", _rate("steps_total")))),
            ("Tokens of a step", "short", "Decodes and pieces of prompts; at most the token budget.",
             (("tokens", _mean("step_tokens")),)),
            ("Step", "s", "Mean seconds of a step.",
             (("step", f"{_rate('busy_seconds_total')} / {_rate('steps_total')}"),)),
        ),
    ),
    (
        "What it does",
        (
            ("Tokens", "short", "A second. Prompts count when they begin to run.",
             (("generated", _rate("generated_tokens_total")), ("prompts", _rate("prompt_tokens_total")))),
            ("Found prefixes", "percentunit", "Part of the prompts' tokens that was found instead of computed.",
             (("found", f"{_rate('prefix_hit_tokens_total')} / {_rate('prompt_tokens_total')}"),)),
            ("Completions by end", "short", "A second.",
             (("{{reason}}", _rate("completions_finished_total", "reason")),)),
        ),
    ),
    (
        "Memory",
        (
            ("KV cache in use", "percentunit", "Of the blocks, those that running completions hold.",
             (("used", f"avg (shoal_kv_used_ratio{_MINE})"),)),
            ("Blocks", "short", "Cached ones hold prefixes, and are given away when they are needed.",
             (("used", _sum("kv_blocks_used")), ("cached", _sum("kv_blocks_cached")), ("all", _sum("kv_blocks")))),
            ("Preemptions", "short", "A second. Completions that lost their blocks: the KV cache is too small.",
             (("preemptions", _rate("preemptions_total")),)),
            ("Process", "bytes", "Resident memory.", (("{{instance}}", f"process_resident_memory_bytes{_MINE}"),)),
        ),
    ),
    (
        "API keys",
        (
            ("Requests by key", "reqps", "", (("{{key}}", _rate("key_requests_total", "key")),)),
            ("Generated tokens by key", "short", "A second.",
             (("{{key}}", _rate("key_generated_tokens_total", "key")),)),
            ("Prompt tokens by key", "short", "A second.", (("{{key}}", _rate("key_prompt_tokens_total", "key")),)),
        ),
    ),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole file."""
    panels = _head()
    top = 4
    for title, row in _ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1}}
        )  # fmt: skip
        top += 1
        columns = 2 if len(row) == 4 else 3
        width = _WIDTH // columns
        for number, what in enumerate(row):
            x, y = width * (number % columns), top + _HEIGHT * (number // columns)
            place = {"x": x, "y": y, "w": width, "h": _HEIGHT}
            panels.append(_panel(len(panels) + 1, "timeseries", what, place))
        top += _HEIGHT * -(-len(row) // columns)
    return {
        "title": "Shoal",
        "uid": "shoal",
        "tags": ["llm", "shoal"],
        "timezone": "browser",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "label": "Instance",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": {"query": "label_values(shoal_ready, instance)", "refId": "instance"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def _head() -> list[dict[str, Any]]:
    numbers = (
        ("Ready", "short", f"{_sum('ready')}"),
        ("Running", "short", _sum("completions_running")),
        ("Waiting", "short", _sum("completions_waiting")),
        ("Tokens a second", "short", _rate("generated_tokens_total")),
        ("Refused (429) a second", "short", _rate("http_requests_total").replace("{", '{status="429",')),
        ("Version and model", "short", f"shoal_info{_MINE}"),
    )  # fmt: skip
    width = _WIDTH // len(numbers)
    panels = []
    for index, (title, unit, query) in enumerate(numbers):
        place = {"x": index * width, "y": 0, "w": width, "h": 4}
        legend = "{{version}} {{model}}" if title.startswith("Version") else ""
        panel = _panel(index + 1, "stat", (title, unit, "", ((legend, query),)), place)
        if legend:
            panel["options"] = {"textMode": "name", "reduceOptions": {"calcs": ["lastNotNull"]}}
        panels.append(panel)
    return panels


def _panel(number: int, kind: str, what: _Panel, place: dict[str, int]) -> dict[str, Any]:
    title, unit, text, queries = what
    return {
        "id": number,
        "type": kind,
        "title": title,
        "description": text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
