"""The full-size step lowers for eight devices from shapes alone, and each device holds its part of the arguments."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.describe import abstract_mesh
from deepinfer_jax.model.params import schema
from deepinfer_jax.testing.abstract import StepSizes, abstract_arguments

ROOT = Path(__file__).parents[2]
FLASH = ROOT / "configs" / "model" / "deepseek-v4.1-flash.json"
SIZES = StepSizes(num_slots=16, num_pages=16 * 1024, pages_per_slot=1024, num_rows=16, num_logit_rows=16)
NUM_STATE_LEAVES = 12
MAX_RSS_BYTES = 2 * 10**9  # of the process that lowers: code, traces and text, but no array of the model

# Runs in a process of its own. VmHWM is its own peak; ru_maxrss also counts what its parent held at the fork.
LOWER = """
import json, pathlib, re, sys
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.describe import abstract_mesh
from deepinfer_jax.testing.abstract import StepSizes, lower_abstract

path, target, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
config = RuntimeConfig(model=load_config(path), numerics="q", target=target)
step = lower_abstract(config, abstract_mesh(8, 1), StepSizes(**sizes))
text = step.lowered.as_text()
print(json.dumps({
    "device_bytes": step.device_bytes,
    "bytes_by_pieces": step.bytes_by_pieces,
    "has_mesh": "num_partitions = 8" in text and '"dp"=8' in text,
    "num_donated": text.count("jax.buffer_donor") + text.count("tf.aliasing_output"),
    "rss_bytes": int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024,
}))
"""


@pytest.mark.parametrize(
    "target", [pytest.param("cpu", id="looped"), pytest.param("nvidia", id="unrolled", marks=pytest.mark.slow)]
)
def test_full_size_step_lowers_without_arrays(target):
    command = [sys.executable, "-c", LOWER, str(FLASH), target, json.dumps(SIZES.__dict__)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["has_mesh"]
    assert found["num_donated"] == NUM_STATE_LEAVES
    assert set(found["bytes_by_pieces"]) == {"1", "8"}
    assert found["device_bytes"] == found["bytes_by_pieces"]["8"] // 8 + found["bytes_by_pieces"]["1"]
    assert found["rss_bytes"] < MAX_RSS_BYTES


def test_device_holds_an_eighth_of_what_is_sharded_and_all_of_the_rest():
    config = RuntimeConfig(model=load_config(FLASH))
    params, state, batch = abstract_arguments(config, abstract_mesh(8, 1), SIZES)
    sharded = [s for s in schema(config.model) if {"expert", "engram_row"} & set(s.axes)]
    sharded_bytes = sum(s.num_bytes for s in sharded)
    whole_bytes = sum(s.num_bytes for s in schema(config.model)) - sharded_bytes
    # A table grows to a multiple of 8 rows of 264 bytes.
    assert 0 <= device_bytes(params) - (sharded_bytes / 8 + whole_bytes) <= 2 * 264
    # All of the state belongs to slots or pages.
    assert device_bytes(state) * 8 == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert device_bytes(batch) == 4 * (3 * 16 + 16 * 1024 + 16)


def test_state_is_cut_over_dp_only():
    config = RuntimeConfig(model=load_config(FLASH))
    _, wide, _ = abstract_arguments(config, abstract_mesh(2, 4), SIZES)
    _, whole, _ = abstract_arguments(config, abstract_mesh(1, 8), SIZES)
    assert device_bytes(wide) * 2 == device_bytes(whole)


def device_bytes(tree) -> int:
    """Bytes that one device holds."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))
