"""The bridge on the simulator: built once, opened for each test, and checked for leaks and violations after it."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_jax.kernels import ascend, ffi

ROOT = Path(__file__).parent.parent.parent


class Simulator:
    """The simulator's own functions for tests."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name in ("sim_violations", "sim_counters", "sim_attributes", "sim_calls", "aclGetRecentErrMsg"):
            getattr(self.library, name).restype = ctypes.c_char_p

    def plan(self, *faults: dict[str, Any]) -> None:
        if self.library.sim_set_faults(json.dumps(faults).encode()):
            raise ValueError(self.library.aclGetRecentErrMsg().decode())

    def slow_down(self, *, delay_us: int = 0, jitter_us: int = 0) -> None:
        self.library.sim_set_timing(ctypes.c_int64(delay_us), ctypes.c_int64(jitter_us))

    def record_calls(self) -> None:
        self.library.sim_record_calls()

    def calls(self) -> list[tuple[str, str]]:
        """Where faults could have been planned since `record_calls`: the call, and "call" or "async"."""
        return [(name, when) for name, when in json.loads(self.library.sim_calls().decode())]

    def violations(self) -> list[str]:
        return json.loads(self.library.sim_violations().decode())

    def clear_violations(self) -> None:
        self.library.sim_clear_violations()

    def counters(self) -> dict[str, int]:
        return json.loads(self.library.sim_counters().decode())

    def attributes(self, operator: str) -> dict[str, float]:
        texts = json.loads(self.library.sim_attributes(operator.encode()).decode())
        return {name: float.fromhex(text) for name, text in texts.items()}


@pytest.fixture(scope="session")
def native() -> Path:
    """The folder of the built libraries."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to build the Ascend bridge and its simulator")
    environ = {**os.environ, "DEEPINFER_ACCELERATOR": "ascend", "PYTHON": sys.executable}
    done = subprocess.run(["bash", "scripts/build.sh"], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return ffi.native_folder()


@pytest.fixture
def simulator(native: Path) -> Iterator[Simulator]:
    """The simulator without faults and delays; a violation during the test fails it."""
    made = Simulator(native / ffi.SIMULATOR_LIBRARY)
    made.clear_violations()
    yield made
    made.plan()
    made.slow_down()
    assert made.violations() == []


@pytest.fixture
def open_bridge(simulator: Simulator) -> Iterator[Callable[..., ascend.Bridge]]:
    """Opens a bridge with given options; it is closed after the test, which must leave nothing behind."""
    opened: list[ascend.Bridge] = []

    def open_one(**options: Any) -> ascend.Bridge:
        opened.append(ascend.open_bridge(ascend.AscendOptions(use_simulator=True, **options)))
        return opened[-1]

    yield open_one
    for bridge in opened:
        bridge.close()


@pytest.fixture
def bridge(open_bridge: Callable[..., ascend.Bridge]) -> ascend.Bridge:
    """A bridge with the default options."""
    return open_bridge()
