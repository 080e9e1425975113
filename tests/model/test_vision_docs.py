"""The examples of docs/vision.md run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "vision.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("place, printed", [(0, "1"), (1, "14 (1, 4096)")], ids=["ask", "by hand"])
def test_example_runs(place: int, printed: str):
    ran = subprocess.run(
        [sys.executable, "-c", EXAMPLES[place]], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{printed}\n"
