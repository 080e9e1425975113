"""What a request may ask of sampling, checked once, and what the host derives from it for each step."""

import dataclasses
import math
import numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

GREEDY_TEMPERATURE = 1e-5  # at or below: argmax, reported as the distribution of this temperature
NO_TOKEN = -1  # in forced and suppressed ids: none

_INT32_MAX = 2**31 - 1
_MAX_TOP_LOGPROBS = 1000
_UINT64_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the step of SplitMix64
# From here on every distribution is uniform in float32; the bound keeps scaled logits normal numbers.
_MIN_INVERSE_TEMPERATURE = 2.0**-64
_OTHER_NAMES = {"seed": "seq_seed"}


@runtime_checkable
class SupportsGetrandbits(Protocol):
    """A source of seeds: the `random` module or a `random.Random`."""

    def getrandbits(self, k: int, /) -> int:
        """Returns an integer of k random bits."""
        ...


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Options of one request (spec: interface 2). Frozen; change with `dataclasses.replace`.

    temperature: divides the logits. At or below 1e-5 the token is the argmax, the lowest id on ties;
        the stored values are then 1e-5, top_p 1.0 and top_k -1, and log-probabilities are those of 1e-5.
    top_p: in (0, 1]; keeps tokens while the mass strictly before them is <= top_p. Applied before top_k.
    top_k: -1 for off, otherwise the number of best tokens kept.
    ignore_eos: keep generating after EOS.
    max_tokens: most output tokens; 0 becomes 1 with a warning.
    logprobs: accepted for compatibility and stored as False; ask with top_logprobs.
    prompt_logprobs: log-probabilities of the prompt tokens.
    top_logprobs: number of best alternatives reported for each output token, 0..1000.
    first_n_token_no_eos: 0 or 1; with 1, EOS cannot be the first output token.
    eos_id: set by the engine at intake.
    so_args: structured output request (spec: interface 3).
    golden_token_ids: forced output tokens by output position, -1 to sample there; stored as a tuple.
    seq_seed: seed of this sequence modulo 2^64, None to draw one for each request.
    """

    temperature: float | int = 1.0
    top_p: float | int = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    first_n_token_no_eos: int = 0
    eos_id: int = 0
    so_args: dict[str, Any] | None = None
    golden_token_ids: Sequence[int] | None = None
    seq_seed: int | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "SamplingParams":
        """Refuses a field that does not exist, before the generated `__init__` sees it."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in known:
                hint = f"; the name here is {_OTHER_NAMES[name]!r}" if name in _OTHER_NAMES else ""
                raise TypeError(f"SamplingParams does not implement {name!r}{hint}; its fields are " + ", ".join(known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            "temperature": _finite("temperature", self.temperature),
            "top_p": _finite("top_p", self.top_p),
        }
        for name in ("top_k", "max_tokens", "top_logprobs", "first_n_token_no_eos", "eos_id"):
            values[name] = _integer(name, getattr(self, name))
        for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        values["golden_token_ids"] = _golden(self.golden_token_ids)
        if self.so_args is not None and not isinstance(self.so_args, dict):
            raise TypeError(f"so_args={self.so_args!r} must be a dict or None")
        if self.seq_seed is not None:
            values["seq_seed"] = _integer("seq_seed", self.seq_seed) & _UINT64_MASK
        _check_ranges(values)
        if values["temperature"] <= GREEDY_TEMPERATURE:
            values |= {"temperature": GREEDY_TEMPERATURE, "top_p": 1.0, "top_k": -1}
        if values["max_tokens"] == 0:
            warnings.warn("max_tokens=0 is taken as 1; pass 1 to say so", stacklevel=3)
            values["max_tokens"] = 1
        if self.logprobs:
            warnings.warn(
                "logprobs=True has no effect (token_logprobs are always returned); "
                "ask for alternatives with top_logprobs",
                stacklevel=3,
            )
            values["logprobs"] = False
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        shown = (
            "temperature",
            "top_p",
            "top_k",
            "ignore_eos",
            "max_tokens",
            "prompt_logprobs",
            "top_logprobs",
            "so_args",
            "seq_seed",
        )
        return f"SamplingParams({', '.join(f'{n}={getattr(self, n)!r}' for n in shown)})"

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """Builds the parameters from a dict; keys whose value is None take the default."""
        return cls(**{name: value for name, value in options.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the argmax."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def inverse_temperature(self) -> float:
        """The factor on the logits; round it once to float32.

        The division is done here because not every device divides with correct rounding.
        """
        return max(1.0 / self.temperature, _MIN_INVERSE_TEMPERATURE)


def refuse_unsupported(params: SamplingParams) -> None:
    """Raises for an option that is part of the interface but not of this version."""
    if params.so_args is not None:
        raise NotImplementedError("so_args (structured output) is not available in this version; leave it None")
    if params.prompt_logprobs:
        raise NotImplementedError("prompt_logprobs=True is not available in this version; leave it False")


def forced_token(params: SamplingParams, output_index: int) -> int:
    """Returns the token forced at this output position (0 is the first), or -1."""
    golden = params.golden_token_ids
    if golden is None or output_index >= len(golden):
        return NO_TOKEN
    return golden[output_index]


def suppressed_token(params: SamplingParams, output_index: int) -> int:
    """Returns the token that may not be drawn at this output position, or -1."""
    is_suppressed = params.first_n_token_no_eos == 1 and output_index == 0
    return params.eos_id if is_suppressed else NO_TOKEN


def request_seed(
    params: SamplingParams,
    engine_seed: int | None,
    request_index: int,
    rng: SupportsGetrandbits,
) -> int:
    """Returns the 64-bit seed of one request.

    An explicit seq_seed is used as it is, by every request that shares the object. Otherwise the seed is
    derived from (engine seed, request index), or without an engine seed drawn from `rng`.
    """
    if params.seq_seed is not None:
        return params.seq_seed
    if engine_seed is not None:
        return mix64(mix64(engine_seed) + (request_index + 1) * _GOLDEN_GAMMA)
    return rng.getrandbits(64)


def mix64(value: int) -> int:
    """Returns the SplitMix64 finaliser of an integer modulo 2^64, a bijection."""
    value &= _UINT64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return value ^ (value >> 31)


def seed_words(seed: int) -> tuple[int, int]:
    """Splits a 64-bit seed into its low and high 32-bit words."""
    return seed & 0xFFFFFFFF, seed >> 32


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be finite")
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}")
    return int(value)


def _golden(ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise TypeError(f"golden_token_ids={ids!r} must be a list of ints or None")
    golden = tuple(_integer(f"golden_token_ids[{i}]", value) for i, value in enumerate(ids))
    for index, value in enumerate(golden):
        if not NO_TOKEN <= value <= _INT32_MAX:
            raise ValueError(f"golden_token_ids[{index}]={value} must be a token id, or -1 to sample there")
    return golden


def _check_ranges(values: Mapping[str, Any]) -> None:
    if values["temperature"] < 0:
        raise ValueError(f"temperature={values['temperature']} must be >= 0; 0 is greedy")
    if not 0 < values["top_p"] <= 1:
        raise ValueError(f"top_p={values['top_p']} must be in (0, 1]; 1 is off")
    if values["top_k"] != -1 and not 1 <= values["top_k"] <= _INT32_MAX:
        raise ValueError(f"top_k={values['top_k']} must be in 1..{_INT32_MAX}, or -1 for off")
    for name, high in (
        ("max_tokens", _INT32_MAX),
        ("top_logprobs", _MAX_TOP_LOGPROBS),
        ("eos_id", _INT32_MAX),
    ):
        if not 0 <= values[name] <= high:
            raise ValueError(f"{name}={values[name]} must be in 0..{high}")
    if values["first_n_token_no_eos"] not in (0, 1):
        raise ValueError(
            f"first_n_token_no_eos={values['first_n_token_no_eos']} must be 0 or 1: "
            "only the first output token can be kept from being EOS"
        )
