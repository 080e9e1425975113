import tempfile

import pytest

from deepinfer_jax.config import environ, forms

GIB = 2**30


def read(name: str, text: str) -> forms.Value:
    return getattr(environ.Envs({name: text}), name)


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "on", "On", "yes", "YES", " 1 "])
def test_bool_words_for_true_in_any_case(text):
    assert read("DEEPINFER_BATCH_INVARIANT", text) is True


@pytest.mark.parametrize("text", ["0", "false", "FALSE", "off", "Off", "no", "NO"])
def test_bool_words_for_false_in_any_case(text):
    assert read("DEEPINFER_BATCH_INVARIANT", text) is False


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("DEEPINFER_GC_INTERVAL_STEP", "+7", 7),
        ("DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES", "-1", -1),
        ("DEEPINFER_FORCE_IMBALANCE_RATIO", "2.5", 2.5),
        ("DEEPINFER_INDEX_ATTN_MEMORY_LIMIT", "4096", 4096),
        ("DEEPINFER_INDEX_ATTN_MEMORY_LIMIT", "3 GiB", 3 * GIB),
        ("DEEPINFER_INDEX_ATTN_MEMORY_LIMIT", "2kib", 2048),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "0.5", 0.5),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1, 0.5,2", (1.0, 0.5, 2.0)),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "0..3,7,10..12", "0..3,7,10..12"),
        ("DEEPINFER_JAX_KERNELS", "mosaic_sm90", "mosaic_sm90"),
        ("DEEPINFER_HF_MODEL_DIR", "", None),
        ("DEEPINFER_TORCH_PROFILER_DIR", "", tempfile.gettempdir()),
        ("DEEPINFER_HF_MODEL_DIR", "/a b", "/a b"),
        ("DEEPINFER_MAX_BACKTRACKING_TOKENS", "9", 9),
    ],
)
def test_well_formed_text_gives_the_typed_value(name, text, value):
    got = read(name, text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    "name, text, reason, allowed",
    [
        ("DEEPINFER_BATCH_INVARIANT", "2", "not a bool", "0, 1, true, false, on, off, yes, no"),
        ("DEEPINFER_BATCH_INVARIANT", "", "not a bool", "0, 1, true, false, on, off, yes, no"),
        ("DEEPINFER_GC_INTERVAL_STEP", "many", "not an integer", "int >= 1"),
        ("DEEPINFER_GC_INTERVAL_STEP", "1.5", "not an integer", "int >= 1"),
        ("DEEPINFER_PREFILL_ATTEMPT_INTERVAL", "0", "out of bounds", "int >= 1"),
        ("DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL", "0", "out of bounds", "int >= 1"),
        ("DEEPINFER_MOE_LB_STAT_INTERVAL", "0", "out of bounds", "int >= 1"),
        ("DEEPINFER_NCCL_MEMORY_SAMPLE_INTERVAL_STEPS", "0", "out of bounds", "int >= 1"),
        ("DEEPINFER_USE_NEXTN_DECODE", "-1", "out of bounds", "int >= 0"),
        ("DEEPINFER_PROFILE_HTTP_PORT_BASE", "65536", "out of bounds", "int in 1..65535"),
        ("DEEPINFER_JAX_ASCEND_DETERMINISM", "4", "out of bounds", "int in 0..3"),
        ("DEEPINFER_NUM_STATE_SLOTS_RATIO", "0.9", "out of bounds", "float >= 1.0"),
        ("DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT", "nan", "not finite", "float >= 0.0"),
        ("DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT", "long", "not a number", "float >= 0.0"),
        ("DEEPINFER_FORCE_IMBALANCE_RATIO", "0.5", "neither 0 nor at least 1", "a number >= 1"),
        ("DEEPINFER_INDEX_ATTN_MEMORY_LIMIT", "10GB", "not a byte count", "KiB, MiB or GiB"),
        ("DEEPINFER_INDEX_ATTN_MEMORY_LIMIT", "0", "not a byte count", "an integer >= 1"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "on", "not one of", "off, mask, compact"),
        ("DEEPINFER_ACCELERATOR", "tpu", "not one of", "auto, cpu, nvidia, ascend"),
        ("DEEPINFER_JAX_NUMERICS", "fp16", "not one of", "fp32_noqdq, fp32, bf16, q"),
        ("DEEPINFER_JAX_PREFIX_CACHE", "on", "not one of", "off, exact, replay"),
        ("DEEPINFER_JAX_SPEC_MODE", "fast", "not one of", "match, rejection, block"),
        ("DEEPINFER_JAX_KERNELS", "Mosaic-1", "not an implementation name", "auto, reference"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,,2", "not a number", "numbers above 0"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,0", "0.0 is not above 0", "numbers"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "3..1", "'3..1' does not rise", "rising"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "1,1", "'1' does not rise", "rising"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "0..3,3", "'3' does not rise", "rising"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "1,", "'' is neither an id nor a range", "rising"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "-1", "'-1' is neither an id nor", "rising"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "1-3", "'1-3' is neither an id nor", "rising"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "0..2147483648", "above 2147483647", "rising"),
    ],
)
def test_malformed_text_is_refused_with_name_text_reason_and_allowed(name, text, reason, allowed):
    with pytest.raises(ValueError) as caught:
        read(name, text)
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r} is refused: ")
    assert reason in message
    assert allowed in message.split("; allowed: ")[1]
    assert message.endswith("; correct or unset it")


def test_token_ranges_hold_both_ends():
    assert forms.token_ranges("0..3,7, 10..12") == (range(4), range(7, 8), range(10, 13))
    assert forms.token_ranges("") == ()
