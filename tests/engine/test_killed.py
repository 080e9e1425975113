"""A process that is killed leaves nothing half-written, and another one goes on from its snapshot."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.snapshot import load_snapshot

PROMPT = list(range(3, 60))
PARAMS = SamplingParams(max_tokens=200, ignore_eos=True, seq_seed=3)
CHILD = """
import sys
from deepinfer_jax.engine.snapshot import save_snapshot
from deepinfer_jax.testing import tiny
from tests.engine.test_killed import PARAMS, PROMPT
engine = tiny.tiny_llm(sys.argv[1]).engine
engine.add_request("u", "one", PARAMS, PROMPT)
while True:
    for _ in range(3):
        engine.step()
    if not engine.has_unfinished_requests():
        engine.add_request("u", "one", PARAMS, PROMPT)
        engine.step()
    save_snapshot(engine.save_request("one"), sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_snapshot_that_another_goes_on_from(llm, tiny_model, tmp_path):
    [whole] = llm.generate(prompt_token_ids=[PROMPT], sampling_params=PARAMS)
    path, rng = tmp_path / "one.safetensors", random.Random(0)
    for turn in range(3):
        path.unlink(missing_ok=True)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tiny_model), str(path)], cwd=Path(__file__).parents[2]
        )
        try:
            deadline = time.monotonic() + 300
            while not path.exists() and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.random() * 0.3)
        finally:
            child.kill()
            child.wait()
        saved = load_snapshot(path, llm.engine.runtime)
        assert saved.num_written > 0
        name = f"again-{turn}"
        llm.engine.restore_request(saved, name)
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += [output for output in llm.engine.step() if output.request_id == name]
        got = [(output.token_id, output.token_logprobs) for output in outputs]
        assert got == [(output.token_id, output.token_logprobs) for output in whole][len(saved.output) :]
