"""K06: bounded replay gives the same with rows masked and with rows left out."""

import numpy as np
import pytest

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.engine import buckets

KEEP, NUM_TOKENS = 140, 64
ALIGNMENT = 16  # chunks are computed in tiles of 8 rows; a tail of 140 rows lies in up to three of them
LENGTHS = (20, 139, 140, 141, 500, 1000)
MODE = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"
TAIL = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"
MAX_LEN = 1088

type Results = list[list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def few_compiled_steps(monkeypatch: pytest.MonkeyPatch, variant):
    """One size of page table, and of step where there are no drafts: engines with and without chunks share them."""
    if variant[1] == 0:
        monkeypatch.setenv("DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL", str(MAX_LEN))
    monkeypatch.setattr(buckets, "FIRST_PAGES", MAX_LEN // 64)


def engine(monkeypatch: pytest.MonkeyPatch, make_llm, mode: str, keep: int | None = KEEP, **options) -> LLM:
    monkeypatch.setenv(MODE, mode)
    monkeypatch.delenv(TAIL, raising=False)
    if keep is not None and mode != "off":
        monkeypatch.setenv(TAIL, str(keep))
    sizes = {"max_model_len": MAX_LEN, "max_num_batched_tokens": MAX_LEN, "max_num_seqs": len(LENGTHS)}
    return make_llm(**(sizes | options))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(6)
    return [[0, *rng.integers(3, 259, length - 1).tolist()] for length in LENGTHS]


def run(llm: LLM, given: list[list[int]], seeds: list[int], max_tokens: int = NUM_TOKENS) -> Results:
    params = [SamplingParams(temperature=1.0, seq_seed=seed, max_tokens=max_tokens, ignore_eos=True) for seed in seeds]
    outputs = llm.generate(prompt_token_ids=given, sampling_params=params, use_tqdm=False)
    return [[(one.token_id, one.token_logprobs) for one in each] for each in outputs]


def together_and_alone(llm: LLM) -> Results:
    """The results, which must not depend on company, nor on what is known from before."""
    seeds = list(range(len(LENGTHS)))
    together = run(llm, prompts(), seeds)
    known = run(llm, prompts(), seeds)
    llm.engine.scheduler.clear_prefix_cache()
    alone = [run(llm, [prompt], [seed])[0] for prompt, seed in zip(prompts(), seeds, strict=True)]
    assert together == alone == known
    return together


@pytest.mark.slow  # tests/model/test_replay.py and tests/engine/test_prefix_cache.py hold the same in short
@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "whole"])
def test_mask_equals_compact(monkeypatch: pytest.MonkeyPatch, make_llm, chunked):
    results, rows = {}, {}
    for mode in ("off", "mask", "compact"):
        llm = engine(monkeypatch, make_llm, mode, chunked_prefill=chunked)
        assert llm.engine.sizes.scheduler.max_num_batched_tokens == (64 if chunked else MAX_LEN)
        results[mode] = together_and_alone(llm)
        llm.engine.scheduler.clear_prefix_cache()
        before = llm.computed_rows
        run(llm, prompts()[-1:], [5], max_tokens=1)
        rows[mode] = {name: count - before[name] for name, count in llm.computed_rows.items()}
        assert llm.stats()["recompilations"] == 0
    assert results["compact"] == results["mask"]
    assert results["compact"][:3] == results["off"][:3], "prompts of up to 140 tokens lose nothing"
    assert results["compact"][-1] != results["off"][-1], "a tail of 140 rows is not exact for this model"
    assert rows["off"] == {"encoder": 1000, "decoder": 1000}
    assert rows["mask"]["encoder"] == rows["mask"]["decoder"] == rows["compact"]["encoder"]
    assert 1000 <= rows["compact"]["encoder"] <= 1000 + ALIGNMENT
    assert KEEP <= rows["compact"]["decoder"] <= KEEP + ALIGNMENT


@pytest.mark.parametrize("mode", [pytest.param("mask", marks=pytest.mark.slow), "compact"])
def test_log_probabilities_of_the_prompt_are_off_with_a_warning(monkeypatch: pytest.MonkeyPatch, make_llm, mode):
    llm = engine(monkeypatch, make_llm, mode)
    with pytest.warns(UserWarning, match=f"prompt_logprobs is off.*{MODE}"):
        [outputs] = llm.generate("abc", SamplingParams(max_tokens=2, prompt_logprobs=True, ignore_eos=True))
    assert [output.prompt_logprobs for output in outputs] == [[], []]


def test_a_short_tail_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch, make_llm):
    with pytest.raises(ValueError, match=r"133 is below 134 \(window 128 \+ 6 tokens"):
        engine(monkeypatch, make_llm, "compact", keep=133)


def test_an_unknown_mode_and_a_missing_tail_are_refused(monkeypatch: pytest.MonkeyPatch, make_llm):
    with pytest.raises(ValueError, match="Compact"):
        engine(monkeypatch, make_llm, "Compact")
    for mode in ("mask", "compact"):
        with pytest.raises(ValueError, match=TAIL):
            engine(monkeypatch, make_llm, mode, keep=None)
