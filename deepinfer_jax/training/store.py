"""Checkpoints of a training run: everything that the next step needs, so that it continues with the same bits."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.training.optimise import TrainState

_FINAL, _DRAFT = "state", "state.new"


def save_state(state: TrainState, directory: str | Path) -> None:
    """Writes the state in the place of the last one; a process that ends meanwhile leaves the last one intact."""
    import orbax.checkpoint as ocp

    final, fresh = (Path(directory).absolute() / name for name in (_FINAL, _DRAFT))
    shutil.rmtree(fresh, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(fresh, _tree(state))
        checkpointer.wait_until_finished()
    shutil.rmtree(final, ignore_errors=True)
    fresh.rename(final)


def has_state(directory: str | Path) -> bool:
    """Whether a run has left a checkpoint here."""
    return any((Path(directory) / name).is_dir() for name in (_FINAL, _DRAFT))


def restore_state(directory: str | Path, like: TrainState) -> TrainState:
    """The saved state. `like`: a state of the same run's shapes. Raises ValueError where nothing was saved."""
    import orbax.checkpoint as ocp

    source = next((p for n in (_FINAL, _DRAFT) if (p := Path(directory).absolute() / n).is_dir()), None)
    if source is None:
        raise ValueError(f"{directory} holds no checkpoint of a run; give the folder of one, or start anew")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(source, jax.tree.map(_abstract, _tree(like)))
    # Not bound to a device, as the arrays of a new run are: one compiled step serves both.
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(np.asarray(array)) for array in tree])


def _tree(state: TrainState) -> list[jax.Array]:
    """The arrays in order: the optimiser's own containers need no names on disk."""
    return jax.tree.leaves(state)


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
