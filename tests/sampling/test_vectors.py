"""The draw as docs/sampling.md describes it for other programs, in plain Python, and its test vectors.

`python -m tests.sampling.test_vectors` prints the content of tests/data/draw_vectors.json.
"""

import json
import random
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import draw, logits
from tests.sampling.build import rows_of

FILE = Path(__file__).parent.parent / "data" / "draw_vectors.json"
PURPOSES = ("fresh", "residual", "accept")
WORD = 2**32
LOG_RATIO = (1235585097, 784282695, 680614586, 671078502, 709650002, 783417101, 871735761, 1012080800) + (
    1547976020,
    1861451667,
)


def random_word(seed: int, position: int, purpose: int, token_id: int) -> int:
    k0, k1 = seed % WORD, seed // WORD
    keys = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (token_id + k0) % WORD, (4 * position + purpose + k1) % WORD
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = (x0 + x1) % WORD
            x1 = ((x1 << distance | x1 >> (32 - distance)) % WORD) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) % WORD
        x1 = (x1 + keys[(group + 2) % 3] + group + 1) % WORD
    return x0 * WORD + x1


def log_ratio(rest: int) -> int:
    centred = rest - 2**30
    total = LOG_RATIO[-1]
    for coefficient in reversed(LOG_RATIO[:-1]):
        high, low, total_high, total_low = centred >> 16, centred & 0xFFFF, total >> 16, total & 0xFFFF
        total = coefficient + high * total_high + (high * total_low >> 16) + (low * total_high >> 16)
    return 2 * total


def noise_of(word: int) -> int:
    small = word | 1
    is_low = small >= 2**63
    if is_low:
        small = 2**64 - small
    zeros = 64 - small.bit_length()
    mantissa = small << zeros >> 32
    if is_low:
        rest = WORD - mantissa
        exponential = zeros * 46516320 + (rest * log_ratio(rest) >> 32 >> 5)
        fraction_bits = 26
    else:
        exponential = mantissa * log_ratio(small >> 32) >> 32
        fraction_bits = 31 + zeros
    zeros = 32 - exponential.bit_length()
    exponent = zeros + fraction_bits - 32
    rest = WORD - (exponential << zeros)
    ln2 = exponent * 11629080 - (exponent * 2094 + 2**15 >> 16)
    return ln2 + ((rest * log_ratio(rest) >> 32) + 64 >> 7)


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def distances_of(row: list[float], inverse_temperature: float) -> list[int]:
    scaled = [float32(float32(max(row) - logit) * inverse_temperature) for logit in row]
    return [int(min(value, 64.0) * 2**24) for value in scaled]


def token_of(seed: int, position: int, purpose: int, distances: list[int]) -> int:
    scores = [noise_of(random_word(seed, position, purpose, i)) - d for i, d in enumerate(distances)]
    return scores.index(max(scores))


def make_vectors() -> dict:
    rng = random.Random(20)
    seeds = [0, 1, 7, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *(rng.getrandbits(64) for _ in range(5))]
    places = [(seed, rng.choice((0, 1, 90, 2**20, 2**30 - 1)), p) for seed in seeds for p in (0, 1)]
    ids = [0, 1, 2, 31, 255, 319, 65536, 129279]
    noises = [
        {"seed": f"{s:#018x}", "position": at, "purpose": PURPOSES[p], "token_ids": ids}
        | {"noise": [noise_of(random_word(s, at, p, i)) for i in ids]}
        for s, at, p in places
    ]
    tokens = []
    for index, (seed, at, _) in enumerate(places):
        row = [float32(rng.gauss(0, 3)) for _ in range(12)]
        inverse = float32(1 / (0.7, 1.0, 1.3)[index % 3])
        distances = distances_of(row, inverse)
        tokens.append(
            {"seed": f"{seed:#018x}", "position": at, "purpose": "fresh", "logits": row}
            | {"inverse_temperature": inverse, "distances": distances, "token": token_of(seed, at, 0, distances)}
        )
    accepts = [
        {"seed": f"{s:#018x}", "position": at, "purpose": "accept"}
        | {"uniform_times_2_24": random_word(s, at, 2, 0) >> 40}
        for s, at, _ in places[::2]
    ]
    return {"noises": noises, "tokens": tokens, "accepts": accepts}


@pytest.fixture(scope="module")
def vectors() -> dict:
    return json.loads(FILE.read_text())


def words(case: dict) -> dict:
    seed = int(case["seed"], 16)
    return {
        "seed_lo": jnp.asarray([seed % WORD], jnp.uint32),
        "seed_hi": jnp.asarray([seed // WORD], jnp.uint32),
        "positions": jnp.asarray([case["position"]], jnp.int32),
    }


def purpose_of(case: dict) -> draw.Purpose:
    return draw.Purpose[case["purpose"].upper()]


def test_the_description_gives_the_file(vectors):
    assert make_vectors() == vectors


def test_the_noise_is_that_of_the_file(vectors):
    for case in vectors["noises"]:
        ids = jnp.asarray(case["token_ids"], jnp.int32)
        got = draw.gumbel_noise(**words(case), token_ids=ids, purpose=purpose_of(case))
        assert got[0].tolist() == case["noise"]


def test_the_token_is_that_of_the_file(vectors):
    process, sample = jax.jit(logits.process), jax.jit(logits.sample)
    for case in vectors["tokens"]:
        row = jnp.asarray([case["logits"]], jnp.float32)
        rows = type(rows_of([]))(
            **words(case),
            inverse_temperature=jnp.asarray([case["inverse_temperature"]], jnp.float32),
            top_p=jnp.ones((1,)),
            top_k=jnp.asarray([-1], jnp.int32),
            is_greedy=jnp.zeros((1,), bool),
            suppressed_ids=jnp.asarray([-1], jnp.int32),
            forced_ids=jnp.asarray([-1], jnp.int32),
        )
        assert process(row, rows).distances[0].tolist() == case["distances"]
        assert sample(row, rows).token_ids.tolist() == [case["token"]]


def test_the_accept_number_is_that_of_the_file(vectors):
    for case in vectors["accepts"]:
        got = draw.accept_uniforms(**words(case))
        np.testing.assert_array_equal(np.asarray(got) * 2.0**24, case["uniform_times_2_24"])


if __name__ == "__main__":
    parts = [
        f' "{kind}": [\n' + ",\n".join("  " + json.dumps(case) for case in cases) + "\n ]"
        for kind, cases in make_vectors().items()
    ]
    print("{\n" + ",\n".join(parts) + "\n}")
