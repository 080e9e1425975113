"""The engine on an Ascend device: both modes give the ids of the CPU, and a fault ends the requests of its step."""

import dataclasses
import gc
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.config.args import EngineArgs, resolve
from deepinfer_jax.engine.ascend import check_invariance
from deepinfer_jax.engine.outputs import CompletionOutput
from deepinfer_jax.engine.setup import load_engine_model
from deepinfer_jax.kernels.ascend import AscendError, AscendUnsupportedError

ROOT = Path(__file__).parent.parent.parent
SHAPE = ROOT / "configs" / "model" / "tiny-ascend.json"
# Greedy ids of random weights; prompts are those whose best logits lie this far above the second best.
PROMPTS = ["def", "import os\n", "x = 1"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, top_logprobs=2)
MIN_MARGIN = 0.02
DIRTY, USABLE = 507015, 507056
# A status of each class, and how its text begins; the last two make the device take no work.
STATUS_CLASSES = {
    107017: "INVALID_ARGUMENT",
    561002: "INVALID_ARGUMENT",
    100001: "FAILED_PRECONDITION",
    107001: "NOT_FOUND",
    107020: "DEADLINE_EXCEEDED",
    107022: "ABORTED",
    207001: "RESOURCE_EXHAUSTED",
    561003: "UNIMPLEMENTED",
    507056: "UNAVAILABLE",
    507015: "INTERNAL",
    507053: "DATA_LOSS",
}
DIRTYING = ("INTERNAL", "DATA_LOSS")


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """Steps are compiled when they come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_ENFORCE_EAGER", "1")
        yield


def make_llm(**options: Any) -> LLM:
    return LLM(
        SHAPE,
        tokenizer=ROOT / "deepinfer_jax" / "models" / "tiny-code",
        seed=1,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        decode_sequence=False,
        **options,
    )


def ids_of(results: Any) -> list[list[int]]:
    return [[output.token_id for output in outputs] for outputs in results]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Ids of the reference, after a look at their margins."""
    llm = make_llm(device="cpu")
    results = llm.generate(PROMPTS, GREEDY)
    llm.close()
    for outputs in results:
        for output in outputs:
            best, second = output.top_logprobs
            assert best - second > MIN_MARGIN, outputs
    return ids_of(results)


@pytest.fixture
def on_ascend(simulator, monkeypatch) -> Callable[..., LLM]:
    """Makes an LLM on the simulator."""

    def make(mode: str, **options: Any) -> LLM:
        monkeypatch.setenv("DEEPINFER_JAX_ASCEND_SIM", "1")
        monkeypatch.setenv("DEEPINFER_JAX_ASCEND_MODE", mode)
        monkeypatch.setenv("DEEPINFER_ACCELERATOR", "ascend")
        return make_llm(host_ops="missing", **options)

    return make


@pytest.mark.slow
def test_staged(bridge, simulator, on_ascend, expected):
    """Ids, then a fault that leaves the device usable, then one that does not, until it is reset."""
    llm = on_ascend("staged")
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected
    at_rest = simulator.counters()

    simulator.plan({"call": "aclnnGroupedMatmulWeightNz", "code": USABLE, "message": "link", "nth": 3})
    check_failure(llm, "UNAVAILABLE: .*simulator device 0: aclnnGroupedMatmulWeightNz failed with status 507056: link")
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected
    assert simulator.counters() == at_rest

    simulator.plan({"call": "aclnnSparseFlashMla", "code": DIRTY, "message": "core broke", "when": "async", "nth": 2})
    check_failure(llm, "INTERNAL: .*last enqueued: .*aclnnSparseFlashMla.*core broke.*reset_device")
    check_failure(llm, "FAILED_PRECONDITION: .*takes no work until reset_device.*core broke")
    bridge.reset_device(0)
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected
    llm.close()


def check_failure(llm: LLM, text: str) -> None:
    """A request ends with "abort", and with an error of this text."""
    engine = llm.engine
    sequence = engine.add_request("user", "r", GREEDY, engine.tokenizer.encode(PROMPTS[0]))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finish_reason == "abort"
    assert re.search(text, str(sequence.error), re.DOTALL), sequence.error


@pytest.mark.slow
def test_every_failure_at_every_place(bridge, simulator, on_ascend, expected):
    """Each ends its request with the class of the status, leaves nothing behind, and the next request works."""
    llm = on_ascend("staged")
    bridge.synchronize()  # the device has started
    simulator.record_calls()
    llm.generate(PROMPTS[:1], GREEDY)
    at_rest, places = simulator.counters(), Counter(simulator.calls())
    operators = {name.removesuffix("GetWorkspaceSize") for name, _ in places if name.startswith("aclnn")}
    assert len(operators) >= 10 and all((name, "async") in places for name in operators)
    statuses = itertools.cycle(STATUS_CLASSES.items())
    for place, when in places:
        is_creation = place.startswith("aclCreate")  # it has no status
        everywhere = place in ("aclrtSetDevice", "aclrtMemcpyAsync", "aclnnQuantMatmulV5")
        for status, name in itertools.islice(statuses, 1 if is_creation else len(STATUS_CLASSES) if everywhere else 3):
            fault = {"call": place, "code": status, "message": "told why", "when": when}
            simulator.plan(fault | {"nth": min(2, places[place, when])})
            if is_creation:
                check_failure(llm, f"INTERNAL: deepinfer.cann.*{place} made none")
            else:
                check_failure(llm, f"{'' if name == 'INVALID_ARGUMENT' else name}.*simulator device 0.*told why")
            simulator.plan()
            assert simulator.counters() == at_rest, (place, when, status)
            if name in DIRTYING and not is_creation:
                check_failure(llm, "FAILED_PRECONDITION: .*takes no work until reset_device.*told why")
                bridge.reset_device(0)
                bridge.synchronize()
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected
    llm.close()


@pytest.mark.slow
def test_resident(bridge, simulator, on_ascend, expected):
    """Ids; nothing but weights is on the device between steps; and weights that a reset has lost are told."""
    llm = on_ascend("resident", batch_invariant=True)
    num_weights, _ = bridge.usage()
    assert num_weights > 0
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected
    assert bridge.usage() == (num_weights, 0)
    bridge.reset_device(0)
    check_failure(llm, "FAILED_PRECONDITION: .*stale device handle")
    llm.close()


def test_weights_are_freed_with_their_engine(bridge, on_ascend):
    llm = on_ascend("resident")
    assert bridge.usage()[0] > 0
    llm.close()
    del llm
    gc.collect()
    assert bridge.usage() == (0, 0)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_batch(bridge, on_ascend):
    """On the simulator, whose operators compute each row by itself: alone, together, in another order, with more."""
    llm = on_ascend("resident", batch_invariant=True)
    together = fingerprints(llm.generate(PROMPTS, GREEDY))
    assert fingerprints(llm.generate(PROMPTS[::-1], GREEDY)) == together[::-1]
    assert [fingerprints(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS] == together
    long = [PROMPTS[1] * 12, *PROMPTS]
    assert fingerprints(llm.generate(long, GREEDY))[1:] == together
    llm.close()


def fingerprints(results: Any) -> list[str]:
    return [CompletionOutput.from_outputs(outputs).fingerprint for outputs in results]


def resolved(**options: Any) -> Any:
    environ = options.pop("environ", {})
    given = {"model": SHAPE, "device": "ascend", "host_ops": "missing", "max_model_len": 64, **options}
    return resolve(EngineArgs(**given), {"DEEPINFER_JAX_ASCEND_SIM": "1", **environ})


@pytest.mark.parametrize(
    "options, error, text",
    [
        (
            {"host_ops": "hyper"},
            AscendUnsupportedError,
            "is in use for: caches .*HOST_OPS=missing",
        ),
        ({"host_ops": "everything"}, ValueError, "names everything; allowed are missing"),
        ({"model": ROOT / "configs" / "model" / "tiny.json"}, AscendUnsupportedError, "drafts: .*num_draft_tokens=0"),
        (
            {"model": ROOT / "configs" / "model" / "tiny.json", "num_draft_tokens": 0},
            AscendUnsupportedError,
            "attention: head_dim=64 must be 512; indexer: index_head_dim=32 must be 128",
        ),
        ({"kernels": "reference"}, ValueError, "kernels=reference would leave the Ascend device idle"),
        ({"numerics": "fp32"}, AscendUnsupportedError, "numerics=fp32; products take FP8 rows"),
        ({"mesh_shape": (2, 1)}, AscendUnsupportedError, r"mesh_shape=\(2, 1\): the model runs on one Ascend device"),
        ({"device": "cpu"}, ValueError, "host_ops='missing' says what the host computes for an Ascend device"),
    ],
    ids=["host_ops", "unknown", "drafts", "sizes", "kernels", "numerics", "mesh", "cpu"],
)
def test_what_cannot_run_is_refused_before_anything_does(native, options, error, text):
    with pytest.raises(error, match=text):
        load_engine_model(resolved(**options))


def test_the_simulator_is_never_chosen_by_itself(native, monkeypatch):
    """A14: without CANN, and without asking for the simulator, the way on is told."""
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    with pytest.raises(AscendError, match="DEEPINFER_JAX_ASCEND_SIM=1"):
        load_engine_model(resolved(environ={"DEEPINFER_JAX_ASCEND_SIM": "0"}))


def test_an_open_bridge_of_the_other_kind_is_refused(bridge):
    with pytest.raises(ValueError, match="has a bridge to SIM_Ascend950 open, and DEEPINFER_JAX_ASCEND_SIM=0"):
        load_engine_model(resolved(environ={"DEEPINFER_JAX_ASCEND_SIM": "0"}))


def test_bits_are_promised_on_the_simulator_only(bridge):
    config = resolved(batch_invariant=True)
    check_invariance(config, bridge)
    with pytest.raises(NotImplementedError, match="cannot be promised on Ascend950"):
        check_invariance(config, dataclasses.replace(bridge, is_simulator=False, soc="Ascend950"))
