"""The example of docs/vision.md runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_example_runs():
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "vision.md").read_text(encoding="utf-8"), re.DOTALL
    )
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "14 (1, 301)\n"
