"""The examples of docs/vision.md run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "vision.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("example, printed", zip(EXAMPLES, ["1", "14 (1, 4096)"], strict=True), ids=["ask", "by hand"])
def test_example_runs(example: str, printed: str):
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{printed}\n"
