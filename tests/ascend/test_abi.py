"""A1, A3: numbers and argument lists of the C interface against tables typed a second time from the specification."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.kernels import ascend, ffi
from deepinfer_jax.kernels.attention import cann as attention
from deepinfer_jax.kernels.rms_norm import cann as rms_norm
from deepinfer_jax.kernels.swiglu import cann as swiglu

# Element types (spec: ascend 3.1), by name.
DTYPES = {
    "float32": 0,
    "float16": 1,
    "int8": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 6,
    "uint16": 7,
    "uint32": 8,
    "int64": 9,
    "uint64": 10,
    "float64": 11,
    "bool": 12,
    "bfloat16": 27,
    "float8_e5m2": 35,
    "float8_e4m3fn": 36,
    "float8_e8m0fnu": 37,
}

# Arguments of each first phase (spec: ascend 5.1 to 5.3), runs of one kind as "9 T".
SIGNATURES = {
    "aclnnRmsNorm": "T T f64 T T",
    "aclnnMatmul": "T T T int8",
    "aclnnDynamicMxQuant": "T i s i i i T T",
    "aclnnQuantMatmulV5": "9*T b b i T",
    "aclnnInplacePartialRotaryMul": "T T T i IA",
    "aclnnSwigluGroupQuant": "4*T 3*i b f64 f64 b 3*T",
    "aclnnMoeGatingTopKV2": "4*T 6*i b f64 f64 3*T",
    "aclnnScatterNdUpdate": "T T T",
    "aclnnGroupedMatmulWeightNz": "8*TL T 3*TL 4*i IA i 3*TL",
    "aclnnSparseFlashMlaMetadata": "9*T 14*i s s b b T",
    "aclnnQuantLightningIndexerV2Metadata": "5*T 8*i s s i i T",
    "aclnnQuantLightningIndexerV2": "13*T 3*i s s 3*i T T",
    "aclnnSparseFlashMla": "18*T f64 5*i s s i b T T",
}

OK, ARGUMENT, DEADLINE, MISSING, EXHAUSTED, STATE = 0, 3, 4, 5, 8, 9
ABORTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, LOSS = 10, 12, 13, 14, 15
# Status codes (spec: ascend 3.4): those that leave a device usable, then those that do not.
STATUSES = {
    OK: [0, 100002, 207015],
    ARGUMENT: [100000, 107000, 107017, 161001, 161002, 561001, 561002],
    STATE: [100001, *range(107024, 107034), *range(107036, 107039), 507903],
    MISSING: [107001, 200002, 207004],
    INTERNAL: [107002, 107003, 361001, 561101, 561102, 561103, 561999],
    DEADLINE: [107019, 107020, 207020, 507014, 507017, 507034, 507046, 507047],
    ABORTED: [107022, 107023, 107035],
    EXHAUSTED: [200000, 207001, 207018, *range(207005, 207009)],
    UNIMPLEMENTED: [200001, 200006, 207000, 561003, 561107, 561112],
    UNAVAILABLE: [507056, 507057, 507904],
}
DIRTY_STATUSES = {INTERNAL: [507015, 507016, 507035, 507036], LOSS: [507053, 507054, 507055]}


def spelled_out(signature: str) -> str:
    words = []
    for word in signature.split():
        count, _, kind = word.rpartition("*")
        words += [kind] * int(count or 1)
    return " ".join(words)


def test_dtype_codes_are_those_of_the_specification():
    named = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES}
    assert {named[name]: code for name, code in DTYPES.items()} == ascend.DTYPE_CODES


def test_argument_lists_are_those_of_the_specification(native):
    table = {entry["name"]: entry["signature"] for entry in ffi.operator_table(ffi.load_bridge())}
    assert table == {name: spelled_out(signature) for name, signature in SIGNATURES.items()}


@pytest.mark.parametrize("dirties", [False, True], ids=["usable", "dirty"])
def test_statuses_map_as_the_specification_says(native, dirties):
    library = ffi.load_bridge()
    for code, statuses in (DIRTY_STATUSES if dirties else STATUSES).items():
        for status in statuses:
            flag = ascend.ctypes.c_int32()
            got = library.deepinfer_ascend_classify(status, ascend.ctypes.byref(flag))
            assert (got, bool(flag.value)) == (code, dirties), status


# Results of HCCL and its element types (spec: ascend 3.4).
RESULTS = {
    OK: [0],
    ARGUMENT: [1, 2],
    EXHAUSTED: [3, 24],
    UNIMPLEMENTED: [5],
    MISSING: [6],
    DEADLINE: [9],
    ABORTED: [22],
    UNAVAILABLE: [7, 11, 12, 13, 14, 19, 20, 21, 23],
    INTERNAL: [4, 8, 10, 15, 16, 17, 18],
}


def test_results_of_collectives_map_as_documented(native):
    library = ffi.load_bridge()
    for code, results in RESULTS.items():
        assert {library.deepinfer_ascend_classify_collective(result) for result in results} == {code}


def test_targets_page_is_current(native):
    page = ffi.native_folder().parent.parent / "custom_calls" / "TARGETS.md"
    assert page.read_text() == ffi.targets_markdown(ffi.load_bridge()), "python -m deepinfer_jax.kernels.ffi > it"


EPS = 1.0 + 2.0**-40  # no float32 is equal to it


def test_float_attributes_arrive_exactly(bridge, simulator):
    jax.jit(lambda x, w: rms_norm.rms_norm(x, w, eps=EPS))(jnp.ones((2, 8)), jnp.ones(8))
    assert simulator.attributes("aclnnRmsNorm") == {"eps": EPS}
    jax.jit(lambda x, w: swiglu.swiglu(x, w, limit=EPS))(jnp.ones((1, 512), jnp.bfloat16), jnp.ones(1))
    assert simulator.attributes("aclnnSwigluGroupQuant") == {"clampLimit": EPS, "dstTypeMax": 0.0}
    q, keys = jnp.ones((1, 1, 512), jnp.bfloat16), jnp.ones((1, 1, 512), jnp.bfloat16)
    jax.jit(attention.attend)(q, keys, jnp.ones(1, jnp.int32), jnp.zeros(1))
    assert simulator.attributes("aclnnSparseFlashMla")["softmaxScale"] == 512**-0.5
