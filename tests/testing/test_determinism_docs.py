"""The examples of docs/determinism.md run as they stand, and its commands are understood."""

import re
import shlex
from pathlib import Path

import pytest

from deepinfer_jax import cli
from deepinfer_jax.testing.determinism import matrix

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
[COMMANDS] = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.slow
def test_the_examples_run(capsys):
    assert len(EXAMPLES) == 2
    exec(compile("\n".join(EXAMPLES), "docs/determinism.md", "exec"), {})
    assert capsys.readouterr().out == "None\n"


@pytest.mark.parametrize("line", COMMANDS.splitlines())
def test_each_command_is_one_that_is_understood(line):
    program, *arguments = shlex.split(line, comments=True)
    args = cli._make_parser("determinism").parse_args(arguments)
    assert program == "deepinfer-jax" and matrix.choose(args.only, is_quick=args.quick)
