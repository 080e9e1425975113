"""The compiled steps: the only `jax.jit`s of the package."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import StepBatch
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import State
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.sampling import logits as sampling
from deepinfer_jax.scheduler import batching

# A step rounds where the specification says, nowhere else and nowhere less.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@pytree_dataclass
class StepResult:
    """What a step leaves for the host, beside the state."""

    drawn: Int32[Array, "two N"]  # the token of each logit row, and the bits of its float32 log-probability
    logprobs: Float32[Array, "N V"]  # of every token; stays on the device unless somebody asks for the best


@functools.partial(
    jax.jit,
    static_argnames=("num_rows", "num_logits", "is_compact", "config"),
    donate_argnames=("state",),
    compiler_options=COMPILER_OPTIONS,
)
def run_step(
    params: Params,
    state: State,
    page_table: Int32[Array, "S M"],
    packed: Int32[Array, " L"],
    *,
    num_rows: int,
    num_logits: int,
    config: RuntimeConfig,
    is_compact: bool = False,
) -> tuple[StepResult, State]:
    """Forward and sampling for one packed batch (layout: `scheduler/batching.py`); the state is donated.

    is_compact: only the tail rows of the batch, maybe none, run the decoder layers.
    """
    fields = batching.fields_of(packed, num_rows=num_rows, num_logits=num_logits)
    batch = StepBatch(
        **{name: fields[name] for name in batching.ROW_FIELDS},
        page_table=page_table,
        logit_rows=fields["logit_rows"],
        tail_rows=fields["tail_rows"] if is_compact else None,
    )
    output, state = forward(params, state, batch, config=config)
    sampled = sampling.sample(output.logits, _sample_rows(fields))
    logprob_bits = lax.bitcast_convert_type(sampled.token_logprobs, jnp.int32)
    return StepResult(drawn=jnp.stack([sampled.token_ids, logprob_bits]), logprobs=sampled.logprobs), state


@functools.partial(jax.jit, static_argnames=("count",))
def best_tokens(logprobs: Float32[Array, "N V"], *, count: int) -> tuple[Float32[Array, "N k"], Int32[Array, "N k"]]:
    """The `count` best log-probabilities of each row and their tokens, lowest id first on ties."""
    return sampling.top_logprobs(logprobs, count)


def _sample_rows(fields: dict[str, Int32[Array, " N"]]) -> sampling.SampleRows:
    def floats(name: str) -> Float32[Array, " N"]:
        return lax.bitcast_convert_type(fields[name], jnp.float32)

    return sampling.SampleRows(
        seed_lo=lax.bitcast_convert_type(fields["seed_lo"], jnp.uint32),
        seed_hi=lax.bitcast_convert_type(fields["seed_hi"], jnp.uint32),
        positions=fields["draw_positions"],
        inverse_temperature=floats("inverse_temperature"),
        top_p=floats("top_p"),
        top_k=fields["top_k"],
        is_greedy=fields["is_greedy"] != 0,
        suppressed_ids=fields["suppressed_ids"],
        forced_ids=fields["forced_ids"],
    )
