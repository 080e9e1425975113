"""Images in the engine: whatever else happens, a request gives what it gives when it runs alone."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load_model
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import steps
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.image_table import ImageTable, patch_sizes
from deepinfer_jax.engine.images import place_images
from deepinfer_jax.engine.snapshot import load_snapshot, save_snapshot
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch, with_images
from deepinfer_jax.model.state import init_state
from deepinfer_jax.model.vision import encode_image, pixel_values
from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.testing import tiny
from deepinfer_jax.text.images import prepare_image
from tests.engine.driving import (
    Recorder,
    check_free,
    collect,
    drain,
    facts,
    facts_of,
    params_of,
    prompt_of,
    reasons,
)
from tests.engine.pictures import Parts, ask, ids_of, picture, run

SYNC = {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "0"}
ONE_PLACE = {"DEEPINFER_MULTI_MODAL_BUFFER_SIZE": "1"}
COMPACT = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compact", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"}
NUM_TOKENS = 10
# Images at the beginning, at the end, side by side, twice, in another order, and none.
PROMPTS: dict[str, Parts] = {
    "pair": [0, "A", 5, "B", *prompt_of(9)],
    "swapped": [0, "B", 5, "A", *prompt_of(9)],
    "twice": [0, "A", "A", 5],
    "last": [*prompt_of(20), "C"],
    "text": prompt_of(30),
    "long": [*prompt_of(40), "A", *prompt_of(50, seed=1), "D", *prompt_of(3), "A", 6],
    "only": ["D"],
    "first": ["D", 5],
}


def requests_of(names: list[str], seed: int = 3):
    return {name: (PROMPTS[name], params_of(seed, NUM_TOKENS)) for name in names}


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> dict:
    """What each prompt gives where nothing is known and nothing is asynchronous."""
    return each_alone(tiny.tiny_engine(tiny_model, SYNC), requests_of(list(PROMPTS)))


def each_alone(engine: LLMEngine, requests: dict) -> dict:
    found = {}
    for name, request in requests.items():
        engine.scheduler.clear_prefix_cache()
        found |= run(engine, {name: request})
    return found


def figures(engine: LLMEngine, *names: str) -> tuple[int, ...]:
    stats = engine.stats()
    assert stats["recompilations"] == 0
    return tuple(stats[f"images_{name}"] for name in names)


def test_prompts_together_give_what_each_gives_alone(tiny_model, alone):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, hooks=recorder)
    assert run(engine, requests_of(list(PROMPTS))) == alone
    assert len({tuple(found) for found in alone.values()}) == len(PROMPTS), "prompts with other images differ"
    assert figures(engine, "encoded", "evicted") == (4, 0)
    used, found = figures(engine, "used", "found")
    assert used - found == 4 < used
    chunks = [chunk for plan in recorder.plans if plan.is_prefill for chunk in plan.chunks]
    assert any(len(chunk.images) > 1 for chunk in chunks)
    for chunk in chunks:
        assert not any(image.start < cut < image.end for cut in (chunk.start, chunk.end) for image in chunk.images)
    check_free(engine)


@pytest.mark.slow
def test_a_prompt_in_one_step_gives_what_it_gives_in_chunks(tiny_model, alone):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, SYNC, hooks=recorder, chunked_prefill=False, max_num_batched_tokens=512)
    assert run(engine, requests_of(["long"]))["long"] == alone["long"]
    assert [len(plan.chunks[0].images) for plan in recorder.plans if plan.is_prefill] == [3]


@pytest.mark.slow
def test_an_engine_gives_what_the_network_gives(tiny_model):
    params, model = load_model(tiny_model, with_vision=True, progress=False)
    config = RuntimeConfig(model=model, numerics="q")
    parts, encode = PROMPTS["pair"], jax.jit(functools.partial(encode_image, config=config))
    prepared = [prepare_image(picture(part), model.vision, prompt=0) for part in parts if isinstance(part, str)]
    tokens, images = place_images(ids_of(parts), prepared, model.image_token_id)
    spans = [
        encode(params.vision, pixel_values(jnp.asarray(one.patches)), jnp.asarray(one.grid, jnp.int32)).span
        for one in prepared
    ]
    batch = make_batch([list(tokens)], starts=[0], slots=[0], page_table=np.array([[0]]))
    spans = [span[: image.length] for span, image in zip(spans, images, strict=True)]
    batch = with_images(batch, spans, [image.start for image in images])
    step = jax.jit(functools.partial(forward, config=config), compiler_options=steps.COMPILER_OPTIONS)
    output, _ = step(params, init_state(config, num_slots=1, num_pages=1), batch)
    logprobs = jax.nn.log_softmax(output.logits[0])
    [(token, logprob)] = run(tiny.tiny_engine(tiny_model), {"a": (parts, params_of(1, 1, temperature=1.0))})["a"]
    assert logprob == pytest.approx(float(logprobs[token]), abs=1e-5)


def test_text_steps_stay_the_programs_that_they_were(tiny_model, alone):
    engine = tiny.tiny_engine(tiny_model)
    assert run(engine, requests_of(["text"]))["text"] == alone["text"]
    assert not any("images" in name for name in engine.stats()["buckets"])
    run(engine, requests_of(["twice"]))
    assert sum(count for name, count in engine.stats()["buckets"].items() if name.endswith("-images")) == 1


def test_known_prefixes_are_those_with_the_same_images(tiny_model, alone):
    engine = tiny.tiny_engine(tiny_model)
    parts, params, length = PROMPTS["pair"], params_of(3, NUM_TOKENS), 1 + 8 + 1 + 14 + 9
    assert [run(engine, {"pair": (parts, params)})["pair"] for _ in range(2)] == [alone["pair"]] * 2
    assert engine.stats()["prefix_hit_tokens"] == length - 1
    assert run(engine, requests_of(["swapped"]))["swapped"] == alone["swapped"]
    assert engine.stats()["prefix_hit_tokens"] == length - 1, "the images are in another order"
    [other] = run(engine, {"other": ([0, "A2", *parts[2:]], params)}).values()
    assert other != alone["pair"]
    assert engine.stats()["prefix_hit_tokens"] == length - 1, "another image of the same size"
    longer = [*parts, 7, "A", 8]
    [cold] = run(tiny.tiny_engine(tiny_model), {"a": (longer, params)}).values()
    assert run(engine, {"b": (longer, params)})["b"] == cold
    assert engine.stats()["prefix_hit_tokens"] == length - 1 + length
    assert figures(engine, "encoded") == (3,)
    check_free(engine)


def test_a_hit_goes_on_between_images(tiny_model, alone):
    engine = tiny.tiny_engine(tiny_model)
    params = params_of(3, NUM_TOKENS)
    for _ in range(2):
        ask(engine, "a", PROMPTS["last"], params, chunk_checkpoints=[20])
        assert facts(drain(engine))["a"] == alone["last"]
    assert engine.stats()["prefix_hit_tokens"] == 20


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_fork_has_the_images_of_its_parent(tiny_model, alone, num_tokens):
    engine = tiny.tiny_engine(tiny_model)
    ask(engine, "a", PROMPTS["long"], params_of(3, NUM_TOKENS))
    found: dict = {}
    while len(engine.scheduler.get("a").output) < num_tokens:
        collect(found, engine.step())
    known = len(engine.scheduler.get("a").output)
    engine.fork_request("a", "b")
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert facts(found) == {"a": alone["long"], "b": alone["long"][known:]}
    counters = engine.scheduler.counters
    assert (counters.forks_copied, counters.forks_queued) == ((0, 1), (1, 0))[num_tokens > 0]


@pytest.mark.parametrize("num_steps", [0, 2, 5])
def test_a_saved_request_has_its_images(tiny_model, alone, tmp_path, num_steps):
    engine, other = (tiny.tiny_engine(tiny_model) for _ in range(2))
    ask(engine, "a", PROMPTS["long"], params_of(3, NUM_TOKENS))
    for _ in range(num_steps):
        engine.step()
    saved = engine.save_request("a")
    save_snapshot(saved, tmp_path / "file")
    loaded = load_snapshot(tmp_path / "file", other.runtime)
    assert [image.digest for image in loaded.images] == [image.digest for image in saved.images]
    # Restored on the state it had, and computed again where the state is missing.
    bare = dataclasses.replace(loaded, state=None, num_written=0, state_end=0)
    other.restore_request(loaded, "b")
    other.restore_request(bare, "c")
    found = facts(drain(other))
    assert found["b"] == found["c"] == alone["long"][len(saved.output) :]
    check_free(other)


@pytest.mark.slow
def test_preempted_requests_encode_their_images_again(tiny_model):
    names = [f"r{index}" for index in range(6)]
    wanted = {name: [*prompt_of(60, seed=7), f"B{name}", *prompt_of(100), "A", 5] for name in names}
    requests = {name: (parts, params_of(4, 40)) for name, parts in wanted.items()}
    expected = each_alone(tiny.tiny_engine(tiny_model), requests)
    engine = tiny.tiny_engine(tiny_model, ONE_PLACE, **tiny.SCARCE)
    assert run(engine, requests) == expected
    assert engine.stats()["preemptions"] > 0
    assert figures(engine, "encoded")[0] > len(names) + 1


@pytest.mark.parametrize("is_async", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_a_table_of_one_place_is_enough(tiny_model, alone, is_async):
    environ = ONE_PLACE | {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async}
    engine = tiny.tiny_engine(tiny_model, environ, **tiny.SCARCE)
    assert run(engine, requests_of(list(PROMPTS))) == alone
    encoded, evicted = figures(engine, "encoded", "evicted")
    assert evicted == encoded - 1 >= 5
    table = engine.pipeline._images
    assert table is not None and table.features.shape == (64, 64) and len(table._places) == 1


def test_the_table_takes_no_more_memory_than_it_may(tiny_model, monkeypatch):
    monkeypatch.setattr("deepinfer_jax.engine.sizes.IMAGE_TABLE_BYTES", 3 * 64 * 64 * 2 + 1)
    assert tiny.tiny_engine(tiny_model, {"DEEPINFER_ENFORCE_EAGER": "1"}).sizes.num_image_places == 3


@pytest.mark.slow
def test_drafts_do_not_change_what_images_give(agreeing_model):
    names = ["pair", "long", "text"]
    expected = each_alone(tiny.tiny_engine(agreeing_model, SYNC), requests_of(names))
    drafting = tiny.tiny_engine(agreeing_model, num_draft_tokens=5)
    assert run(drafting, requests_of(names)) == expected
    assert drafting.stats()["drafts"]["accepted_len_mean"] > 1.2


@pytest.mark.slow
def test_compact_replay_gives_what_mask_gives(tiny_model):
    names = ["long", "pair"]
    mask = COMPACT | {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask"}
    expected = each_alone(tiny.tiny_engine(tiny_model, SYNC | mask), requests_of(names))
    engine = tiny.tiny_engine(tiny_model, COMPACT)
    for _ in range(2):  # from nothing, then behind a known prefix that ends before the tail
        assert run(engine, requests_of(names)) == expected
    assert engine.stats()["prefix_hits"] > 0


def test_the_image_of_a_prompt_that_waits_is_encoded_meanwhile(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    for index in range(tiny.MAX_NUM_SEQS):
        ask(engine, str(index), prompt_of(9), params_of(index, 30))
    ask(engine, "image", PROMPTS["pair"], params_of(3, NUM_TOKENS))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.get("image").slot < 0
    assert figures(engine, "encoded", "used") == (2, 0)
    assert set(reasons(drain(engine)).values()) == {"length"}
    assert figures(engine, "encoded", "used", "found") == (2, 2, 0)


@pytest.mark.slow
def test_a_step_with_masks_may_hold_images(tiny_model):
    params = params_of(3, NUM_TOKENS, repetition_penalty=1.3)
    engines = [tiny.tiny_engine(tiny_model, environ) for environ in (SYNC, {})]
    alone, together = (run(engine, {"a": (PROMPTS["twice"], params)}) for engine in engines)
    together |= run(engines[1], {"b": (PROMPTS["twice"], params), "c": (PROMPTS["text"], params)})
    assert alone["a"] == together["a"] == together["b"] != together["c"]


@pytest.mark.parametrize("is_async", ["0", "1"])
def test_an_image_that_cannot_be_encoded_ends_its_requests_only(tiny_model, alone, monkeypatch, is_async):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async})
    table = engine.pipeline._images
    encode = table._encode

    def encode_small(patches, grid, size):
        if len(patches) > 300:
            raise RuntimeError("no memory")
        return encode(patches, grid, size)

    monkeypatch.setattr(table, "_encode", encode_small)
    for name, (parts, params) in requests_of(["only", "pair", "first", "long"]).items():
        ask(engine, name, parts, params)
    found = drain(engine)
    assert reasons(found) == {"only": "ve_error", "pair": "length", "first": "ve_error", "long": "ve_error"}
    assert facts_of(found["pair"]) == alone["pair"]
    assert [output.token_id for output in found["only"]] == [-1]
    monkeypatch.undo()
    assert run(engine, requests_of(list(PROMPTS))) == alone
    check_free(engine)


def test_images_of_one_step_do_not_push_each_other_out(tiny_model, monkeypatch):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ENFORCE_EAGER": "1"})
    table = ImageTable(engine.params.vision, config=engine.runtime, num_places=2, shared=lambda make: make())
    monkeypatch.setattr(table, "_encode", lambda patches, *_: jnp.full((64, 64), patches[0, 0], jnp.bfloat16))
    images = {}
    for number in range(1, 5):
        content = SimpleNamespace(patches=np.full((4, 588), number, np.uint8), grid=(2, 2))
        images[number] = ImageSpan(start=0, length=8, digest=f"{number}", content=content)
    for numbers in [(1, 2), (1, 3), (3, 4), (4, 3), (2, 4), (4, 4)]:
        rows, errors = table.use([images[number] for number in numbers])
        assert not errors
        shown = np.asarray(table.features, np.float32)
        assert {int(digest): (shown[row, 0], shown[row + 63, 0]) for digest, row in rows.items()} == {
            number: (number, number) for number in numbers
        }
    assert dataclasses.asdict(table.counters) == {
        "images_used": 11,
        "images_encoded": 5,
        "images_found": 6,
        "images_evicted": 3,
    }


def test_a_broken_step_takes_the_table_with_it(tiny_model, alone, monkeypatch):
    engine = tiny.tiny_engine(tiny_model)
    run(engine, requests_of(["pair"]))

    def broken(plan, **options):
        raise RuntimeError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(engine.pipeline, "launch", broken)
        ask(engine, "broken", PROMPTS["twice"], params_of(3))
        assert reasons(drain(engine)) == {"broken": "abort"}
    assert not engine.pipeline._images._places
    assert run(engine, requests_of(["twice"]))["twice"] == alone["twice"]


def test_an_eager_engine_compiles_at_the_first_image(tiny_model, alone):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ENFORCE_EAGER": "1"})
    assert run(engine, requests_of(["twice"]))["twice"] == alone["twice"]
    assert figures(engine, "encoded") == (1,)


def test_the_placeholders_of_a_prompt_are_expanded(tiny_model):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ENFORCE_EAGER": "1"})
    sequence = ask(engine, "a", [4, "A", 5, "B"], params_of(1), enqueue=False, chunk_checkpoints=[1, 2, 4])
    assert list(sequence.prompt) == [4, *[299] * 8, 5, *[299] * 14]
    assert [(image.start, image.length) for image in sequence.images] == [(1, 8), (10, 14)]
    assert sequence.checkpoints == {1, 9, 24}
    assert ids_of([4, "A"]) == [4, 299]


def test_encoders_of_a_gpu_have_few_sizes():
    assert patch_sizes(9189, skips_padding=True) == (9189,)
    assert patch_sizes(9189, skips_padding=False) == (288, 575, 1149, 2298, 4595, 9189)


def test_spans_are_written_to_the_table_in_place():
    table, span = (jax.ShapeDtypeStruct((rows, 16), np.float32) for rows in (40, 8))
    compiled = steps.place_span.lower(table, span, jax.ShapeDtypeStruct((), np.int32)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 40 * 16 * 4
