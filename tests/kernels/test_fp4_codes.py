"""E5M2 codes of packed E2M1: what is emitted for a thread, in integers."""

import operator
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import fp4_codes
from deepinfer_jax.ops.quant import decode_fp4


def prmt(low: int, high: int, selector: int) -> int:
    table = (low | high << 32).to_bytes(8, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    assert max(nibbles) < 8  # a set upper bit would repeat signs
    return int.from_bytes(bytes(table[nibble] for nibble in nibbles), "little")


@pytest.mark.parametrize("step", [0, 4, fp4_codes.TOP_STEP])
def test_every_nibble_becomes_its_value(monkeypatch, step):
    names = {"iadd": operator.add, "imul": operator.mul, "iand": operator.and_, "ior": operator.or_}
    names |= {"shr": operator.rshift, "i32": int, "prmt": prmt}
    monkeypatch.setattr(fp4_codes, "mosaic", SimpleNamespace(**names))
    packed = np.random.default_rng(step).integers(0, 1 << 32, 64, dtype=np.uint64)
    codes = [fp4_codes.signed_codes(int(word), fp4_codes.code_table(step)) for word in packed]
    found = np.asarray(codes, "<u4").view(jnp.float8_e5m2).astype(np.float32).reshape(64, 8)
    values = decode_fp4(jnp.asarray(packed.astype("<u4").view(np.uint8).reshape(64, 4)))
    np.testing.assert_array_equal(found, np.asarray(values) * 2.0 ** (step // 4 - 13))
