"""Checks of single sampling options; every error names the field, the value and what is allowed."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

NO_TOKEN = -1  # in forced and suppressed ids: none
INT32_MAX = 2**31 - 1
# Options that become float32 numbers must be finite there; this leaves room for the rounding.
MAX_BIAS = 3.4e38
_MIN_REPETITION, _MAX_REPETITION = 1e-30, 1e30


def finite(name: str, value: Any) -> float:
    """A finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be finite")
    return float(value)


def integer(name: str, value: Any) -> int:
    """An int, also from a numpy integer; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")
    return value


def within(name: str, value: float | int, low: float | int, high: float | int, note: str = "") -> None:
    """Raises ValueError outside low..high, ends included."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value} must be in {low}..{high}{note}")


def golden_ids(ids: Any) -> tuple[int, ...] | None:
    """Forced tokens by output position, -1 for a free one."""
    if ids is None:
        return None
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise TypeError(f"golden_token_ids={ids!r} must be a list of ints or None")
    golden = tuple(integer(f"golden_token_ids[{i}]", value) for i, value in enumerate(ids))
    for index, value in enumerate(golden):
        if not NO_TOKEN <= value <= INT32_MAX:
            raise ValueError(f"golden_token_ids[{index}]={value} must be a token id, or -1 to sample there")
    return golden


def token_ids(name: str, ids: Any) -> tuple[int, ...] | None:
    """Token ids in the order given, each once; an empty list is None."""
    if ids is None:
        return None
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise TypeError(f"{name}={ids!r} must be a list of token ids or None")
    checked = [integer(f"{name}[{i}]", value) for i, value in enumerate(ids)]
    for index, value in enumerate(checked):
        if not 0 <= value <= INT32_MAX:
            raise ValueError(f"{name}[{index}]={value} must be a token id, 0..{INT32_MAX}")
    return tuple(dict.fromkeys(checked)) or None


def allowed_ids(ids: Any) -> tuple[int, ...] | None:
    """As `token_ids`; an empty list would allow nothing."""
    checked = token_ids("allowed_token_ids", ids)
    if checked is None and ids is not None:
        raise ValueError(f"allowed_token_ids={ids!r} allows no token; give at least one id, or None for all")
    return checked


def texts(name: str, value: Any, *, is_one_allowed: bool) -> tuple[str, ...] | None:
    """Non-empty strings, each once; an empty list is None. is_one_allowed: a string stands for a list of one."""
    if value is None:
        return None
    allowed = "a string or a list of strings" if is_one_allowed else "a list of strings"
    if isinstance(value, str) and is_one_allowed:
        value = (value,)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={value!r} must be {allowed}, or None")
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{index}]={text!r} must be a string, not {type(text).__name__}")
        if not text:
            raise ValueError(f"{name}[{index}]={text!r} must not be empty; leave it out")
    return tuple(dict.fromkeys(value)) or None


def logit_bias(bias: Any) -> tuple[tuple[int, float], ...] | None:
    """(token id, bias) pairs by rising id, from a dict or from such pairs; no pairs are None."""
    if bias is None:
        return None
    is_pairs = isinstance(bias, Sequence) and all(isinstance(p, Sequence) and len(p) == 2 for p in bias)
    if not isinstance(bias, Mapping) and (isinstance(bias, str | bytes) or not is_pairs):
        raise TypeError(f"logit_bias={bias!r} must be a dict from token ids to numbers, or None")
    pairs = list(bias.items()) if isinstance(bias, Mapping) else [tuple(pair) for pair in bias]
    checked: dict[int, float] = {}
    for token_id, value in pairs:
        name = f"logit_bias[{token_id!r}]"
        if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
            raise TypeError(f"logit_bias has the key {token_id!r}; its keys are token ids, ints")
        token_id = int(token_id)
        if not 0 <= token_id <= INT32_MAX:
            raise ValueError(f"logit_bias has the key {token_id}; its keys are token ids, 0..{INT32_MAX}")
        if token_id in checked:
            raise ValueError(f"logit_bias has the key {token_id} twice; give each id once")
        checked[token_id] = finite(name, value)
        within(name, checked[token_id], -MAX_BIAS, MAX_BIAS, ", the numbers of float32")
    return tuple(sorted(checked.items())) or None


def ranges(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a number outside its range."""
    if values["temperature"] < 0:
        raise ValueError(f"temperature={values['temperature']} must be >= 0; 0 is greedy")
    if not 0 < values["top_p"] <= 1:
        raise ValueError(f"top_p={values['top_p']} must be in (0, 1]; 1 is off")
    if values["top_k"] != -1 and not 1 <= values["top_k"] <= INT32_MAX:
        raise ValueError(f"top_k={values['top_k']} must be in 1..{INT32_MAX}, or -1 for off")
    for name, high in (("max_tokens", INT32_MAX), ("top_logprobs", 1000), ("eos_id", INT32_MAX)):
        within(name, values[name], 0, high)
    if values["first_n_token_no_eos"] not in (0, 1):
        raise ValueError(
            f"first_n_token_no_eos={values['first_n_token_no_eos']} must be 0 or 1: "
            "only the first output token can be kept from being EOS"
        )
    within("n", values["n"], 1, INT32_MAX)
    within("min_p", values["min_p"], 0, 1, "; 0 is off")
    within("presence_penalty", values["presence_penalty"], -2, 2, "; 0 is off")
    within("frequency_penalty", values["frequency_penalty"], -2, 2, "; 0 is off")
    if not _MIN_REPETITION <= values["repetition_penalty"] <= _MAX_REPETITION:
        raise ValueError(
            f"repetition_penalty={values['repetition_penalty']} must be > 0 "
            f"(in {_MIN_REPETITION}..{_MAX_REPETITION}); 1 is off"
        )
    within("min_tokens", values["min_tokens"], 0, INT32_MAX)
    if values["min_tokens"] > max(values["max_tokens"], 1):
        raise ValueError(
            f"min_tokens={values['min_tokens']} must be at most max_tokens={max(values['max_tokens'], 1)}; "
            "raise max_tokens or lower min_tokens"
        )
