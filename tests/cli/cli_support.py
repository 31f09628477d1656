"""Running commands in process on a fake model."""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from engine_support import WatchedBackend, make_loaded

from shoal.cli.app import make_app


class Shell:
    """Calls ``shoal`` with arguments.

    options: how the model is made, see ``make_loaded``.
    interrupt_at: the step in which the main thread gets Ctrl-C, once.
    steps: steps computed by the last model.
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.interrupt_at: int | None = None
        self.steps = 0

    def __call__(self, *arguments: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(make_app(), list(arguments), input=stdin, env=env)

    def load_model(self, model: str, config: Any, *, notify: Callable[[str], None] | None = None) -> Any:
        loaded = make_loaded(on_step=self._on_step, config=config, **self.options)
        assert isinstance(loaded.backend, WatchedBackend)
        return loaded

    def _on_step(self, step: int) -> None:
        self.steps = step
        if step == self.interrupt_at:
            self.interrupt_at = None
            _thread.interrupt_main()
