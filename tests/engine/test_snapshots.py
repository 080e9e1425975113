"""Saved requests: the same continuation in the same engine, another one, and from a file."""

import dataclasses
import os

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from deepinfer_jax.engine.snapshot import load_snapshot, save_snapshot
from deepinfer_jax.testing import tiny
from tests.engine.driving import (
    add,
    check_free,
    collect,
    drain,
    facts_of,
    params_of,
    prompt_of,
    reasons,
    run_steps,
)

PROMPT, NUM_TOKENS = prompt_of(150), 30
PARAMS = params_of(5, NUM_TOKENS, temperature=0.9, top_p=0.95, top_k=90, top_logprobs=1)


@pytest.fixture(scope="module")
def whole(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", PROMPT, PARAMS)
    return facts_of(drain(engine)["a"])


def saved_after(engine, num_tokens: int):
    """The snapshot of a request with so many tokens, and its outputs up to there."""
    add(engine, "a", PROMPT, PARAMS)
    found = {"a": []}
    while len(engine.scheduler.get("a").output) < num_tokens:
        collect(found, engine.step())
    saved = engine.save_request("a")
    return saved, found


def rest_of(engine, saved, name: str = "restored") -> list:
    engine.restore_request(saved, name)
    found = drain(engine)
    assert reasons(found)[name] == "length"
    numbers = [output.num_output_tokens for output in found[name]]
    assert numbers == list(range(len(saved.output) + 1, NUM_TOKENS + 1))
    return facts_of(found[name])


@pytest.mark.parametrize("num_tokens", [0, 1, 10, NUM_TOKENS - 2])
@pytest.mark.parametrize("is_async", ["0", "1"])
def test_a_saved_request_goes_on_and_so_does_its_copy(tiny_model, whole, num_tokens, is_async):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async})
    saved, found = saved_after(engine, num_tokens)
    engine.restore_request(saved, "b")
    assert len(saved.output) == num_tokens + (is_async == "1" and num_tokens > 0)
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert facts_of(found["a"]) == whole
    assert facts_of(found["b"]) == whole[len(saved.output) :]
    assert engine.scheduler.counters.adopted == (num_tokens > 0)
    check_free(engine)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_request_is_saved_in_the_middle_of_its_prompt(tiny_model, whole, num_steps):
    engine, other = tiny.tiny_engine(tiny_model), tiny.tiny_engine(tiny_model)
    add(engine, "a", PROMPT, PARAMS)
    found = run_steps(engine, num_steps)
    saved = engine.save_request("a")
    assert (saved.num_written, len(saved.output)) == ((64, 0), (128, 0), (150, 1), (151, 2))[num_steps - 1]
    assert rest_of(other, saved) == whole[len(saved.output) :]
    assert other.scheduler.counters.adopted == 1
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert facts_of(found["a"]) == whole


@pytest.mark.parametrize("num_tokens", [0, 10])
def test_a_file_serves_an_engine_of_other_sizes(tiny_model, whole, tmp_path, num_tokens):
    saved, _ = saved_after(tiny.tiny_engine(tiny_model), num_tokens)
    save_snapshot(saved, tmp_path / "request.safetensors")
    assert os.listdir(tmp_path) == ["request.safetensors"]
    other = tiny.tiny_engine(tiny_model, **tiny.SCARCE)
    loaded = load_snapshot(tmp_path / "request.safetensors", other.runtime)
    for field in dataclasses.fields(saved):
        if field.name != "state":
            assert getattr(loaded, field.name) == getattr(saved, field.name), field.name
    assert rest_of(other, loaded) == whole[len(saved.output) :]
    assert rest_of(other, loaded, "again") == whole[len(saved.output) :]
    assert other.scheduler.counters.adopted == (2 if num_tokens else 0)
    check_free(other)


def test_a_file_holds_states_that_are_views_of_larger_arrays(tiny_model, tmp_path):
    """As those of a model with several sources are, whose pages are cut off behind the first axis."""
    engine = tiny.tiny_engine(tiny_model)
    saved, _ = saved_after(engine, 10)

    def view(leaf: np.ndarray) -> np.ndarray:
        return np.concatenate([leaf, leaf], axis=-1)[..., : leaf.shape[-1]]

    views = dataclasses.replace(saved, state=jax.tree.map(view, saved.state))
    assert not any(leaf.flags.c_contiguous for leaf in jax.tree.leaves(views.state) if leaf.size > leaf.shape[-1])
    save_snapshot(views, tmp_path / "request.safetensors")
    loaded = load_snapshot(tmp_path / "request.safetensors", engine.runtime)
    for got, want in zip(jax.tree.leaves(loaded.state), jax.tree.leaves(saved.state), strict=True):
        np.testing.assert_array_equal(got, want)


def test_without_room_the_tokens_are_computed_again(tiny_model, whole):
    saved, _ = saved_after(tiny.tiny_engine(tiny_model), 10)
    other = tiny.tiny_engine(tiny_model)
    for index in range(tiny.MAX_NUM_SEQS):
        add(other, str(index), prompt_of(70, seed=index), params_of(index, 8))
    run_steps(other, 4)
    assert rest_of(other, saved) == whole[len(saved.output) :]
    assert other.scheduler.counters.adoptions_queued == 1
    check_free(other)


def test_a_restored_request_can_be_saved_forked_and_kept_as_a_prefix(tiny_model, whole):
    engine, other = tiny.tiny_engine(tiny_model), tiny.tiny_engine(tiny_model)
    saved, _ = saved_after(engine, 10)
    other.restore_request(saved, "b")
    again = other.save_request("b")
    other.fork_request("b", "c")
    other.restore_request(again, "d")
    found = drain(other)
    assert [facts_of(found[name]) for name in "bcd"] == [whole[len(saved.output) :]] * 3
    add(other, "e", PROMPT, PARAMS)
    assert facts_of(drain(other)["e"]) == whole
    check_free(other)


def test_only_an_unfinished_request_is_saved(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    with pytest.raises(ValueError, match="'a' is not unfinished"):
        engine.save_request("a")
    saved, _ = saved_after(engine, 3)
    with pytest.raises(ValueError, match="'a' is unfinished"):
        engine.restore_request(saved, "a")
    drain(engine)
    with pytest.raises(ValueError, match="'a' is not unfinished"):
        engine.save_request("a")
    check_free(engine)


def test_a_snapshot_of_other_weights_or_modes_is_refused(tiny_model, tmp_path_factory):
    saved, _ = saved_after(tiny.tiny_engine(tiny_model), 1)
    eager = {"DEEPINFER_ENFORCE_EAGER": "1"}
    replay = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"}
    others = [
        tiny.tiny_engine(tiny.tiny_byte_model(tmp_path_factory.mktemp("other"), seed=2), eager),
        tiny.tiny_engine(tiny_model, eager | replay),
        tiny.tiny_engine(tiny_model, eager, numerics="bf16"),
    ]
    for other in others:
        with pytest.raises(ValueError, match="belongs to"):
            other.restore_request(saved, "b")
        check_free(other)
    same = tiny.tiny_engine(tiny_model, eager, max_num_seqs=2, max_model_len=256, seed=9)
    assert same.fingerprint() == saved.fingerprint


@pytest.fixture
def file(tiny_model, tmp_path):
    saved, _ = saved_after(tiny.tiny_engine(tiny_model), 2)
    save_snapshot(saved, tmp_path / "request.safetensors")
    return tmp_path / "request.safetensors"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_file_that_is_not_whole_is_refused(tiny_model, file, share):
    runtime = tiny.tiny_engine(tiny_model, {"DEEPINFER_ENFORCE_EAGER": "1"}).runtime
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=r"request.safetensors"):
        load_snapshot(file, runtime)


def test_other_files_are_refused(tiny_model, file, tmp_path):
    runtime = tiny.tiny_engine(tiny_model, {"DEEPINFER_ENFORCE_EAGER": "1"}).runtime
    with pytest.raises(ValueError, match="absent"):
        load_snapshot(tmp_path / "absent", runtime)
    save_file({"a": np.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="is not a snapshot"):
        load_snapshot(tmp_path / "foreign", runtime)
    longer = dataclasses.replace(runtime, rollback_tokens=runtime.rollback_tokens + 1)
    with pytest.raises(ValueError, match=r"request\.safetensors.*this engine's caches need"):
        load_snapshot(file, longer)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_breaks_leaves_nothing_and_the_older_file(tiny_model, file, monkeypatch, error):
    saved, _ = saved_after(tiny.tiny_engine(tiny_model), 1)
    before = file.read_bytes()

    def broken(*_):
        raise error

    monkeypatch.setattr(os, "replace", broken)
    for name in (file, file.with_name("new.safetensors")):
        with pytest.raises(type(error)):
            save_snapshot(saved, name)
    assert os.listdir(file.parent) == [file.name]
    assert file.read_bytes() == before
