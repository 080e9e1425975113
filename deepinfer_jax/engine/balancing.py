"""Expert balancing: counts of a window of steps, and new places when their time has come (spec: interface 9)."""

import dataclasses
from collections import deque

import numpy as np
from jaxtyping import Int

from deepinfer_jax.scheduler import placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalancePlan:
    """When and over what experts are placed anew.

    Raises ValueError for a window that is not within 1..interval.
    """

    interval: int  # counted steps from one placement to the next; the first comes after a quarter of it
    window: int  # steps whose counts decide
    num_shards: int
    places_per_shard: int
    counts_prefill: bool  # whether prefill steps count too

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.interval:
            raise ValueError(
                f"DEEPINFER_EXPERT_COUNT_WINDOW_SIZE={self.window} must be from 1 to "
                f"DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL={self.interval}; lower the window or raise the interval"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rearrangement:
    """New places of the experts of every layer."""

    sources: Int[np.ndarray, "N P"]  # see `placement.sources_of`
    table: Int[np.ndarray, "N E K"]  # see `placement.replica_table`
    places: Int[np.ndarray, "N P"]
    imbalance_before: float  # mean over the layers, on the counts that decided
    imbalance_after: float

    @property
    def num_moved(self) -> int:
        """Places that get another expert."""
        return int((self.sources >= 0).sum())


class ExpertBalancer:
    """Watches the loads and says where the experts should be; moves nothing itself."""

    def __init__(self, plan: BalancePlan, *, num_layers: int, num_experts: int) -> None:
        self.plan = plan
        num_places = plan.num_shards * plan.places_per_shard
        first = np.where(np.arange(num_places) < num_experts, np.arange(num_places), -1)
        self.places: Int[np.ndarray, "N P"] = np.tile(first, (num_layers, 1))
        self._num_experts = num_experts
        self._window: deque[Int[np.ndarray, "N E"]] = deque(maxlen=plan.window)
        self._left = max(1, plan.interval // 4)
        self.history: list[Rearrangement] = []

    @property
    def table_width(self) -> int:
        """Entries of an expert in the replica table."""
        spare = self.places.shape[1] - self._num_experts
        return min(placement.MAX_REPLICAS, 1 + spare)

    def table(self) -> Int[np.ndarray, "N E K"]:
        """The replica table of the present places."""
        return self._table_of(self.places)

    def note(self, loads: Int[np.ndarray, "N E"], *, is_prefill: bool) -> None:
        """Takes in the counts of one step."""
        if is_prefill and not self.plan.counts_prefill:
            return
        self._window.append(loads)
        self._left -= 1

    def due(self) -> Rearrangement | None:
        """New places, if it is time for them: once in an interval, from the steps that were noted."""
        if self._left > 0 or not self._window:
            return None
        self._left = self.plan.interval
        before = self.places
        loads = np.stack(self._window).astype(np.float64)
        after = np.stack([self._place(loads[:, layer], before[layer]) for layer in range(len(before))])
        layers = range(len(before))
        found = Rearrangement(
            sources=np.stack([placement.sources_of(before[i], after[i]) for i in layers]),
            table=self._table_of(after),
            places=after,
            imbalance_before=self._imbalance(loads, before),
            imbalance_after=self._imbalance(loads, after),
        )
        self.places = after
        self.history.append(found)
        return found

    def _place(self, loads: np.ndarray, before: np.ndarray) -> np.ndarray:
        plan = self.plan
        counts = placement.count_replicas(loads, before.shape[0])
        placed = placement.place_replicas(loads, counts, num_shards=plan.num_shards, capacity=plan.places_per_shard)
        return placement.settle(placed, before, capacity=plan.places_per_shard)

    def _table_of(self, places: np.ndarray) -> Int[np.ndarray, "N E K"]:
        return np.stack([placement.replica_table(own, self._num_experts, self.table_width) for own in places])

    def _imbalance(self, loads: np.ndarray, places: np.ndarray) -> float:
        shards = self.plan.num_shards
        return float(
            np.mean([placement.imbalance(loads[:, i], own, num_shards=shards) for i, own in enumerate(places)])
        )
