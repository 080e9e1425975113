"""Requests, rows and logits that several tests of sampling make."""

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.sampling.logits import Edits, SampleRows
from deepinfer_jax.sampling.params import SamplingParams, seed_words


def rows_of(requests: list[SamplingParams], positions=None, suppressed=-1, forced=-1) -> SampleRows:
    count = len(requests)
    words = np.array([seed_words(p.seq_seed or 0) for p in requests], np.uint32).reshape(-1, 2)
    return SampleRows(
        seed_lo=jnp.asarray(words[:, 0]),
        seed_hi=jnp.asarray(words[:, 1]),
        positions=jnp.asarray(np.arange(count) if positions is None else positions, jnp.int32),
        inverse_temperature=jnp.asarray(np.array([p.inverse_temperature for p in requests], np.float32)),
        top_p=jnp.asarray(np.array([p.top_p for p in requests], np.float32)),
        top_k=jnp.asarray(np.array([p.top_k for p in requests], np.int32)),
        is_greedy=jnp.asarray(np.array([p.is_greedy for p in requests], bool)),
        suppressed_ids=jnp.broadcast_to(jnp.asarray(suppressed, jnp.int32), (count,)),
        forced_ids=jnp.broadcast_to(jnp.asarray(forced, jnp.int32), (count,)),
        min_p_distance=jnp.asarray(np.array([p.min_p_distance for p in requests], np.float32)),
    )


def take(tree, index):
    """The same rows of every array."""
    return jax.tree.map(lambda x: x[index], tree)


def random_logits(count: int, vocab_size: int, seed: int, scale: float = 3.0) -> np.ndarray:
    """Logits on a grid of 1/8, so that ties are frequent, with some of them forbidden."""
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(size=(count, vocab_size)) * scale * 8) / 8
    values[rng.random(values.shape) < 0.1] = -np.inf
    values[:, 0] = rng.normal(size=count)
    return values.astype(np.float32)


def mixed_requests(count: int, *, min_p: tuple[float, ...] = (0.0,)) -> list[SamplingParams]:
    rng = np.random.default_rng(count)
    return [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.9])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.02])),
            top_k=int(rng.choice([-1, 1, 5, 40, 10**6])),
            seq_seed=int(rng.integers(0, 2**63)),
            min_p=float(rng.choice(min_p)),
        )
        for _ in range(count)
    ]


def random_edits(count: int, vocab_size: int, width: int, seed: int) -> Edits:
    """Penalties and biases of random tokens, each once in a row, with unused places among them."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((count, vocab_size)), axis=1)[:, :width].astype(np.int32)
    factor = rng.choice([1.0, 1.1, 1.7, 0.8], (count, width))
    add = rng.choice([0.0, 1.0], ids.shape) * rng.normal(size=ids.shape) * 3
    return Edits(
        token_ids=jnp.asarray(np.where(rng.random(ids.shape) < 0.2, -1, ids)),
        up=jnp.asarray((1 / factor).astype(np.float32)),
        down=jnp.asarray(factor.astype(np.float32)),
        add=jnp.asarray(add.astype(np.float32)),
    )
