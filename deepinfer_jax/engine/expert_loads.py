"""What the router's choices mean for the devices: the balance of the experts, told in intervals (spec: interface 9)."""

import dataclasses
import logging

import numpy as np
from jaxtyping import Int

from deepinfer_jax.scheduler import placement

NUM_SHOWN = 4  # experts that a line of the table names


_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadWatch:
    """How the balance is told."""

    interval: int  # steps of one statistic
    num_shards: int
    logs_table: bool  # whether each is logged as a table


class ExpertLoads:
    """Adds up the rows that chose each expert; at the end of an interval they become the statistic that is told."""

    def __init__(self, watch: LoadWatch) -> None:
        self._watch = watch
        self._sum: Int[np.ndarray, "N E"] | None = None
        self._num_steps = 0
        self._told: Int[np.ndarray, "N E"] | None = None  # of the last whole interval
        self._imbalance: list[float] = []

    def note(self, loads: Int[np.ndarray, "N E"], places: Int[np.ndarray, "N P"] | None) -> None:
        """Takes in one step. places: as in `ExpertBalancer`, None: experts never moved."""
        self._sum = loads.astype(np.int64) if self._sum is None else self._sum + loads
        self._num_steps += 1
        if self._num_steps < self._watch.interval:
            return
        self._told, self._sum, self._num_steps = self._sum, None, 0
        experts = np.arange(loads.shape[1])
        self._imbalance = [
            placement.imbalance(own[None], experts if places is None else places[i], num_shards=self._watch.num_shards)
            for i, own in enumerate(self._told)
        ]
        if self._watch.logs_table:
            _log.info("experts\n%s", self.table())

    def figures(self) -> dict[str, float | int]:
        """Of the last whole interval: rows times choices, and the fullest device over the mean; empty before it."""
        if self._told is None:
            return {}
        return {
            "expert_rows": int(self._told.sum()),
            "expert_imbalance_mean": float(np.mean(self._imbalance)),
            "expert_imbalance_max": float(np.max(self._imbalance)),
        }

    def table(self) -> str:
        """A line for each layer: balance of the devices, unused experts, the fullest experts with their share."""
        if self._told is None:
            return "no interval has ended"
        lines = ["layer  imbalance  unused  fullest experts (share of rows)"]
        for layer, (own, imbalance) in enumerate(zip(self._told, self._imbalance, strict=True)):
            order = np.argsort(-own, kind="stable")[:NUM_SHOWN]
            shares = own / max(1, own.sum())
            fullest = ", ".join(f"{expert} ({shares[expert]:.1%})" for expert in order)
            lines.append(f"{layer:5d}  {imbalance:9.2f}  {int((own == 0).sum()):6d}  {fullest}")
        return "\n".join(lines)
