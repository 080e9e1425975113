"""The compiled steps on one device, with the interface of `engine/mesh_steps.py`: one rank, and no axis for it."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np

from deepinfer_jax.engine import steps
from deepinfer_jax.engine.buckets import StepShape
from deepinfer_jax.engine.steps import Carried
from deepinfer_jax.model.state import State
from deepinfer_jax.scheduler.batching import without_images


class OneDeviceSteps:
    """The functions of `engine/steps.py` that an engine runs, for one device."""

    num_ranks = 1
    run_step = staticmethod(steps.run_step)
    run_forward = staticmethod(steps.run_forward)
    copy_states = staticmethod(steps.copy_states)
    best_tokens = staticmethod(steps.best_tokens)

    def __init__(self, device: Any) -> None:
        self._device = device

    def place(self, by_rank: Any) -> Any:
        """The one rank's host arrays; a jitted call takes them along."""
        [own] = by_rank
        return own

    def run_sampling(
        self, params: Any, carried: Carried, logits: Any, features: Any, packed: Any, masks: Any, **static: Any
    ) -> Any:
        """See `steps.run_sampling`. Draws know nothing of images: steps with and without them share a program."""
        shape: StepShape = static["shape"]
        if shape.has_images:
            max_drafts = static["speculation"].max_drafts
            packed = without_images(
                packed, num_chunks=shape.num_chunks, num_tokens=shape.num_rows, max_drafts=max_drafts
            )
            static |= {"shape": dataclasses.replace(shape, has_images=False)}
        return steps.run_sampling(params, carried, logits, features, packed, masks, **static)

    def blank(self, make: Any) -> Carried:
        """What `make()` makes."""
        with self.on_device():
            return make()

    def shared(self, make: Any) -> Any:
        """The array that `make()` makes, which all ranks read."""
        with self.on_device():
            return make()

    def by_rank(self, told: Any) -> Any:
        """Results that were fetched to the host, with a leading axis of ranks."""
        return jax.tree.map(lambda leaf: leaf[None], told)

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Where arrays that a step takes are made."""
        return jax.default_device(self._device)

    def read_request(self, state: State, slot: int, pages: Any, rank: int) -> State:
        """See `steps.read_request`; on the host. Waits for all launched steps."""
        return jax.device_get(steps.read_request(state, np.int32(slot), pages))

    def write_request(self, carried: Carried, request: State, slot: int, pages: Any, rank: int) -> Carried:
        """See `steps.write_request`."""
        return steps.write_request(carried, request, np.int32(slot), pages)
