"""Targets and drafters of three tokens, small enough to enumerate what verification makes of them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.sampling import draw, verify
from deepinfer_jax.sampling.draw import Purpose
from deepinfer_jax.sampling.logits import LOGPROB_FLOOR

DRAW = jax.jit(draw.draw, static_argnames="purpose")

V = 3
PAIRS = np.array(list(itertools.product(range(V), repeat=2)), np.int32)  # every pair of drafts


@dataclasses.dataclass(frozen=True)
class Toy:
    """A target of three tokens and a drafter of two, each as one distribution for each beginning."""

    p: tuple[np.ndarray, np.ndarray, np.ndarray]  # [V], [V, V], [V, V, V]
    q: tuple[np.ndarray, np.ndarray]

    @property
    def law(self) -> np.ndarray:
        """Probability of each sequence of three tokens [V, V, V]."""
        return self.p[0][:, None, None] * self.p[1][:, :, None] * self.p[2]

    def rows(self, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Target [R, 3, V] and draft [R, 2, V] distributions along the drafts [R, 2]."""
        first, second = drafts.T
        count = len(drafts)
        p = np.stack([np.tile(self.p[0], (count, 1)), self.p[1][first], self.p[2][first, second]], axis=1)
        return p, np.stack([np.tile(self.q[0], (count, 1)), self.q[1][first]], axis=1)


def dirichlet(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.dirichlet(np.ones(V), shape) if shape else rng.dirichlet(np.ones(V))


def cut(probs: np.ndarray) -> np.ndarray:
    """The distribution without its least likely token, as a filter leaves it."""
    kept = np.where(probs == probs.min(axis=-1, keepdims=True), 0.0, probs)
    return kept / kept.sum(axis=-1, keepdims=True)


def one_hot(probs: np.ndarray) -> np.ndarray:
    return np.eye(V)[probs.argmax(axis=-1)]


def make_toy(kind: str, seed: int) -> Toy:
    rng = np.random.default_rng(seed)
    p = dirichlet(rng), dirichlet(rng, V), dirichlet(rng, V, V)
    q = dirichlet(rng), dirichlet(rng, V)
    match kind:
        case "filtered":
            return Toy((cut(p[0]), cut(p[1]), cut(p[2])), (cut(q[0]), cut(q[1])))
        case "greedy drafter":
            return Toy(p, (one_hot(q[0]), one_hot(q[1])))
        case "greedy target":
            return Toy((one_hot(p[0]), one_hot(p[1]), one_hot(p[2])), q)
        case "good drafter":
            return Toy(p, (0.9 * p[0] + 0.1 * q[0], 0.9 * p[1] + 0.1 * q[1]))
        case "perfect drafter":
            return Toy(p, (p[0], p[1]))
    return Toy(p, q)


KINDS = ["plain", "filtered", "greedy drafter", "greedy target", "good drafter", "perfect drafter"]


def logs(probs: np.ndarray) -> jax.Array:
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.maximum(np.log(probs), LOGPROB_FLOOR).astype(np.float32))


def requests_of(drafts, lengths, *, drawn=None) -> verify.VerifyRequests:
    drafts = np.asarray(drafts, np.int32)
    count, num_drafts = drafts.shape
    return verify.VerifyRequests(
        drawn=jnp.asarray(np.zeros((count, num_drafts + 1)) if drawn is None else drawn, jnp.int32),
        is_fixed=jnp.zeros((count, num_drafts + 1), bool),
        drafts=jnp.asarray(drafts),
        lengths=jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), (count,)),
        seed_lo=jnp.arange(count, dtype=jnp.uint32),
        seed_hi=jnp.full((count,), 7, jnp.uint32),
        positions=jnp.full((count,), 40, jnp.int32),
    )


def draw_rows(probs: np.ndarray, seeds, positions: jax.Array, purpose: Purpose) -> np.ndarray:
    distances = jnp.asarray(np.round(-np.log(probs) * 2**24), jnp.int32)
    return np.asarray(DRAW(distances, jnp.ones(distances.shape, bool), *seeds, positions, purpose=purpose))


def draw_all(requests: verify.VerifyRequests, p_of, q_of) -> tuple[verify.VerifyRequests, np.ndarray, np.ndarray]:
    """A round of two drafts, with p [R, 3, V] and q [R, 2, V]; p_of and q_of: distributions behind some drafts."""
    seeds = requests.seed_lo, requests.seed_hi
    positions = [requests.positions + place for place in range(3)]
    drafts, q = np.zeros((len(requests.lengths), 0), np.int32), []
    for place in range(2):
        q.append(q_of(drafts))
        token_ids = draw_rows(q[-1], verify.round_seeds(*seeds, positions[0]), positions[place], Purpose.DRAFT)
        drafts = np.concatenate([drafts, token_ids[:, None]], axis=1)
    p = [p_of(drafts[:, :row]) for row in range(3)]
    drawn = np.stack([draw_rows(p[row], seeds, positions[row], Purpose.FRESH) for row in range(3)], axis=1)
    requests = dataclasses.replace(requests, drafts=jnp.asarray(drafts), drawn=jnp.asarray(drawn))
    return requests, np.stack(p, axis=1), np.stack(q, axis=1)


# What each rule is meant to compute, from the specification, in float64.


def expected_chances(rule: str, p: np.ndarray, q: np.ndarray, drafts: np.ndarray, length: int) -> np.ndarray:
    """Chance of each test [R, length], NaN where a draft of probability 0 makes it meaningless."""
    at = np.arange(len(drafts))
    chances, weight = np.zeros((len(drafts), length)), np.ones(len(drafts))
    for i in range(length):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = p[at, i, drafts[:, i]] / q[at, i, drafts[:, i]]
            weight = np.minimum(1.0, weight * ratio)
            if rule == "rejection":
                chances[:, i] = np.minimum(1.0, ratio)
            elif i + 1 == length:
                chances[:, i] = weight
            else:
                excess = np.maximum(weight[:, None] * p[:, i + 1] - q[:, i + 1], 0).sum(axis=1)
                chances[:, i] = excess / (excess + 1 - weight)
    return chances


def stop_probabilities(rule: str, chances: np.ndarray, length: int) -> np.ndarray:
    """Probability of each number of accepted drafts [R, length + 1]."""
    stops = np.zeros((len(chances), length + 1))
    if rule == "rejection":
        alive = np.ones(len(chances))
        for i in range(length):
            stops[:, i] = alive * (1 - chances[:, i])
            alive = alive * chances[:, i]
        stops[:, length] = alive
        return stops
    left = np.ones(len(chances))
    for i in reversed(range(length)):
        stops[:, i + 1] = left * chances[:, i]
        left = left * (1 - chances[:, i])
    stops[:, 0] = left
    return stops


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())
