"""What the Ascend bridge adds to a call, and what packed weights take: on the simulator, so no figures of a device.

    DEEPINFER_ACCELERATOR=ascend bash scripts/build.sh && python scripts/bench_bridge.py

Writes one JSON line for each figure. Times are medians over turns of a jitted loop of calls of one small operator; a
call on handles enqueues, one with arrays copies there and back and waits for the simulator's arithmetic.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.ascend import pack_params
from deepinfer_jax.kernels.ascend import HANDLE_WORDS, AscendOptions, Bridge, DeviceArray, open_bridge
from deepinfer_jax.kernels.ascend_coverage import host_ops
from deepinfer_jax.kernels.linear import cann
from deepinfer_jax.kernels.linear.cann import pack_weight
from deepinfer_jax.kernels.rms_norm.cann import rms_norm
from deepinfer_jax.model.params import init_params
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.testing.facts import commit_of_checkout

SHAPE = Path(__file__).parent.parent / "configs" / "model" / "tiny-ascend.json"
ROWS, WIDTH = 1, 64  # of the operands: as small as packed weights allow, so that calls are timed and not arithmetic
CALLS = 200  # of one turn


def main() -> int:
    """Measures, and writes the lines to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, metavar="N", help="default: %(default)s")
    turns = parser.parse_args().turns
    bridge = open_bridge(AscendOptions(use_simulator=True))
    facts = {"soc": bridge.soc, "kind": "simulator", "jax": jax.__version__, "commit": commit_of_checkout()}
    for figure in (*_call_times(bridge, turns), *_weight_bytes(bridge)):
        sys.stdout.write(json.dumps({**figure, **facts}) + "\n")
    bridge.close()
    return 0


def _call_times(bridge: Bridge, turns: int) -> list[dict[str, Any]]:
    x = jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    plain = jnp.full((WIDTH, WIDTH), 1 / WIDTH, jnp.bfloat16)
    codes, scale = jnp.full((WIDTH, WIDTH), 0x38, jnp.uint8), jnp.full((WIDTH // 32, WIDTH // 32), 121, jnp.uint8)
    packed = pack_weight(ScaledArray(payload=codes, scale=scale, form="fp8", block=(32, 32)))
    figures = []
    for name, call, weight in (
        ("rms_norm", _norm, jnp.ones(WIDTH, jnp.float32)),
        ("linear", cann.linear, plain),
        ("linear, packed weight", cann.linear, packed),
    ):
        placed = jax.tree.map(bridge.put, weight)
        for operands, start, own in (
            ("all on the device", bridge.put(x), placed),
            ("weight on the device", x, placed),
            ("arrays", x, weight),
        ):
            first, *times = (_time_of(bridge, call, start, own) for _ in range(turns + 1))
            del first  # it compiles
            us = round(statistics.median(times), 1)
            figures.append({"what": f"one call: {name}", "operands": operands, "us": us})
    return figures


def _norm(x: Any, weight: Any) -> Any:
    return rms_norm(x, weight, eps=1e-6)


def _time_of(bridge: Bridge, call: Callable[..., Any], start: Any, weight: Any) -> float:
    """Microseconds of one call in a jitted loop of `CALLS`, in which each reads what the one before gave."""
    begin = time.perf_counter()
    jax.block_until_ready(_loop(call, start, weight))
    took = time.perf_counter() - begin
    bridge.synchronize()
    bridge.end_step()
    return took / CALLS * 1e6


@jax.jit(static_argnums=(0,))
def _loop(call: Callable[..., Any], start: Any, weight: Any) -> Any:
    return lax.fori_loop(0, CALLS, lambda _, x: call(x, weight), start)


def _weight_bytes(bridge: Bridge) -> list[dict[str, Any]]:
    """Bytes of the weights of operators as the checkpoint has them, and as they lie on the device."""
    model = load_config(SHAPE)
    runtime = RuntimeConfig(model=model, numerics="q", target="ascend", host_ops=host_ops("missing"))
    params = init_params(model, seed=0)
    packed = pack_params(params, runtime, bridge)
    parts = {
        "projections": (params.attention, packed.attention),
        "routed experts": (params.moe.experts, packed.moe.experts),
        "shared experts": (params.moe.shared, packed.moe.shared),
    }
    return [
        {"what": f"bytes of weights, {name}", "checkpoint": _num_bytes(before), "device": _num_bytes(after)}
        for name, (before, after) in parts.items()
    ] + [{"what": "tensors on the device", "count": bridge.usage()[0], "host_bytes_each": 32}]


def _num_bytes(tree: Any) -> int:
    """Bytes of arrays and of stacked device arrays."""
    total = 0
    for leaf in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, DeviceArray)):
        if isinstance(leaf, DeviceArray):
            total += leaf.words.size // HANDLE_WORDS * int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        else:
            total += leaf.nbytes
    return total


if __name__ == "__main__":
    raise SystemExit(main())
