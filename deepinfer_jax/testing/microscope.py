"""Where the tensors of one request first differ between two situations: layer, stage, element, distance in ulps.

The request's tokens run through `forward` twice, alone and in other company or in other steps, with every stage
captured. In batch-invariant mode nothing may differ; where something does, `look` names the first stage, which is the
reduction at fault or the first one behind it.

    finding = look(engine.params, token_ids, config=engine.runtime)
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import init_state
from deepinfer_jax.testing.compare import ulp_distances

BLOCK = 64  # rows that are compared at once; every chunk divides it
NOTHING = "no tensor of one forward differs: the cause is in a state, in sampling, or in a situation that is not tried"
_FIRST_TOKEN = 3  # of neighbours: behind BOS, EOS and padding
# Stages of a forward in the order in which they are computed: in front of the layers, of a layer, behind all layers.
FRONT = ("embed",)
IN_LAYER = (
    *("engram_in", "engram_rows", "engram_out"),
    *("stream_in", "pre_mix_in", "hc_attn_pre", "hc_attn_post", "hc_attn_comb"),
    *("attn_in", "q_latent", "window_kv"),
    *("compress_pairs", "compress_latent", "compress_kv", "index_k"),
    *("index_q", "index_weight", "index_score", "topk_margin", "candidate_margin", "topk_idxs", "candidate_mask"),
    *("attn_out", "stream_mid", "hc_ffn_pre", "hc_ffn_post", "hc_ffn_comb"),
    *("ffn_in", "router_scores", "router_ids", "router_weights", "shared_expert_out"),
    *("ffn_out", "stream_out", "pre_mix_out"),
)
BEHIND = ("main_hidden", "final_hidden", "logits")

type Stages = dict[str, np.ndarray]  # stage name -> rows, by position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """How the rows of a request come to the network."""

    name: str
    chunk: int = BLOCK  # rows of the request in one step
    before: int = 0  # neighbours in front of it, each with one row in a step
    after: int = 0  # neighbours behind it

    def __post_init__(self) -> None:
        if self.chunk < 1 or BLOCK % self.chunk or min(self.before, self.after) < 0:
            raise ValueError(
                f"chunk={self.chunk} must divide {BLOCK}, and before={self.before} and after={self.after} must not be "
                "negative"
            )


ALONE = Situation(name="alone")
SITUATIONS = (
    Situation(name="in steps of 8 rows", chunk=8),
    Situation(name="behind 3 neighbours", before=3),
    Situation(name="in steps of 8 rows among 40 neighbours", chunk=8, before=20, after=20),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The first element that is not the same."""

    situation: str
    position: int  # of the row
    stage: str  # as in `forward(capture=...)`
    element: tuple[int, ...]  # within the row
    got: float
    want: float  # alone
    ulps: int | None  # steps between neighbouring values of the dtype; None for ids and masks
    num_different: int  # elements of the row in this stage
    num_values: int

    @property
    def layer(self) -> int | None:
        """The layer, None in front of and behind all layers."""
        return int(self.stage.split(".")[1]) if self.stage.startswith("layers.") else None

    def __str__(self) -> str:
        distance = "" if self.ulps is None else f", {self.ulps} ulp apart"
        where = "no layer" if self.layer is None else f"layer {self.layer}"
        return (
            f"{self.situation}: position {self.position}, {where}, {self.stage}{list(self.element)}: {self.got!r}; "
            f"alone {self.want!r}{distance}; {self.num_different} of {self.num_values} values of this row differ"
        )


def look(
    params: Params,
    tokens: Sequence[int] | np.ndarray,
    *,
    config: RuntimeConfig,
    situations: Sequence[Situation] = SITUATIONS,
    reference: Situation = ALONE,
) -> Finding | None:
    """The first difference between the reference and one of the situations, None where no bit differs.

    tokens: of one request, images left out. Situations are tried in order, and each is left at its first difference.
    """
    for situation in situations:
        pairs = zip(
            _blocks(params, tokens, reference, config=config),
            _blocks(params, tokens, situation, config=config),
            strict=True,
        )
        for first, (want, got) in zip(itertools.count(0, BLOCK), pairs):
            finding = first_difference(got, want, situation=situation.name, first_position=first)
            if finding is not None:
                return finding
    return None


def capture_rows(
    params: Params,
    tokens: Sequence[int] | np.ndarray,
    situation: Situation = ALONE,
    *,
    config: RuntimeConfig,
    capture: tuple[str, ...] = ("*",),
) -> Stages:
    """Stages of a request's rows by position, and its logits, in one situation; capture: patterns of stage names."""
    blocks = list(_blocks(params, tokens, situation, config=config, capture=capture))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def first_difference(
    got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], *, situation: str, first_position: int = 0
) -> Finding | None:
    """The lowest position at which a stage differs in a bit, and of its stages the one that is computed first.

    Raises ValueError unless both have the same stages, of the same shapes and dtypes.
    """
    if got.keys() != want.keys():
        raise ValueError(f"stages {sorted(got.keys() ^ want.keys())} are on one side only; capture the same ones")
    found: list[tuple[int, tuple[int, int], str]] = []
    for name, values in want.items():
        rows = np.flatnonzero(_differs(got[name], values, name).any(axis=1))
        if len(rows):
            found.append((int(rows[0]), stage_order(name), name))
    if not found:
        return None
    row, _, stage = min(found)
    mine, other = got[stage][row], want[stage][row]
    differs = _differs(mine[None], other[None], stage)[0]
    at = np.unravel_index(int(np.argmax(differs)), mine.shape)
    is_float = jnp.issubdtype(mine.dtype, jnp.floating)
    return Finding(
        situation=situation,
        position=first_position + row,
        stage=stage,
        element=tuple(int(index) for index in at),
        got=float(mine[at]),
        want=float(other[at]),
        ulps=int(ulp_distances(mine[at], other[at])) if is_float else None,
        num_different=int(differs.sum()),
        num_values=mine.size,
    )


def stage_order(name: str) -> tuple[int, int]:
    """Sorts stages as they are computed. Raises ValueError for a name that is no stage of a forward."""
    layer, leaf = -1, name
    order: tuple[str, ...] = FRONT
    if name.startswith("layers."):
        _, number, leaf = name.split(".")
        layer, order = int(number), IN_LAYER
    elif name in BEHIND:
        layer, order = np.iinfo(np.int32).max, BEHIND
    if leaf not in order:
        raise ValueError(f"{name!r} is no stage of a forward; layers have {', '.join(IN_LAYER)}")
    return layer, order.index(leaf)


def _differs(got: np.ndarray, want: np.ndarray, name: str) -> np.ndarray:
    """Which elements of each row differ in a bit, bool [rows, elements]."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(f"{name}: {got.dtype}{list(got.shape)} and {want.dtype}{list(want.shape)} cannot be compared")
    shape = (len(want), math.prod(want.shape[1:]), want.dtype.itemsize)
    mine, other = (np.frombuffer(a.tobytes(), np.uint8).reshape(shape) for a in (got, want))
    return (mine != other).any(axis=2)


def _blocks(
    params: Params,
    tokens: Sequence[int] | np.ndarray,
    situation: Situation,
    *,
    config: RuntimeConfig,
    capture: tuple[str, ...] = ("*",),
) -> Iterator[Stages]:
    """The stages of every `BLOCK` positions of a request, the last block cut to its rows.

    Behind the end rows of token 0 fill the last step, so that all steps of a situation have one shape.
    """
    ids = np.asarray(tokens, np.int32)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"tokens of shape {ids.shape} are not the tokens of one request; give one list, not empty")
    padded = np.pad(ids, (0, -len(ids) % BLOCK))
    others = situation.before + situation.after
    num_pages = len(padded) // config.page_tokens + 1
    state = init_state(config, num_slots=1 + others, num_pages=(1 + others) * num_pages)
    table = np.arange((1 + others) * num_pages, dtype=np.int32).reshape(1 + others, num_pages)
    company = (
        np.random.default_rng(others).integers(_FIRST_TOKEN, config.model.vocab_size, (len(padded), others)).tolist()
    )
    step = _compiled(config, capture)
    parts: list[Stages] = []
    for number, start in enumerate(range(0, len(padded), situation.chunk)):
        own = padded[start : start + situation.chunk].tolist()
        beside = [[token] for token in company[number]]
        chunks = [*beside[: situation.before], own, *beside[situation.before :]]
        starts = [number] * situation.before + [start] + [number] * situation.after
        batch = make_batch(chunks, starts=starts, slots=list(range(1 + others)), page_table=table, logits="all")
        output, state = step(params, state, batch)
        rows = slice(situation.before, situation.before + situation.chunk)
        stages = output.stages | {"logits": output.logits}
        parts.append({name: np.asarray(value)[rows] for name, value in stages.items()})
        end = start + situation.chunk
        if end % BLOCK == 0:
            kept = BLOCK - max(0, end - len(ids))
            yield {name: np.concatenate([part[name] for part in parts])[:kept] for name in parts[0]}
            parts = []


@functools.cache
def _compiled(config: RuntimeConfig, capture: tuple[str, ...]) -> Any:
    step = functools.partial(forward, config=config, capture=capture)
    return jax.jit(step, donate_argnames=("state",), compiler_options={"xla_allow_excess_precision": False})
