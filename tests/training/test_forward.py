"""The training forward against the network of serving, on the same parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import init_state
from deepinfer_jax.testing import compare
from deepinfer_jax.testing.random_config import random_config
from deepinfer_jax.training.forward import SequenceOutput, run_sequences
from deepinfer_jax.training.init import initial_fixed, initial_masters
from deepinfer_jax.training.numerics import training_config
from deepinfer_jax.training.weights import packed_params, training_params

# Float32 sums in another order, through 5 to 9 layers.
FP32_REL_L2 = 2e-5
NONE, FULL = jnp.float32(0.0), jnp.float32(1.0)


def serve(params: Params, tokens: np.ndarray, config: RuntimeConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits [B, R, V] and stages of whole sequences, by the forward of serving."""
    batch, length = tokens.shape
    pages = -(-length // config.page_tokens)
    state = init_state(config, num_slots=batch, num_pages=batch * pages)
    table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    step = make_batch(tokens.tolist(), [0] * batch, list(range(batch)), table, logits="all")
    run = jax.jit(lambda p, s: forward(p, s, step, config=config, capture=("main_hidden", "layers.*.router_ids"))[0])
    output = run(params, state)
    return output.logits.reshape(batch, length, -1), output.stages


def train(config: ModelConfig, masters, fixed, tokens: np.ndarray, strength: jax.Array) -> SequenceOutput:
    settings = training_config(config, seq_len=tokens.shape[1], has_bf16_products=False)

    def run(masters, tokens):
        params = training_params(masters, fixed, config, strength=strength)
        return run_sequences(params, tokens, config=settings, strength=strength)

    return jax.jit(run)(masters, jnp.asarray(tokens))


@pytest.mark.parametrize("seed", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_equals_serving_without_quantisers(seed: int, tokens: np.ndarray):
    config = random_config(seed)
    masters = initial_masters(config, seed=seed)
    fixed = initial_fixed(config, np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size)
    got = train(config, masters, fixed, tokens, NONE)
    plain = training_params(masters, fixed, config, strength=NONE)
    plain = dataclasses.replace(plain, moe=dataclasses.replace(plain.moe, experts=plain_experts(plain)))
    want, stages = serve(plain, tokens, RuntimeConfig(model=config, numerics="fp32_noqdq"))
    compare.assert_close(got.logits, want, rel_l2=FP32_REL_L2)
    compare.assert_close(got.main_hidden.reshape(tokens.size, -1), stages["main_hidden"], rel_l2=FP32_REL_L2)
    for layer in range(config.num_hidden_layers):
        counts = np.bincount(np.asarray(stages[f"layers.{layer}.router_ids"]).reshape(-1), minlength=config.n_routed_experts)
        assert np.array_equal(got.loads[layer], counts), f"loads of layer {layer}"


def plain_experts(params: Params):
    from deepinfer_jax.model.params import ExpertParams

    own = params.moe.experts
    return ExpertParams(w1=own.w1, w2=own.w2, w3=own.w3)
