"""Times one step of the reference network on the attached device and prints one JSON line per case.

The reference path is the executable meaning of the network, not a fast path: this shows what kernels have to beat, and
checks on the way that the device agrees with the CPU form of the same program.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.model.params import init_params
from deepinfer_jax.model.state import init_state
from deepinfer_jax.testing.facts import commit_of_checkout

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Reads the options and prints one JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "configs/model/tiny.json"))
    parser.add_argument("--weights", help="a released-format file; seeded random weights without it")
    parser.add_argument("--numerics", nargs="+", default=["q"])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--invariant", nargs="+", type=int, choices=(0, 1), default=[1, 0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--commit", default=commit_of_checkout(), help="recorded with the results")
    args = parser.parse_args()
    model = load_config(args.model)
    if args.weights:
        params = load_params(Path(args.weights).parent, model, weights_file=Path(args.weights), progress=False)
    else:
        params = init_params(model, seed=0)
    for numerics in args.numerics:
        for rows in args.rows:
            for invariant in args.invariant:
                target = "cpu" if jax.default_backend() == "cpu" else "nvidia"
                config = RuntimeConfig(model=model, numerics=numerics, is_invariant=bool(invariant), target=target)
                result = measure(params, config, rows, args.runs) | {"commit": args.commit}
                print(json.dumps(result), flush=True)


def measure(params: object, config: RuntimeConfig, num_rows: int, runs: int) -> dict[str, object]:
    """Compile and step times of one prefill chunk, with a checksum of its logits."""
    pages = np.arange(8, dtype=np.int32).reshape(2, 4)
    tokens = np.random.default_rng(0).integers(3, config.model.vocab_size, num_rows).tolist()
    batch = make_batch([tokens], [0], [0], pages)
    state = init_state(config, num_slots=2, num_pages=8)
    step = jax.jit(
        functools.partial(forward, config=config),
        donate_argnums=(1,),
        compiler_options={"xla_allow_excess_precision": False},
    )
    start = time.perf_counter()
    compiled = step.lower(params, state, batch).compile()
    compile_s = time.perf_counter() - start
    output, state = compiled(params, state, batch)
    logits = np.asarray(output.logits)[0]
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        output, state = compiled(params, state, batch)
        jax.block_until_ready(output.logits)
        times.append(time.perf_counter() - start)
    return {
        "script": "bench_step",
        "numerics": config.numerics,
        "rows": num_rows,
        "invariant": config.is_invariant,
        "compile_s": round(compile_s, 2),
        "step_ms": round(float(np.median(times)) * 1e3, 3),
        "argmax": int(logits.argmax()),
        "logits_std": float(logits.std()),
        "logits_rms": float(jnp.sqrt(jnp.mean(jnp.square(logits)))),
        "finite": bool(np.isfinite(logits).all()),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


if __name__ == "__main__":
    main()
