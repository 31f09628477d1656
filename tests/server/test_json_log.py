"""Log records as lines of JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from shoal.server.json_log import JsonFormatter
from shoal.server.stall_watch import StallWatch


def line(**values: Any) -> dict[str, Any]:
    record = logging.makeLogRecord({"name": "shoal.x", "levelname": "WARNING", "created": 0.25, **values})
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_message() -> None:
    assert line(msg="%d files,\nand no more", args=(3,)) == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "warning",
        "logger": "shoal.x",
        "message": "3 files,\nand no more",
    }


def test_fields_stand_for_the_message() -> None:
    found = line(msg="request", fields={"status": 200, "odd": {1}})
    assert (found["status"], found["odd"]) == (200, "{1}")
    assert "message" not in found


def test_a_traceback_is_part_of_its_line() -> None:
    try:
        raise ValueError("of no use")
    except ValueError:
        found = line(msg="failed", exc_info=sys.exc_info())
    assert found["message"] == "failed"
    assert found["traceback"].endswith("ValueError: of no use")


def test_a_step_that_is_seen_again_and_again_is_stuck() -> None:
    watch = StallWatch(3)
    assert [watch.stuck(step) for step in (1, 1, 1, 2, 2, None, 2, 2, 2, 2, 2)] == [False] * 9 + [True] * 2
    never = StallWatch(0)
    assert not any(never.stuck(1) for _ in range(1000))
