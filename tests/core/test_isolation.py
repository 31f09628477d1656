"""The core stands on the standard library alone."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "tokenizers", "jinja2", "rich", "typer"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import shoal.core.scheduler, shoal.metrics.goodput
from shoal import SamplingParams
SamplingParams(max_tokens=1)
threads = [name for name in ("threading", "logging", "socket") if name in sys.modules and name not in before]
print(threads)
""".replace("import shoal", "before = set(sys.modules)\nimport shoal", 1)


def test_core_and_metrics_import_with_everything_else_blocked() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
