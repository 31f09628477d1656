"""The engine tests' support is used here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))
