"""The training step of the backbone: next tokens, and indexers that learn where attention looks."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from deepinfer_jax.training.forward import run_sequences
from deepinfer_jax.training.loss import token_losses
from deepinfer_jax.training.numerics import TrainingConfig
from deepinfer_jax.training.optimise import Measured
from deepinfer_jax.training.weights import Fixed, Masters, training_params

INDEX_WEIGHT = 0.3  # of the indexers' loss, which shares no parameter with the other one


def backbone_loss(
    masters: Masters,
    fixed: Fixed,
    rows: Int[Array, "B R1"],
    *,
    config: TrainingConfig,
    strength: Float32[Array, ""],
) -> tuple[Float32[Array, ""], Measured]:
    """Mean loss of a batch of rows of R + 1 tokens: each predicts the one behind it."""
    params = training_params(masters, fixed, config.model, strength=strength)
    output = run_sequences(params, rows[:, :-1], config=config, strength=strength)
    nats = jnp.mean(token_losses(output.logits, rows[:, 1:]))
    values = {"nats_per_token": nats, "index_distance": output.index_loss}
    return nats + INDEX_WEIGHT * output.index_loss, Measured(loads={"moe.bias": output.loads}, values=values)


def row_losses(
    masters: Masters,
    fixed: Fixed,
    rows: Int[Array, "B R1"],
    *,
    config: TrainingConfig,
    strength: Float32[Array, ""],
) -> Float32[Array, "B R"]:
    """Loss of every position in nats, for held-out rows."""
    params = training_params(masters, fixed, config.model, strength=strength)
    output = run_sequences(params, rows[:, :-1], config=config, strength=strength)
    return token_losses(output.logits, rows[:, 1:])
