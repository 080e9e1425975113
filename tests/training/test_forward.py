"""The training forwards against the network of serving, on the same parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import StepOutput, forward
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.model.draft import DraftOutput, draft_block, write_context
from deepinfer_jax.model.params import ExpertParams, Params
from deepinfer_jax.model.state import DraftState, init_draft_state, init_state
from deepinfer_jax.testing import compare
from deepinfer_jax.testing.random_config import random_config
from deepinfer_jax.training.draft import markov_logits, run_blocks
from deepinfer_jax.training.forward import SequenceOutput, run_sequences
from deepinfer_jax.training.init import initial_fixed, initial_masters
from deepinfer_jax.training.numerics import straight_through, training_config
from deepinfer_jax.training.weights import Fixed, Masters, training_params

# Half the compile time; these programs run for milliseconds.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
# Float32 sums in another order, through 5 to 9 layers.
FP32_REL_L2 = 2e-5
NONE = jnp.float32(0.0)


def serve(params: Params, tokens: np.ndarray, config: RuntimeConfig, capture: tuple[str, ...]) -> StepOutput:
    """Whole sequences by the forward of serving."""
    batch, length = tokens.shape
    pages = -(-length // config.page_tokens)
    state = init_state(config, num_slots=batch, num_pages=batch * pages)
    table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    step = make_batch(tokens.tolist(), [0] * batch, list(range(batch)), table, logits="all")
    run = functools.partial(forward, batch=step, config=config, capture=capture, wants_features=True)
    return quick_jit(lambda params, state: run(params, state)[0])(params, state)


def train(config: ModelConfig, masters: Masters, fixed: Fixed, tokens: np.ndarray) -> SequenceOutput:
    settings = training_config(config, seq_len=tokens.shape[1], has_bf16_products=False)

    def run(masters: Masters, tokens: Array) -> SequenceOutput:
        params = training_params(masters, fixed, config, strength=NONE)
        return run_sequences(params, tokens, config=settings, strength=NONE)

    return quick_jit(run)(masters, jnp.asarray(tokens))


def for_serving(params: Params) -> Params:
    """Parameters of training whose routed experts compute their own rows only."""

    def plain(moe):
        own = moe.experts
        return dataclasses.replace(moe, experts=ExpertParams(w1=own.w1, w2=own.w2, w3=own.w3))

    draft = params.draft
    draft = None if draft is None else dataclasses.replace(draft, moe=plain(draft.moe))
    return dataclasses.replace(params, moe=plain(params.moe), draft=draft)


def check_equal(config: ModelConfig, masters: Masters, fixed: Fixed, tokens: np.ndarray, *capture: str) -> None:
    """Equal logits and drafter's features, and where expert choices are captured, equal loads."""
    got = train(config, masters, fixed, tokens)
    params = for_serving(training_params(masters, fixed, config, strength=NONE))
    want = serve(params, tokens, RuntimeConfig(model=config, numerics="fp32_noqdq"), capture)
    compare.assert_close(got.logits.reshape(want.logits.shape), want.logits, rel_l2=FP32_REL_L2)
    assert want.features is not None
    features = want.features.main_hidden[: tokens.size]
    compare.assert_close(got.main_hidden.reshape(features.shape), features, rel_l2=FP32_REL_L2)
    for name, ids in want.stages.items():
        counts = np.bincount(np.asarray(ids).reshape(-1), minlength=config.n_routed_experts)
        assert np.array_equal(got.loads[int(name.split(".")[1])], counts), name


def test_backbone_equals_serving_without_quantisers(shape, start, tokens):
    check_equal(shape, *start, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3, 8])
def test_backbone_equals_serving_in_random_shapes(seed: int):
    config = random_config(seed)
    token_map = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
    tokens = np.random.default_rng(seed).integers(5, config.vocab_size, (3, 46)).astype(np.int32)
    check_equal(
        config, initial_masters(config, seed=seed), initial_fixed(config, token_map), tokens, "layers.*.router_ids"
    )


def test_drafts_equal_serving_without_quantisers(shape, start, tokens):
    """The blocks behind three anchors, teacher-forced with the drafts that serving draws."""
    size, anchors = shape.dspark_block_size, np.array([[1, 9, 20]] * len(tokens), np.int32)
    settings = training_config(shape, seq_len=tokens.shape[1], has_bf16_products=False)
    features = np.random.default_rng(2).standard_normal((*tokens.shape, 2 * shape.hidden_size), np.float32)
    backbone = training_params(*start, shape, strength=NONE)
    masters = initial_masters(shape, seed=2, with_draft=True)
    params = training_params(masters, initial_fixed(shape), shape, strength=NONE, frozen=backbone)
    run = quick_jit(functools.partial(run_blocks, config=settings))
    blocks = run(params, jnp.asarray(features), jnp.asarray(tokens), jnp.asarray(anchors), strength=NONE)
    want = [
        drafts_of_serving(for_serving(params), features, tokens, anchors[:, i], shape) for i in range(anchors.shape[1])
    ]
    logits, confidence, before = (
        np.stack(part, axis=1).reshape(-1, size, *part[0].shape[2:]) for part in zip(*want, strict=True)
    )
    got_logits, got_confidence = markov_logits(params, blocks.base, blocks.hidden, jnp.asarray(before))
    compare.assert_close(got_logits, logits, rel_l2=FP32_REL_L2)
    compare.assert_close(got_confidence, confidence, rel_l2=FP32_REL_L2)


def drafts_of_serving(
    params: Params, features: np.ndarray, tokens: np.ndarray, anchors: np.ndarray, shape: ModelConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, confidences, and the token before each draft, of one block in each sequence."""
    config = RuntimeConfig(model=shape, numerics="fp32_noqdq")
    state = init_draft_state(config, num_slots=len(tokens))
    rows = [(slot, position) for slot, anchor in enumerate(anchors) for position in range(anchor)]
    slots, positions = (jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
    context = jnp.asarray(features)[slots, positions]
    newest = tokens[np.arange(len(tokens)), anchors]

    @quick_jit
    def draft(params: Params, state: DraftState) -> DraftOutput:
        state = write_context(params, state, context, positions, slots, config=config)
        own = jnp.arange(len(tokens), dtype=jnp.int32)
        return draft_block(params, state, jnp.asarray(newest), jnp.asarray(anchors), own, config=config)

    made = draft(params, state)
    before = np.concatenate([newest[:, None], np.asarray(made.ids)[:, :-1]], axis=1)
    return np.asarray(made.logits), np.asarray(made.confidence), before


def test_a_length_that_does_not_fit_is_refused(shape, start, tokens):
    settings = training_config(shape, seq_len=tokens.shape[1] + 2, has_bf16_products=False)
    params = training_params(*start, shape, strength=NONE)
    with pytest.raises(ValueError, match="sequences of 32 tokens do not fit the config, which was made for 34"):
        run_sequences(params, jnp.asarray(tokens), config=settings, strength=NONE)
    with pytest.raises(ValueError, match="seq_len=33 must be positive and even"):
        training_config(shape, seq_len=33, has_bf16_products=False)


def test_gradients_see_through_a_quantiser():
    x = jnp.array([0.3, -1.7, 5.2])
    halves = lambda x: jnp.round(2 * x) / 2  # noqa: E731
    run = functools.partial(straight_through, quantize=halves)
    assert np.allclose(run(x, strength=jnp.float32(1.0)), [0.5, -1.5, 5.0])
    assert np.array_equal(run(x, strength=NONE), x)
    slope = jax.grad(lambda x: jnp.sum(x * run(x, strength=jnp.float32(1.0))))(x)
    assert np.allclose(slope, x + np.array([0.5, -1.5, 5.0]))
