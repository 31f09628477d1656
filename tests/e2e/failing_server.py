"""A program for ``test_engine_failures``: the real command over an engine that fails. Argument: how."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_support import make_loaded

import shoal.assembly
from shoal.cli import main
from shoal.core.scheduler import Scheduler


def _broken(*_: Any) -> Any:
    raise RuntimeError("the books are wrong")


def _stuck(step: int) -> None:
    if step == 3:
        time.sleep(10_000)


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind == "broken":
        Scheduler.commit = _broken  # type: ignore[method-assign]
    loaded = make_loaded(on_step=_stuck if kind == "stuck" else None)
    shoal.assembly.load_model = lambda *_, **__: loaded
    main()
