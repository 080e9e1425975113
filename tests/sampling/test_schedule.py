"""The split of a budget over requests on the device is that of the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.schedule import allocate_lengths
from deepinfer_jax.scheduler.budget import allocate
from deepinfer_jax.testing.compare import assert_bitwise

ALLOCATE = jax.jit(allocate_lengths)


def survival_of(kind: str, count: int, width: int) -> np.ndarray:
    rng = np.random.default_rng([count, width])
    chances = rng.random((count, width))
    match kind:
        case "ties":
            chances = rng.integers(0, 3, (count, width)) / 2
        case "certain":
            chances = np.ones((count, width))
        case "tiny":
            chances = chances * 1e-15  # products fall below the normal numbers
        case "holes":
            chances[rng.random(chances.shape) < 0.3] = np.nan
    survival = np.cumprod(chances, axis=1, dtype=np.float32)
    if kind == "not survival":  # rising, negative, above 1, with zeros of both signs
        survival = rng.choice([-1.0, -0.0, 0.0, 0.3, 1.0, 2.5, np.inf, np.nan], (count, width)).astype(np.float32)
    return survival


@pytest.mark.parametrize("count, width", [(1, 1), (3, 5), (40, 5), (64, 3)])
@pytest.mark.parametrize("kind", ["plain", "ties", "certain", "tiny", "holes", "not survival"])
def test_device_and_host_agree(kind, count, width):
    survival = survival_of(kind, count, width)
    rng = np.random.default_rng(count)
    for budget in (0, 1, 2, count, 2 * count, count * width, count * width + 3, -1):
        available = rng.integers(0, width + 1, count).astype(np.int32)
        got = ALLOCATE(jnp.asarray(survival), jnp.asarray(available), jnp.int32(budget))
        assert_bitwise(np.asarray(got), allocate(survival, budget, available))


def test_padding_rows_take_nothing_and_change_nothing():
    survival = survival_of("ties", 6, 4)
    available = np.array([4, 2, 0, 4, 1, 3], np.int32)
    padded = np.insert(survival, [0, 2, 2, 6], 1.0, axis=0), np.insert(available, [0, 2, 2, 6], 0)
    is_real = np.insert(np.ones(6, bool), [0, 2, 2, 6], False)
    for budget in range(16):
        alone = ALLOCATE(jnp.asarray(survival), jnp.asarray(available), jnp.int32(budget))
        among = np.asarray(ALLOCATE(jnp.asarray(padded[0]), jnp.asarray(padded[1]), jnp.int32(budget)))
        assert among[is_real].tolist() == np.asarray(alone).tolist()
        assert not among[~is_real].any()
