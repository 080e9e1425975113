"""docs/ascend.md: its example runs, and its table lists the operators that there are."""

import re
from pathlib import Path

from deepinfer_jax.config.environ import VARIABLES
from deepinfer_jax.kernels import ffi
from deepinfer_jax.kernels.ascend_coverage import MISSING

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "ascend.md").read_text()


def test_the_example_runs(simulator, capsys):
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "docs/ascend.md", "exec"), {})
    staged, resident = capsys.readouterr().out.strip().split("]]\n")
    assert staged == resident.removesuffix("]]")


def test_the_table_lists_every_operator(native):
    rows = [line.split("|")[1:4] for line in TEXT.splitlines() if re.match(r"\|.*`aclnn", line)]
    listed = {name for _, operators, _ in rows for name in re.findall(r"`(\w+)`", operators)}
    assert listed == {entry["name"] for entry in ffi.operator_table(ffi.load_bridge())}
    folders = {name for _, _, place in rows for name in re.findall(r"`(\w+)`", place)}
    kernels = {path.parent.name for path in (ROOT / "deepinfer_jax" / "kernels").rglob("cann.py")}
    assert folders | {"collectives"} == kernels


def test_the_table_of_host_ops_is_the_one_in_code():
    rows = [f"| `{name}` | {reason} |" for name, reason in MISSING.items()]
    assert "\n".join(rows) + "\n\n" in TEXT


def test_the_command_of_the_readme_names_what_there_is():
    command = (ROOT / "README.md").read_text().split("## Ascend 950")[1].split("```")[1]
    assert "configs/model/tiny-ascend.json" in command
    assert set(re.findall(r"DEEPINFER_\w+", command)) <= set(VARIABLES)
