"""Several processes run one engine: the same results as one process, and one that dies ends the others."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_jax.parallel import processes
from deepinfer_jax.parallel.processes import EXIT_LOST, LOST_AFTER_S, Agreement

PROMPTS = ("hello", "the second prompt, a little longer", "3")


def command(model: Path, mesh: str, max_tokens: int) -> list[str]:
    program = [sys.executable, "-m", "deepinfer_jax.cli", "generate", "--model", str(model), "--seed", "5"]
    return [*program, "--max-tokens", str(max_tokens), "--json", "--mesh", mesh, *PROMPTS]


def start(model: Path, mesh: str, count: int, max_tokens: int, devices: int = 1) -> list[subprocess.Popen]:
    """The processes of one job, on a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    started = []
    for index in range(count):
        joined = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count), "--process-id", str(index)]
        started.append(
            subprocess.Popen(
                command(model, mesh, max_tokens) + (joined if count > 1 else []),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
            )
        )
    return started


def results(model: Path, mesh: str, count: int, devices: int = 1) -> list[dict]:
    started = start(model, mesh, count, 12, devices)
    outputs = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0] * count, outputs
    records = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    assert not any(records[1:]), "only process 0 writes results"
    return records[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, count", [("2x1", 2), ("1x2", 2), ("2x2", 4)])
def test_processes_give_what_one_process_gives(agreeing_model, mesh, count):
    assert results(agreeing_model, mesh, count) == results(agreeing_model, "1x1", 1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_other(agreeing_model, victim):
    started = start(agreeing_model, "2x1", 2, 400)
    survivor = started[1 - victim]
    time.sleep(20)  # joined, and at work or compiling
    assert all(process.poll() is None for process in started)
    started[victim].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    _, errors = survivor.communicate(timeout=60)
    assert survivor.returncode == EXIT_LOST
    assert time.monotonic() - killed_at < LOST_AFTER_S + 10
    message = errors.strip().splitlines()[-1]
    assert message.startswith(f"deepinfer-jax: process {1 - victim}") and "it ends" in message
    started[victim].communicate()


def test_a_part_of_the_address_is_refused():
    with pytest.raises(ValueError, match="go together; give all three"):
        processes.join_processes("127.0.0.1:1234", num_processes=2)


class Store:
    """A key-value store as JAX's client has it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self.values[key] = value

    def key_value_delete(self, key: str) -> None:
        del self.values[key]

    def blocking_key_value_get(self, key: str, _: int) -> str:
        return self.values[key]


def test_processes_that_differ_are_told(monkeypatch):
    store, index = Store(), 0
    monkeypatch.setattr(processes, "_client", lambda: store)
    monkeypatch.setattr(processes, "_KEPT", 3)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.jax, "process_index", lambda: index)
    first, other = Agreement("steps"), Agreement("steps")
    for step in range(5):
        index = 0
        first.check(f"step {step}")
        index = 1
        other.check(f"step {step}")
    assert len(store.values) == 3
    index = 0
    first.check("step 5, decode")
    index = 1
    with pytest.raises(RuntimeError, match="process 1 is about to launch step 5, prefill, process 0 step 5, decode"):
        other.check("step 5, prefill")
