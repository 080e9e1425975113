"""Arrays as words, and back again in every bit."""

import jax
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.parallel.wire import from_words, to_words

SHAPES = {
    "float32": (np.float32, (3,)),
    "int32": (np.int32, ()),
    "bfloat16": (ml_dtypes.bfloat16, (5,)),
    "float8": (ml_dtypes.float8_e4m3fn, (2, 3)),
    "uint8": (np.uint8, ()),
    "bool": (np.bool_, (7,)),
}


@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_words_are_the_arrays_again(num_rows):
    rng = np.random.default_rng(0)
    tree = {}
    for name, (dtype, shape) in SHAPES.items():
        values = rng.integers(0, 256, (num_rows, *shape, np.dtype(dtype).itemsize), dtype=np.uint8)
        tree[name] = (values[..., 0] > 127) if dtype == np.bool_ else values.view(dtype)[..., 0]
    words = jax.jit(to_words)(tree)
    assert words.dtype == np.uint32 and words.shape == (num_rows, 3 + 1 + 3 + 2 + 1 + 2)
    found = jax.jit(lambda words: from_words(words, tree))(words)
    for name, want in tree.items():
        got = np.asarray(found[name])
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes(), name
