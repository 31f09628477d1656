"""docs/cli.md is what the commands say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from doc_pages import ROOT


@pytest.mark.parametrize("colours", [{}, {"FORCE_COLOR": "1", "COLUMNS": "40", "GITHUB_ACTIONS": "true"}])
def test_page_is_current_on_any_terminal(colours: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "cli_reference.py"), "--check"],
        env={**os.environ, **colours},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
