"""Sampling as it is defined, in float64 numpy: no code, constant or algorithm of the package."""

import dataclasses

import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Tokens [T], log-probabilities [T, V], smaller mass [T], and by how much each row was decided [T]."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    smaller_mass: np.ndarray
    margins: np.ndarray


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """-ln(-ln U) of the fresh draw [T, V], with 1 - U from Threefry-2x32-20."""
    mask, u64 = np.uint64(2**32 - 1), np.uint64
    keys = [(seeds & mask)[:, None], (seeds >> u64(32))[:, None]]
    keys.append(keys[0] ^ keys[1] ^ u64(0x1BD11BDA))
    x0 = (np.arange(vocab_size, dtype=u64)[None] + keys[0]) & mask
    x1 = (positions.astype(u64)[:, None] * u64(4) + keys[1]) & mask
    x1 = np.broadcast_to(x1, x0.shape)
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x0 = (x0 + x1) & mask
            x1 = (((x1 << u64(distance)) | (x1 >> u64(32 - distance))) & mask) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & mask
        x1 = (x1 + keys[(group + 2) % 3] + u64(group + 1)) & mask
    odd = (x0 << u64(32)) | x1 | u64(1)
    upper, lower = odd / 2.0**64, (~odd + u64(1)) / 2.0**64  # 1 - U and U
    return -np.log(np.where(upper < 0.5, -np.log1p(-np.minimum(upper, 0.5)), -np.log(lower)))


def sample(logits, requests, positions, *, suppressed, forced, edits, allowed, blacklist, force_top_k) -> Sampled:
    """One token for each row. edits: (ids, up, down, add), each [T, K]."""
    count, vocab_size = logits.shape
    rows = np.arange(count)
    x = np.where(allowed, logits.astype(np.float64), -np.inf)
    for first, last in blacklist:
        x[:, first : last + 1] = -np.inf
    x[rows[suppressed >= 0], suppressed[suppressed >= 0]] = -np.inf
    ids, up, down, add = (np.asarray(a) for a in edits)
    row, place = np.nonzero(ids >= 0)
    token = ids[row, place]
    old = x[row, token]
    x[row, token] = np.where(old > 0, old * up[row, place], old * down[row, place]) + add[row, place].astype(float)
    margins = np.full(count, np.inf)
    if 0 < force_top_k < vocab_size:
        order = np.argsort(-x, axis=1, kind="stable")
        margins = np.minimum(margins, gap(np.take_along_axis(-x, order, 1), np.full(count, force_top_k)))
        np.put_along_axis(x, order[:, force_top_k:], -np.inf, axis=1)
    is_greedy = np.array([p.temperature <= 1e-5 for p in requests])
    temperature = np.array([p.temperature for p in requests])[:, None]
    best = x.max(axis=1, keepdims=True)
    distance = (best - x) / temperature
    survivors, margin = survivors_of(distance, requests)
    margins = np.minimum(margins, margin)
    mass = np.where(survivors, np.exp(-distance), 0.0)
    total = mass.sum(1, keepdims=True)
    seeds = np.array([p.seq_seed for p in requests], np.uint64)
    scores = np.where(survivors, gumbel_noise(seeds, positions, vocab_size) - distance, -np.inf)
    scores = np.where(is_greedy[:, None], x, scores)
    token_ids = scores.argmax(1)
    others = np.where(scores == scores.max(1, keepdims=True), -np.inf, scores)
    margins = np.minimum(margins, scores.max(1) - others.max(1))
    token_ids = np.where(forced >= 0, forced, token_ids)
    logprobs = np.where(survivors, np.maximum(-distance - np.log(total), -9999.0), -9999.0)
    less = distance > distance[rows, token_ids][:, None]
    return Sampled(token_ids, logprobs, (mass * less).sum(1) / total[:, 0], margins)


def survivors_of(distance: np.ndarray, requests) -> tuple[np.ndarray, np.ndarray]:
    """Top-p, top-k and min-p, and how far the nearest border is from where it would decide otherwise."""
    vocab_size = distance.shape[1]
    order = np.argsort(distance, axis=1, kind="stable")
    ordered = np.take_along_axis(distance, order, 1)
    weights = np.exp(-ordered)
    before = (np.cumsum(weights, 1) - weights) / weights.sum(1, keepdims=True)
    top_p = np.array([p.top_p for p in requests])[:, None]
    kept = (before <= top_p) | (top_p == 1)
    margins = np.where(top_p < 1, np.abs(before - top_p), np.inf).min(1)
    top_k = np.array([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in requests])
    kept &= np.arange(vocab_size) < top_k[:, None]
    margins = np.minimum(margins, gap(ordered, top_k))
    limit = np.array([-np.log(p.min_p) if p.min_p > 0 else np.inf for p in requests])[:, None]
    kept &= (ordered <= limit) & (ordered < np.inf)
    has_border = (limit < np.inf) & (ordered > 0)  # the best token always stays
    border = np.where(has_border, np.abs(ordered - np.where(has_border, limit, 0)), np.inf)
    survivors = np.zeros(distance.shape, bool)
    np.put_along_axis(survivors, order, kept, axis=1)
    return survivors, np.minimum(margins, border.min(1))


def gap(ordered: np.ndarray, k: np.ndarray) -> np.ndarray:
    """How far the k-th smallest value is from the next; equal ones are told apart by their ids, exactly."""
    count, vocab_size = ordered.shape
    rows, at = np.arange(count), np.minimum(k, vocab_size - 1)
    inside, outside = ordered[rows, at - 1], ordered[rows, at]
    is_certain = (k >= vocab_size) | (inside == outside)
    return np.where(is_certain, np.inf, outside - np.where(is_certain, 0, inside))
