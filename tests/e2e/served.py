"""``shoal serve`` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

LAUNCH = "from shoal.cli import main; main()"


class ServerProcess:
    """Started on a free port; ``stop`` sends a signal and waits."""

    def __init__(self, model: Path, folder: Path, *arguments: str, **environment: str) -> None:
        self.log = folder / "server.log"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, "serve", "-m", str(model), "--port", "0", "--json", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.facts: dict[str, Any] = json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever became of the test, nothing stays."""
        if self.process.poll() is None:
            self.process.kill()
        self.stop()

    @property
    def address(self) -> str:
        return str(self.facts["address"])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status
