"""The examples of the README run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
RUNNABLE = [block for block in BLOCKS if "path/to/" not in block]


def test_readme_has_examples():
    assert len(RUNNABLE) == 4


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNNABLE, ids=["generate", "engine", "grammar", "inside"])
def test_example_runs(block: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out.strip()
