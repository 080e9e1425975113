"""A decode step of one rank through named kernels, compiled for a GPU that is not there.

    python -m deepinfer_jax.testing.rank_aot '{"target": "h200", "kernels": "mosaic_sm90", "num_layers": 4, ...}'

compiles one case in a process of its own, as the compiler remembers its first target, and prints one JSON line. It
needs the packages of requirements-nvidia.txt, and no GPU.
"""

import collections
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from importlib import resources
from typing import Any

from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.testing import assembly

CUSTOM_CALL = "mosaic_gpu"
# What makes no array of its own.
_NO_ARRAY = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant", "while", "conditional", "call")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankCase:
    """One decode step; see `rank_model`."""

    target: str  # a file of config/targets
    kernels: str
    num_layers: int
    num_rows: int
    context: int  # tokens of each request
    num_experts: int
    model: str = "model/deepseek-v4.1-flash.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankStep:
    """What the compiled step holds."""

    calls: dict[str, int]  # Mosaic calls of each function that `kernels.calls.shared_call` made
    kernels: int  # that a step launches
    largest_bytes: int  # of the arrays that any instruction makes, caches that are updated in place among them
    largest: str  # that instruction
    temporary_bytes: int
    argument_bytes: int
    donated_bytes: int


def compile_rank(case: RankCase) -> RankStep:
    """Compiles the case in this process. Raises whatever the compiler reports."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from deepinfer_jax.testing import hlo, step_bench

    description = resources.files("deepinfer_jax.config").joinpath("targets", f"{case.target}.textproto").read_text()
    topology = topologies.get_topology_desc(case.target, platform="cuda", topology="1x1x1", target_config=description)
    device = topology.devices[0]
    config, _ = step_of(case)
    sharding = SingleDeviceSharding(device)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    arguments = [placed(tree) for tree in abstract_arguments(case)]
    with jax.default_device(device):
        compiled = step_bench.jitted_step(config).lower(*arguments).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    found = hlo.instructions(text)
    made = [(_bytes_of(one), one) for one in found if not one.is_fused and one.opcode not in _NO_ARRAY]
    largest = max(made, key=lambda pair: pair[0])
    return RankStep(
        calls=mosaic_calls(found),
        kernels=step_bench.counted_kernels(compiled),
        largest_bytes=largest[0],
        largest=largest[1].text[:300],
        temporary_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
    )


def step_of(case: RankCase) -> tuple[Any, Any]:
    """The configuration of the step, and its `StepLoad`."""
    from deepinfer_jax.config.released import load_config
    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.testing.rank_model import StepLoad, rank_model

    model = rank_model(load_config(shipped_config(case.model)), num_layers=case.num_layers)
    config = RuntimeConfig(model=model, target="nvidia", is_invariant=False, kernels=case.kernels)
    return config, StepLoad(num_rows=case.num_rows, context=case.context, num_experts=case.num_experts)


def abstract_arguments(case: RankCase) -> tuple[Any, ...]:
    """Shape structs for the arguments of `step_bench.jitted_step`."""
    import jax

    from deepinfer_jax.model.kernel_weights import for_kernels
    from deepinfer_jax.testing.rank_model import rank_params

    config, decode = step_of(case)

    def make() -> tuple[Any, ...]:
        params = for_kernels(rank_params(config.model, num_experts=case.num_experts), config=config)
        return params, decode.state(config), decode.batch(config), decode.experts(config)

    return jax.eval_shape(make)


def _bytes_of(one: Any) -> int:
    sizes = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8}
    return max((math.prod(shape) * sizes.get(dtype, 4) for dtype, shape in one.arrays), default=0)


def mosaic_calls(found: Any) -> dict[str, int]:
    """Mosaic calls among instructions of `testing.hlo`, by the function that `kernels.calls.shared_call` made."""
    names = (re.search(r"jit\((\w+)\)/\w+/mpmd_map", one.text) for one in found if CUSTOM_CALL in one.text)
    return dict(sorted(collections.Counter(name[1] for name in names if name is not None).items()))


def compile_apart(case: RankCase, *, timeout_s: float = 900.0) -> RankStep:
    """`compile_rank` in a process of its own. Raises RuntimeError with the compiler's text where it failed."""
    command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"the step was not compiled for {case.target}:\n{done.stderr[-4000:]}")
    return RankStep(**json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """Compiles the case of the command line."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    root = assembly.cuda_root()
    if root is not None:
        os.environ["CUDA_ROOT"] = str(root)
    step = compile_rank(RankCase(**json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps(dataclasses.asdict(step)) + "\n")


if __name__ == "__main__":
    main()
