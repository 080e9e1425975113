"""K10: order and arithmetic of top-p and top-k, on the sampler function alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import logits
from deepinfer_jax.sampling.params import SamplingParams
from tests.sampling.build import rows_of

FLOOR = -9999.0
FOUR = np.log([0.4, 0.3, 0.2, 0.1])
EVEN = (0.0, 0.0, -np.inf, -np.inf)
TIED = np.log([0.5, 0.25, 0.125, 0.125])
LN2 = np.log(2)

# Logits, options, log-probabilities with None for the floor.
ROWS = {
    "top-p before top-k": (FOUR, {"top_p": 0.5, "top_k": 2}, (-0.559616, -0.847298, None, None)),
    "the first token alone": (FOUR, {"top_p": 0.39}, (0.0, None, None, None)),
    "mass before equal to p": (EVEN, {"top_p": 0.5}, (-LN2, -LN2, None, None)),
    "mass before above p": (EVEN, {"top_p": 0.499}, (0.0, None, None, None)),
    "top-k of one": (TIED, {"top_p": 1.0, "top_k": 1}, (0.0, None, None, None)),
    "top-k cuts a tie": (TIED, {"top_k": 3}, (*np.log([4 / 7, 2 / 7, 1 / 7]), None)),
    "temperature": (FOUR, {"temperature": 0.5}, np.log(np.array([16, 9, 4, 1]) / 30)),
}


def processed(name: str, place: int, num_rows: int) -> np.ndarray:
    """The row of a case among others."""
    names = list(ROWS)
    start = (names.index(name) - place) % len(names)
    chosen = [ROWS[names[(start + i) % len(names)]] for i in range(num_rows)]
    array = jnp.asarray([row for row, _, _ in chosen], jnp.float32)
    params = rows_of([SamplingParams(**options) for _, options, _ in chosen])
    return np.asarray(jax.jit(logits.process)(array, params).logprobs)[place]


@pytest.mark.parametrize("place, num_rows", [(0, 1), (0, 7), (6, 7)])
@pytest.mark.parametrize("name", ROWS)
def test_the_row_is_as_computed_by_hand(name, place, num_rows):
    want = ROWS[name][2]
    got = processed(name, place, num_rows)
    assert got.dtype == np.float32
    assert [value == FLOOR for value in got] == [value is None for value in want]
    survivors = [(a, b) for a, b in zip(got.tolist(), want, strict=True) if b is not None]
    np.testing.assert_allclose(*zip(*survivors, strict=True), rtol=0, atol=1e-6)


def test_the_last_two_of_the_tied_row_are_equal_to_the_bit():
    row = TIED.astype(np.float32)
    assert row[2].tobytes() == row[3].tobytes()
