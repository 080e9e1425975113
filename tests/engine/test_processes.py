"""Several processes run one engine: the same results as one process, and one that dies ends the others."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.parallel import processes
from deepinfer_jax.parallel.processes import EXIT_LOST, LOST_AFTER_S, Agreement, ProcessesDifferError
from deepinfer_jax.testing import tiny
from tests.engine import driving
from tests.engine.pictures import Parts, ask

ROOT = Path(__file__).parents[2]
PROMPTS = ("hello", "the second prompt, a little longer", "3")
# Pictures of several sizes, two in one prompt, one that comes again; drafts as many as a measured budget allows, and a
# table of so few places that pictures push each other out.
PICTURES: dict[str, Parts] = {
    "pair": [0, "A", 5, "B", *driving.prompt_of(9)],
    "long": [*driving.prompt_of(40), "A", *driving.prompt_of(50, seed=1), "D", 6],
    "other": ["C1", *driving.prompt_of(20)],
    "text": driving.prompt_of(30),
    "again": [7, "B", "A1", 8],
}
SHOWN = {"DEEPINFER_MULTI_MODAL_BUFFER_SIZE": "2", "DEEPINFER_ENABLE_MTP_VARLEN": "1"}
SHOW = "import sys; from tests.engine.test_processes import show; show(*sys.argv[1:])"


def command(model: Path, mesh: str, max_tokens: int) -> list[str]:
    program = [sys.executable, "-m", "deepinfer_jax.cli", "generate", "--model", str(model), "--seed", "5"]
    return [*program, "--max-tokens", str(max_tokens), "--json", "--mesh", mesh, *PROMPTS]


def show(model: str, mesh: str, changed: str, *joined: str) -> None:
    """What one process does with `PICTURES`; joined: the address of process 0, number of processes, own number.

    changed: the number of a process that is given another picture.
    """
    if joined:
        address, count, index = joined
        processes.join_processes(address, num_processes=int(count), process_id=int(index))
    dp, cp = mesh.split("x")
    engine = tiny.tiny_engine(model, SHOWN, num_draft_tokens=3, mesh_shape=(int(dp), int(cp)), seed=5)
    for name, parts in PICTURES.items():
        given = ["A2" if part == "A1" else part for part in parts] if joined[2:] == (changed,) else parts
        ask(engine, name, given, driving.params_of(3, 10))
    found = driving.facts(driving.drain(engine))
    stats = engine.stats()
    if processes.leave_processes() == 0:
        print(json.dumps({"facts": found, "evicted": stats["images_evicted"], "encoded": stats["images_encoded"]}))


def start(programs: Sequence[Sequence[str]], devices: int = 1) -> list[subprocess.Popen]:
    """The processes of one job."""
    environ = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(program, cwd=ROOT, env=environ, **pipes) for program in programs]


def generating(model: Path, mesh: str, count: int, max_tokens: int) -> list[list[str]]:
    address = free_address()
    joined = [
        ["--coordinator", address, "--num-processes", str(count), "--process-id", str(i)] if count > 1 else []
        for i in range(count)
    ]
    return [command(model, mesh, max_tokens) + own for own in joined]


def showing(model: Path, mesh: str, count: int, changed: str = "") -> list[list[str]]:
    address = free_address()
    joined = [[address, str(count), str(index)] if count > 1 else [] for index in range(count)]
    return [[sys.executable, "-c", SHOW, str(model), mesh, changed, *own] for own in joined]


def free_address() -> str:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def results(programs: Sequence[Sequence[str]], devices: int = 1) -> list[dict]:
    started = start(programs, devices)
    outputs = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), outputs
    records = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    assert not any(records[1:]), "only process 0 writes results"
    return records[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, count", [("2x1", 2), ("1x2", 2), ("2x2", 4)])
def test_processes_give_what_one_process_gives(agreeing_model, mesh, count):
    assert results(generating(agreeing_model, mesh, count, 12)) == results(generating(agreeing_model, "1x1", 1, 12))


@pytest.mark.slow
@pytest.mark.parametrize("mesh, devices", [("2x1", 1), ("1x2", 1), ("2x2", 2)])
def test_processes_see_the_same_pictures(agreeing_model, mesh, devices):
    [got] = results(showing(agreeing_model, mesh, 2), devices)
    [want] = results(showing(agreeing_model, "1x1", 1))
    assert got["facts"] == want["facts"]
    assert min(got["encoded"], want["encoded"]) >= 5  # four kinds, and what was pushed out comes again
    assert min(got["evicted"], want["evicted"]) > 0


@pytest.mark.slow
def test_processes_that_see_other_pictures_end(agreeing_model):
    started = start(showing(agreeing_model, "2x1", 2, changed="1"))
    errors = [process.communicate(timeout=600)[1] for process in started]
    assert all(process.returncode == EXIT_LOST for process in started)
    assert "process 1 is about to launch step" in errors[1] and "with the same images" in errors[1]
    assert "deepinfer-jax: process 0" in errors[0] and "it ends" in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_other(agreeing_model, victim):
    started = start(generating(agreeing_model, "2x1", 2, 400))
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
    first, other = agreements(monkeypatch)
    for step in range(5):
        index = 0
        first.check(f"step {step}", [np.arange(step)])
        index = 1
        other.check(f"step {step}", [np.arange(step)])
    assert len(store.values) == 3
    index = 0
    first.check("step 5, decode")
    index = 1
    told = r"process 1 is about to launch step 5, prefill \(0{8}\), process 0 step 5, decode"
    with pytest.raises(ProcessesDifferError, match=told):
        other.check("step 5, prefill")
    index = 0
    first.check("step 6", [np.arange(3), np.arange(4)])
    index = 1
    with pytest.raises(ProcessesDifferError, match="step 6 .*step 6 .*their requests differ"):
        other.check("step 6", [np.arange(3), np.arange(1, 5)])


def agreements(monkeypatch) -> tuple[Agreement, Agreement]:
    """One agreement as two processes make it."""
    made = []
    for _ in range(2):
        monkeypatch.setattr(processes, "_agreements", itertools.count())
        made.append(Agreement("steps"))
    return made[0], made[1]


def test_processes_agree_on_a_number_and_a_text(monkeypatch):
    store, index = Store(), 0
    monkeypatch.setattr(processes, "_client", lambda: store)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.jax, "process_index", lambda: index)
    first, other = agreements(monkeypatch)
    assert first.first("mine") == "mine"
    index = 1
    assert other.first("theirs") == "mine"
    store.values["deepinfer/steps-0/1/0"] = "7"  # what process 0 tells while process 1 waits
    assert other.least(9) == 7 and store.values["deepinfer/steps-0/1/1"] == "9"
