"""What a request may ask of sampling, checked once, and what the host derives from it for each step."""

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from deepinfer_jax.sampling import checks
from deepinfer_jax.sampling.checks import NO_TOKEN as NO_TOKEN  # in forced and suppressed ids: none

GREEDY_TEMPERATURE = 1e-5  # at or below: argmax, reported as the distribution of this temperature

_UINT64_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the step of SplitMix64
_SAMPLES_KEY = 0x73616D706C65732E  # keeps the seeds of the samples of one request apart from those of requests
# From here on every distribution is uniform in float32; the bound keeps scaled logits normal numbers.
_MIN_INVERSE_TEMPERATURE = 2.0**-64
_OTHER_NAMES = {"seed": "seq_seed"}
_REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTEGERS = ("top_k", "max_tokens", "top_logprobs", "first_n_token_no_eos", "eos_id", "n", "min_tokens")
_FLAGS = ("ignore_eos", "logprobs", "prompt_logprobs", "include_stop_str_in_output")
# What `repr` shows always; a later field only where it is not the default.
_SHOWN = ("temperature", "top_p", "top_k", "ignore_eos", "max_tokens", "prompt_logprobs", "top_logprobs", "so_args") + (
    "seq_seed",
)


@runtime_checkable
class SupportsGetrandbits(Protocol):
    """A source of seeds: the `random` module or a `random.Random`."""

    def getrandbits(self, k: int, /) -> int:
        """Returns an integer of k random bits."""
        ...


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Options of one request (spec: interface 2). Frozen; change with `dataclasses.replace`.

    temperature: divides the logits. At or below 1e-5 the token is the argmax, the lowest id on ties; the stored
        values are then 1e-5, top_p 1.0, top_k -1 and min_p 0.0, and log-probabilities are those of 1e-5.
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

    By keyword only, `docs/sampling.md` says where each is applied:
    n: number of answers; answer i has the seed `derived_seed(seed, i)`, so answer 0 is that of n=1.
    stop: a string or several that end the answer when they appear in it; stored as a tuple.
    include_stop_str_in_output: whether the answer's text keeps the stop string that ended it.
    stop_token_ids: token ids that end the answer like EOS.
    min_tokens: output tokens before which neither EOS nor a stop token is drawn; at most max_tokens.
    min_p: in [0, 1]; drops tokens less likely than min_p times the likeliest. Applied after top_k; 0 is off.
    logit_bias: token id -> number added to its logit; stored as pairs by rising id.
    presence_penalty: -2..2, subtracted once from the logit of every token in the output.
    frequency_penalty: -2..2, subtracted for each time that the token is in the output.
    repetition_penalty: > 0; divides positive and multiplies other logits of tokens in prompt or output; 1 is off.
    allowed_token_ids: the only ids that may be drawn.
    bad_words: strings whose token sequences may not appear in the output.
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
    _: dataclasses.KW_ONLY
    n: int = 1
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    min_p: float | int = 0.0
    logit_bias: Mapping[int, float | int] | Sequence[Sequence[float | int]] | None = None
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    repetition_penalty: float | int = 1.0
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "SamplingParams":
        """Refuses a field that does not exist, before the generated `__init__` sees it."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in known:
                hint = f"; the name here is {_OTHER_NAMES[name]!r}" if name in _OTHER_NAMES else ""
                raise TypeError(f"SamplingParams does not implement {name!r}{hint}; its fields are " + ", ".join(known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        values: dict[str, Any] = {name: checks.finite(name, getattr(self, name)) for name in _REALS}
        values |= {name: checks.integer(name, getattr(self, name)) for name in _INTEGERS}
        for name in _FLAGS:
            checks.flag(name, getattr(self, name))
        values["golden_token_ids"] = checks.golden_ids(self.golden_token_ids)
        if self.so_args is not None and not isinstance(self.so_args, dict):
            raise TypeError(f"so_args={self.so_args!r} must be a dict or None")
        if self.seq_seed is not None:
            values["seq_seed"] = checks.integer("seq_seed", self.seq_seed) & _UINT64_MASK
        values["stop"] = checks.texts("stop", self.stop, is_one_allowed=True)
        values["bad_words"] = checks.texts("bad_words", self.bad_words, is_one_allowed=False)
        values["stop_token_ids"] = checks.token_ids("stop_token_ids", self.stop_token_ids)
        values["allowed_token_ids"] = checks.allowed_ids(self.allowed_token_ids)
        values["logit_bias"] = checks.logit_bias(self.logit_bias)
        checks.ranges(values)
        if values["temperature"] <= GREEDY_TEMPERATURE:
            values |= {"temperature": GREEDY_TEMPERATURE, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
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
        shown = [f"{name}={getattr(self, name)!r}" for name in _SHOWN]
        later = [field for field in dataclasses.fields(self) if field.kw_only]
        shown += [f"{f.name}={getattr(self, f.name)!r}" for f in later if getattr(self, f.name) != f.default]
        return f"SamplingParams({', '.join(shown)})"

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

    @property
    def min_p_distance(self) -> float:
        """How far a scaled logit may lie below the row's best, -ln(min_p); round it once to float32.

        Infinity is off. The logarithm is taken here because devices differ in its last bits.
        """
        return 0.0 - math.log(self.min_p) if self.min_p > 0 else math.inf

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the answer."""
        return tuple(self.stop or ())

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """(token id, bias) by rising id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias or ())


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


def derived_seed(seq_seed: int, index: int) -> int:
    """Returns the 64-bit seed of sample `index` of the `n` of one request; sample 0 has the request's own."""
    if index < 0:
        raise ValueError(f"sample {index} of a request does not exist; samples count from 0")
    seq_seed &= _UINT64_MASK
    return seq_seed if index == 0 else mix64(mix64(seq_seed ^ _SAMPLES_KEY) + index * _GOLDEN_GAMMA)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for an option that names a token id beyond the vocabulary."""
    named: dict[str, Sequence[int]] = {
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": [token_id for token_id, _ in params.bias_pairs],
    }
    for name, ids in named.items():
        for token_id in ids:
            if token_id >= vocab_size:
                raise ValueError(f"{name} has token id {token_id}, outside the vocabulary 0..{vocab_size - 1}")


def mix64(value: int) -> int:
    """Returns the SplitMix64 finaliser of an integer modulo 2^64, a bijection."""
    value &= _UINT64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return value ^ (value >> 31)


def seed_words(seed: int) -> tuple[int, int]:
    """Splits a 64-bit seed into its low and high 32-bit words."""
    return seed & 0xFFFFFFFF, seed >> 32
