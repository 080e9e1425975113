"""K06: bounded replay gives the same with rows masked and with rows left out."""

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.checkpoint.embedded import embedded_model
from deepinfer_jax.testing import tiny

KEEP = 140
ALIGNMENT = 116  # 140 rows cut into steps whose tails are padded to 8, 64 or 256 rows
LENGTHS = (20, 139, 140, 141, 500, 1000)
MODE = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"
TAIL = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"


def engine(monkeypatch: pytest.MonkeyPatch, mode: str, keep: int | None = KEEP, **options):
    monkeypatch.setenv(MODE, mode)
    monkeypatch.delenv(TAIL, raising=False)
    if keep is not None and mode != "off":
        monkeypatch.setenv(TAIL, str(keep))
    sizes = {"max_model_len": 1088, "max_num_batched_tokens": 1088}
    return tiny.tiny_llm(embedded_model(), **(sizes | options))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(6)
    return [[0, *rng.integers(3, 259, length - 1).tolist()] for length in LENGTHS]


def results(llm, given: list[list[int]], max_tokens: int) -> list[list[tuple[int, float]]]:
    params = [
        SamplingParams(temperature=1.0, seq_seed=index, max_tokens=max_tokens, ignore_eos=True)
        for index in range(len(given))
    ]
    outputs = llm.generate(prompt_token_ids=given, sampling_params=params, use_tqdm=False)
    return [[(one.token_id, one.token_logprobs) for one in each] for each in outputs]


def check_modes(monkeypatch: pytest.MonkeyPatch, max_tokens: int, **options) -> None:
    given = prompts()
    off = results(engine(monkeypatch, "off", **options), given, max_tokens)
    mask = results(engine(monkeypatch, "mask", **options), given, max_tokens)
    compact_llm = engine(monkeypatch, "compact", **options)
    compact = results(compact_llm, given, max_tokens)
    assert compact == mask
    assert compact[:3] == off[:3], "prompts of up to 140 tokens lose nothing"
    assert compact[-1] != off[-1], "a tail of 140 rows is not exact for this model"
    before = compact_llm.computed_rows
    results(compact_llm, given[-1:], 1)
    rows = {name: count - before[name] for name, count in compact_llm.computed_rows.items()}
    assert rows["encoder"] >= 1000
    assert rows["decoder"] <= KEEP + ALIGNMENT, rows


def test_mask_equals_compact_in_chunks(monkeypatch: pytest.MonkeyPatch):
    check_modes(monkeypatch, max_tokens=16)


@pytest.mark.slow
def test_mask_equals_compact_at_once(monkeypatch: pytest.MonkeyPatch):
    check_modes(monkeypatch, max_tokens=64, chunked_prefill=False)


def test_short_tail_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"133 is below 134 \(window 128 \+ 6 tokens"):
        engine(monkeypatch, "compact", keep=133)


def test_unknown_mode_and_missing_tail_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="Compact"):
        engine(monkeypatch, "Compact")
    with pytest.raises(ValueError, match=TAIL):
        engine(monkeypatch, "mask", keep=None)
