"""A step compiled for devices that are not there: does it compile, what does a device hold, what travels.

    python -m deepinfer_jax.testing.aot '{"target": "b200", "dp": 64, "cp": 1, "num_rows": 128, ...}'

compiles one case in a process of its own, as the compiler remembers its first target, and prints one JSON line. For
a GPU it needs the packages of requirements-nvidia.txt, and no GPU; "cpu" stands for as many CPUs.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.testing import assembly

GPUS_PER_HOST = 8
MEMORY_BYTES = {"b200": 180e9, "h200": 141e9}  # of one device
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase:
    """One step on one mesh; sizes are those of a data-parallel rank."""

    target: str  # a file of config/targets, or "cpu"
    dp: int
    cp: int
    num_rows: int
    num_slots: int
    num_pages: int
    pages_per_slot: int  # the longest context, in pages
    model: str = "model/deepseek-v4.1-flash.json"  # a shipped shape, or a path of a config.json
    kernels: str = "auto"


def compile_case(case: StepCase) -> dict[str, Any]:
    """Compiles the case; bytes are those of one device. Raises whatever the compiler reports."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from deepinfer_jax.config.released import load_config
    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.kernels.registry import COMPUTE_CAPABILITIES
    from deepinfer_jax.model.batch import StepBatch
    from deepinfer_jax.model.kernel_weights import for_kernels
    from deepinfer_jax.model.shardings import STATE_SPECS, forward_on_mesh, placed_params, spread
    from deepinfer_jax.model.state import init_state
    from deepinfer_jax.parallel.mesh import CP, DP
    from deepinfer_jax.testing import hlo
    from deepinfer_jax.testing.abstract import COMPILER_OPTIONS
    from deepinfer_jax.testing.rank_aot import mosaic_calls

    count = case.dp * case.cp
    if case.target == "cpu":
        found = jax.devices()
    else:
        description = resources.files("deepinfer_jax.config").joinpath("targets", f"{case.target}.textproto")
        hosts, per_host = max(1, count // GPUS_PER_HOST), min(GPUS_PER_HOST, count)
        found = topologies.get_topology_desc(
            case.target, platform="cuda", topology=f"1x{hosts}x{per_host}", target_config=description.read_text()
        ).devices
    devices = np.array(found).reshape(case.dp, case.cp)
    mesh = Mesh(devices, (DP, CP), axis_types=(AxisType.Auto, AxisType.Auto))
    own = Path(case.model)
    model = load_config(own if own.is_absolute() else shipped_config(case.model))
    config = RuntimeConfig(
        model=model,
        target="cpu" if case.target == "cpu" else "nvidia",
        is_invariant=False,
        dp=case.dp,
        cp=case.cp,
        kernels=case.kernels,
    )
    params = placed_params(model, mesh)
    if case.kernels in COMPUTE_CAPABILITIES:
        with jax.default_device(found[0]):
            arranged = jax.jit(functools.partial(for_kernels, config=config)).lower(params)
            places = arranged.compile().output_shardings
        params = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), arranged.out_info, places
        )
    make = functools.partial(init_state, config, num_slots=case.num_slots * case.dp, num_pages=case.num_pages * case.dp)
    state = jax.eval_shape(make)

    def placed(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(placed, state, spread(STATE_SPECS, state))
    batch = jax.tree.map(lambda leaf: placed(leaf, P(DP)), jax.eval_shape(lambda: _blank_batch(case, StepBatch, jnp)))

    step = functools.partial(forward_on_mesh, mesh=mesh, config=config)
    start = time.perf_counter()
    with jax.default_device(found[0]):
        jitted = jax.jit(step, donate_argnums=(1,), compiler_options=COMPILER_OPTIONS)
        compiled = jitted.lower(params, state, batch).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {
        **dataclasses.asdict(case),
        "compile_s": round(time.perf_counter() - start, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "donated_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "device_bytes": held,
        "fits": held < MEMORY_BYTES.get(case.target, float("inf")),
        "collectives": collective_bytes(text),
        "own_kernels": mosaic_calls(hlo.instructions(text)),
    }


def collective_bytes(text: str) -> dict[str, dict[str, int]]:
    """Of each kind of collective: how many a step runs, and the bytes that they make on a device.

    A kind that only some layers need counts for every layer where the layers share one loop (on a CPU).
    """
    from deepinfer_jax.testing import hlo

    found: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"count": 0, "bytes": 0})
    instructions = hlo.instructions(text)
    times = hlo.repetitions(instructions, text)
    for one in instructions:
        kind = one.opcode.removesuffix("-start")
        if kind in hlo.COLLECTIVES:
            arrays = one.arrays[-1:] if one.opcode.endswith("-start") else one.arrays
            repeats = times.get(one.computation, 0)
            found[kind]["count"] += repeats
            found[kind]["bytes"] += repeats * sum(
                math.prod(shape) * _ITEM_BYTES.get(dtype, 4) for dtype, shape in arrays
            )
    return dict(found)


def compile_apart(case: StepCase) -> dict[str, Any]:
    """`compile_case` in a process of its own. Raises ValueError with what the compiler said where it failed."""
    flags = os.environ.get("XLA_FLAGS", "")
    if case.target == "cpu":
        flags += f" --xla_force_host_platform_device_count={case.dp * case.cp}"
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_jax.testing.aot", json.dumps(dataclasses.asdict(case))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_FLAGS": flags.strip()},
    )
    if done.returncode:
        raise ValueError(f"the step was not compiled for {case.target}: {done.stderr.strip().splitlines()[-1][:300]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _blank_batch(case: StepCase, cls: Any, jnp: Any) -> Any:
    rows = jnp.zeros((case.dp, case.num_rows), jnp.int32)
    return cls(
        tokens=rows,
        positions=rows,
        slots=rows,
        page_table=jnp.zeros((case.dp, case.num_slots, case.pages_per_slot), jnp.int32),
        logit_rows=jnp.zeros((case.dp, min(case.num_rows, case.num_slots)), jnp.int32),
    )


def main() -> None:
    """Compiles the case of the command line."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    root = assembly.cuda_root()
    if root is not None:
        os.environ["CUDA_ROOT"] = str(root)
    sys.stdout.write(json.dumps(compile_case(StepCase(**json.loads(sys.argv[1])))) + "\n")


if __name__ == "__main__":
    main()
