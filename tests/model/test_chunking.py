"""Chunked prefill, one-shot prefill and token-by-token decode are the same computation, bit for bit."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import StepOutput, decode_step, forward
from deepinfer_jax.model.batch import StepBatch, make_batch
from deepinfer_jax.model.params import Params, init_params
from deepinfer_jax.model.state import State
from deepinfer_jax.testing.random_config import VOCAB_SIZE, random_config
from tests.model.running import (
    COMPILER_OPTIONS,
    assert_same_bits,
    compiled_forward,
    new_state,
    padded,
    run_chunks,
)

POLICIES = ("fp32_noqdq", "fp32", "bf16", "q")
QUICK_POLICIES = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32_noqdq", "fp32", "bf16")), "q"]
NUM_TOKENS = 61
# Every choice that the network makes: attended entries, candidate entries, experts.
ID_STAGES = ("layers.*.topk_idxs", "layers.*.candidate_mask", "layers.*.router_ids")


def cuts(total: int, size: int) -> list[int]:
    """Chunks of `size` tokens, the last one shorter."""
    return [min(size, total - start) for start in range(0, total, size)]


@pytest.mark.parametrize("numerics", QUICK_POLICIES)
def test_chunk_sizes_give_equal_logits_and_caches(tiny_a: tuple[Params, RuntimeConfig], numerics: str):
    params, base = tiny_a
    config = RuntimeConfig(model=base.model, numerics=numerics)
    tokens = np.random.default_rng(0).integers(3, base.model.vocab_size, NUM_TOKENS).tolist()
    logits, state = run_chunks(params, tokens, cuts(NUM_TOKENS, 64), config=config)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    for size in (1, 2, 3, 7):
        got = run_chunks(params, tokens, cuts(NUM_TOKENS, size), config=config)
        assert_same_bits(got, (logits, state))


@functools.cache
def compiled_ids(config: RuntimeConfig) -> Callable[[Params, State, StepBatch], tuple[StepOutput, State]]:
    """`forward` with the chosen ids captured, which unrolls the layers."""
    step = functools.partial(forward, config=config, capture=ID_STAGES)
    return jax.jit(step, donate_argnums=(1,), compiler_options=COMPILER_OPTIONS)


def chosen_ids(
    params: Params, tokens: Sequence[int], chunks: Sequence[int], *, config: RuntimeConfig
) -> dict[str, np.ndarray]:
    """The ids of every row of one request computed in the given chunk lengths."""
    state, pages = new_state(config)
    step, start = compiled_ids(config), 0
    parts: dict[str, list[np.ndarray]] = {}
    for length in chunks:
        batch = make_batch([list(tokens[start : start + length])], [start], [1], pages, logits="all")
        output, state = step(params, state, padded(batch))
        for name, value in output.stages.items():
            parts.setdefault(name, []).append(np.asarray(value)[:length])
        start += length
    assert start == len(tokens)
    return {name: np.concatenate(rows) for name, rows in parts.items()}


def check_ids(params: Params, config: RuntimeConfig, num_tokens: int, sizes: Sequence[int]) -> None:
    """Chunks of every size choose what one step over the whole prompt chooses."""
    tokens = np.random.default_rng(0).integers(3, config.model.vocab_size, num_tokens).tolist()
    whole = chosen_ids(params, tokens, [num_tokens], config=config)
    roles = layer_roles(config.model)
    num_sources = sum(role.index_ordinal >= 0 for role in roles)
    leaves = Counter(name.rsplit(".", 1)[-1] for name in whole)
    assert leaves == {"topk_idxs": num_sources, "candidate_mask": 1, "router_ids": len(roles)}
    for name, ids in whole.items():
        assert len(np.unique(ids, axis=0)) > 2, f"{name} chooses the same in every row"
    for size in sizes:
        assert_same_bits(chosen_ids(params, tokens, cuts(num_tokens, size), config=config), whole)


@pytest.mark.slow
def test_chunk_sizes_choose_equal_ids(tiny_a: tuple[Params, RuntimeConfig]):
    """61 tokens: chunks of 64 are one step over the whole prompt."""
    params, base = tiny_a
    check_ids(params, RuntimeConfig(model=base.model, numerics="q"), NUM_TOKENS, (1, 7))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", POLICIES)
def test_longer_prompts_choose_equal_ids(tiny_a: tuple[Params, RuntimeConfig], numerics: str):
    params, base = tiny_a
    check_ids(params, RuntimeConfig(model=base.model, numerics=numerics), 125, (1, 7, 64))


def check_random_model(seed: int, numerics: str, num_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    model = random_config(seed)
    params, config = init_params(model, seed=seed), RuntimeConfig(model=model, numerics=numerics, page_tokens=32)
    tokens = rng.integers(3, VOCAB_SIZE, num_tokens).tolist()
    whole = run_chunks(params, tokens, cuts(num_tokens, 64), config=config)
    assert np.isfinite(whole[0]).all()
    assert_same_bits(run_chunks(params, tokens, [1] * num_tokens, config=config), whole)
    mixed: list[int] = []
    while sum(mixed) < num_tokens:
        mixed.append(int(min(rng.integers(1, 9), num_tokens - sum(mixed))))
    assert_same_bits(run_chunks(params, tokens, mixed, config=config, slot=1), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "numerics"), [(11, "q"), (12, "fp32_noqdq")])
def test_random_models_do_not_depend_on_chunking(seed: int, numerics: str):
    check_random_model(seed, numerics, num_tokens=125)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 32))
def test_more_random_models_do_not_depend_on_chunking(seed: int):
    check_random_model(seed, POLICIES[seed % 4], num_tokens=127)


@pytest.mark.parametrize("numerics", [pytest.param("fp32", marks=pytest.mark.slow), "q"])
def test_row_does_not_depend_on_batch(tiny_a: tuple[Params, RuntimeConfig], numerics: str):
    """A request alone against the same request between two others, at other row offsets, slots and pages."""
    params, base = tiny_a
    config = RuntimeConfig(model=base.model, numerics=numerics)
    rng = np.random.default_rng(3)
    prompt, before, after = (rng.integers(3, base.model.vocab_size, n).tolist() for n in (30, 13, 20))
    alone, _ = run_chunks(params, prompt, [30], config=config, slot=0)

    state, pages = new_state(config)
    step = compiled_forward(config)
    batch = make_batch([before, prompt, after], [0, 0, 0], [2, 1, 0], pages, logits="all")
    logits, state = step(params, state, padded(batch))
    assert_same_bits(np.asarray(logits)[13:43], alone)

    decoded = make_batch([[5], [6], [7]], [20, 30, 13], [0, 1, 2], pages, logits="all")
    logits, _ = step(params, state, padded(decoded))
    expected, _ = run_chunks(params, [*prompt, 6], [30, 1], config=config)
    assert_same_bits(np.asarray(logits)[1:2], expected[-1:])


def test_padding_rows_write_nothing(tiny_a: tuple[Params, RuntimeConfig]):
    params, base = tiny_a
    config = RuntimeConfig(model=base.model, numerics="q")
    state, pages = new_state(config)
    batch = make_batch([[5, 6, 7]], [0], [1], pages)
    _, exact = compiled_forward(config)(params, state, padded(batch))
    state, _ = new_state(config)
    _, with_padding = compiled_forward(config)(params, state, padded(batch, multiple=64))
    assert_same_bits(with_padding, exact)
    others = np.asarray(exact.window.payload)[:, [0, 2]]
    assert not others.any()


def test_a_users_own_jit_gives_the_same_bits(tiny_a: tuple[Params, RuntimeConfig]):
    """Every rounding is written out, so that a compiler that may keep excess precision has nothing to keep."""
    params, base = tiny_a
    config = RuntimeConfig(model=base.model, numerics="q")
    results = []
    for step in (compiled_forward(config), jax.jit(functools.partial(decode_step, config=config))):
        state, pages = new_state(config)
        results.append(step(params, state, padded(make_batch([[5, 6, 7]], [0], [1], pages, logits="all"))))
    assert_same_bits(results[1], results[0])
