"""Where training starts: random master weights, flat norms, and streams that differ from the first step on."""

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.draft_params import param_schema
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import DRAFT_PREFIX
from deepinfer_jax.training.weights import TOKEN_MAP, Fixed, Masters, is_fixed, trained_specs

EMBED_SIZE = 0.5  # standard deviation of an embedding; sublayers add values of order 0.1 to it
OUT_GAIN = 0.25  # of the matrices that write to the streams, against 1 / sqrt(input width)
HEAD_GAIN = 0.3  # first logits are nearly even
MIX_SCALE = 0.1  # how far the mHC mixes of a row leave their biases at first
OWN_STREAM, OTHER_STREAM = 0.0, -2.0  # biases of the pre-mix: sigmoid gives 0.5 and 0.12
KEPT_STREAM = 4.0  # bias of the diagonal of the stream mixture: the softmax of a row of four gives 0.95

_OUT_NAMES = ("wo_b", "w2")


def initial_masters(config: ModelConfig, *, seed: int, with_draft: bool = False) -> Masters:
    """Seeded masters of the backbone, or of the draft stages; equal seeds give equal bits on every machine."""
    return {
        spec.path: jnp.asarray(_initial(spec, np.random.default_rng([seed, number]), config))
        for number, spec in enumerate(trained_specs(config, with_draft=with_draft))
    }


def initial_fixed(config: ModelConfig, token_map: np.ndarray | None = None) -> Fixed:
    """Router biases of zero, and the Engram token map: of the backbone with one, else of the draft stages."""
    with_draft = token_map is None
    fixed: Fixed = {
        s.path: jnp.zeros(s.shape, jnp.float32)
        for s in param_schema(config, with_draft=with_draft)
        if is_fixed(s.path) and s.path != TOKEN_MAP and s.path.startswith(DRAFT_PREFIX) == with_draft
    }
    if token_map is not None:
        fixed[TOKEN_MAP] = jnp.asarray(token_map)
    return fixed


def _initial(spec: LeafSpec, rng: np.random.Generator, config: ModelConfig) -> np.ndarray:
    name = spec.path.rsplit(".", 1)[-1]
    if name.endswith("norm") or name in ("q_weight", "k_weight"):
        return np.ones(spec.shape, np.float32)
    if name == "attn_sink":
        return np.zeros(spec.shape, np.float32)
    if name == "scale":
        return np.full(spec.shape, MIX_SCALE, np.float32)
    if name == "base":
        return _mix_biases(spec, config.hc_mult)
    gain = 1.0 / np.sqrt(spec.shape[-1])
    if name == "embed":
        gain = EMBED_SIZE
    elif name in _OUT_NAMES:
        gain *= OUT_GAIN
    elif name == "head":
        gain *= HEAD_GAIN
    return rng.standard_normal(spec.shape, np.float32) * np.float32(gain)


def _mix_biases(spec: LeafSpec, streams: int) -> np.ndarray:
    """[pre | post | comb] of each layer: a sublayer reads mostly one stream, in turn, and writes to all."""
    layers = spec.shape[0]
    second = int(".hc_ffn." in f".{spec.path}")
    own = (2 * np.arange(layers)[:, None] + second) % streams == np.arange(streams)[None, :]
    pre = np.where(own, OWN_STREAM, OTHER_STREAM)
    post = np.zeros((layers, streams))
    comb = np.broadcast_to(KEPT_STREAM * np.eye(streams).reshape(-1), (layers, streams * streams))
    return np.concatenate([pre, post, comb], axis=1).astype(np.float32)
