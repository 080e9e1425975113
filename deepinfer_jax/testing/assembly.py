"""Kernels assembled for a GPU that is not there: registers, spills, and which instructions they are made of.

    python -m deepinfer_jax.testing.assembly '{"target": "h200", "cases": [["experts", "decode_128_rows"]]}'

compiles the kernels of cases in a process of its own, as the compiler remembers its first target, and prints one JSON
line for each kernel. It needs the packages of requirements-nvidia.txt, and no GPU.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

IMPLEMENTATIONS = {"h200": "mosaic_sm90", "b200": "mosaic_sm100"}  # what is compiled for a target
_PLUGIN = "jax_cuda13_plugin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembled:
    """One kernel of one case."""

    op: str
    case: str
    registers: int  # of a thread at the start
    spill_bytes: int
    missing: tuple[str, ...]  # families of PTX instructions that the case asks for and no kernel of it has
    launches: int  # of a call of the case, see `hlo.launches`


def why_not() -> str | None:
    """Why nothing can be assembled here, None if it can."""
    if importlib.util.find_spec(_PLUGIN) is None:
        return f"{_PLUGIN} is not installed"
    return None if cuda_root() else "there is no ptxas, neither installed by nvidia-cuda-nvcc nor on the PATH"


def assemble(target: str, cases: list[tuple[str, str]], *, timeout_s: float = 600.0) -> list[Assembled]:
    """The kernels of cases (op, name), compiled in another process. Raises RuntimeError with the compiler's text."""
    command = [sys.executable, "-m", __name__, json.dumps({"target": target, "cases": cases})]
    # A cache of compiled programs would leave the assembler nothing to report.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=kept)
    if result.returncode:
        raise RuntimeError(f"kernels of {cases} do not assemble for {target}:\n{result.stderr[-4000:]}")
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return [Assembled(**{**record, "missing": tuple(record["missing"])}) for record in records]


def cuda_root() -> Path | None:
    """The directory that holds bin/ptxas."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) / "cu13" for place in (spec.submodule_search_locations or ())] if spec else []
    on_path = shutil.which("ptxas")
    places += [Path(on_path).parent.parent] if on_path else []
    return next((place for place in places if (place / "bin" / "ptxas").exists()), None)


def _compile_case(op: str, name: str, implementation: str, device: Any, directory: str) -> list[Assembled]:
    import jax
    from jax.sharding import SingleDeviceSharding

    from deepinfer_jax.testing import hlo

    cases = importlib.import_module(f"deepinfer_jax.kernels.{op}.cases").CASES
    case = next(case for case in cases if case.name == name)
    key = jax.eval_shape(functools.partial(jax.random.key, 0))
    sharding = SingleDeviceSharding(device)

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    inputs = jax.tree.map(placed, jax.eval_shape(case.make, key))
    os.environ["MOSAIC_GPU_DUMP_TO"] = directory
    with jax.default_device(device):
        compiled = jax.jit(case.implementations[implementation]).lower(*inputs).compile()
    launches = hlo.launches(compiled.as_text() or "")
    listings = [path.read_text() for path in sorted(Path(directory).glob("*.ptx"))]
    wanted = case.families.get(implementation, ())
    missing = tuple(family for family in wanted if not any(family in text for text in listings))
    logs = [path.read_text() for path in sorted(Path(directory).glob("*.ptxas"))]
    return [_read_log(log, op, name, missing, launches) for log in logs]


def _read_log(log: str, op: str, case: str, missing: tuple[str, ...], launches: int) -> Assembled:
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    registers = re.search(r"Used (\d+) registers", log)
    if not spills or registers is None:
        raise RuntimeError(f"the assembler's report on a kernel of {op} {case} has another form: {log[-500:]}")
    return Assembled(
        op=op,
        case=case,
        registers=int(registers[1]),
        spill_bytes=max(spills),
        missing=missing,
        launches=launches,
    )


def main() -> None:
    """Compiles the cases of the command line."""
    asked = json.loads(sys.argv[1])
    os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    root = cuda_root()
    if root is not None:
        os.environ["CUDA_ROOT"] = str(root)
    from jax.experimental import topologies

    target = asked["target"]
    description = resources.files("deepinfer_jax.config").joinpath("targets", f"{target}.textproto").read_text()
    topology = topologies.get_topology_desc(target, platform="cuda", topology="1x1x1", target_config=description)
    for op, name in asked["cases"]:
        with tempfile.TemporaryDirectory() as directory:
            for kernel in _compile_case(op, name, IMPLEMENTATIONS[target], topology.devices[0], directory):
                sys.stdout.write(json.dumps(dataclasses.asdict(kernel)) + "\n")


if __name__ == "__main__":
    main()
