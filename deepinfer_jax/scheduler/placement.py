"""Where the experts of a layer are: how many replicas each has, and on which device (spec: interface 9).

Loads are those of a window of steps: [W, E], rows that chose each expert. What is made small is the sum over the steps
of the largest load, of a replica and then of a device, since the fullest one is what a step waits for.
"""

import numpy as np
from jaxtyping import Float, Int, Real

MAX_REPLICAS = 12  # places of one expert; a row of the replica table has so many entries


def count_replicas(loads: Float[np.ndarray, "W E"], num_places: int) -> Int[np.ndarray, " E"]:
    """How many of the places each expert gets: one, and spare ones where they lower the largest replica's load most.

    The lowest expert wins a tie. Fewer than `num_places` where every expert has `MAX_REPLICAS`. Raises ValueError for
    fewer places than experts.
    """
    num_experts = loads.shape[1]
    if num_places < num_experts:
        raise ValueError(f"num_places={num_places} is below {num_experts}, the number of experts; add places")
    counts = np.ones(num_experts, np.int64)
    shares = loads.astype(np.float64)
    for _ in range(num_places - num_experts):
        eased = loads / (counts + 1)
        largest = np.max(_largest_of_others(shares, eased), axis=0)  # over the two terms: others, and itself eased
        totals = np.where(counts < MAX_REPLICAS, largest.sum(axis=0), np.inf)
        best = int(np.argmin(totals))
        if np.isinf(totals[best]):
            break
        counts[best] += 1
        shares[:, best] = eased[:, best]
    return counts


def _largest_of_others(
    shares: Float[np.ndarray, "W E"], eased: Float[np.ndarray, "W E"]
) -> Float[np.ndarray, "two W E"]:
    """For each step and expert: the largest share among the other experts, and its own with one more replica."""
    num_steps, num_experts = shares.shape
    if num_experts == 1:
        return np.stack([np.zeros_like(eased), eased])
    top = np.argpartition(shares, num_experts - 2, axis=1)[:, -2:]
    values = np.take_along_axis(shares, top, axis=1)
    first, second = np.max(values, axis=1), np.min(values, axis=1)
    at = top[np.arange(num_steps), np.argmax(values, axis=1)]
    others = np.repeat(first[:, None], num_experts, axis=1)
    others[np.arange(num_steps), at] = second
    return np.stack([others, eased])


def place_replicas(
    loads: Float[np.ndarray, "W E"], counts: Int[np.ndarray, " E"], *, num_shards: int, capacity: int
) -> list[list[int]]:
    """The experts of each device: replicas in falling order of load, each where the fullest device stays smallest.

    The lowest device wins a tie; no device gets more than `capacity`. Raises ValueError for more replicas than places.
    """
    if counts.sum() > num_shards * capacity:
        raise ValueError(
            f"{counts.sum()} replicas do not fit {num_shards} devices of {capacity} places; give fewer replicas"
        )
    shares = loads / counts
    replicas = np.repeat(np.arange(len(counts)), counts)
    order = replicas[np.argsort(-shares.sum(axis=0)[replicas], kind="stable")]
    device_loads = np.zeros((loads.shape[0], num_shards))
    placed: list[list[int]] = [[] for _ in range(num_shards)]
    for expert in order.tolist():
        fuller = device_loads + shares[:, expert, None]
        totals = np.maximum(device_loads.max(axis=1, keepdims=True), fuller).sum(axis=0)
        totals[[len(own) >= capacity for own in placed]] = np.inf
        device = int(np.argmin(totals))
        placed[device].append(expert)
        device_loads[:, device] = fuller[:, device]
    return placed


def settle(placed: list[list[int]], before: Int[np.ndarray, " P"], *, capacity: int) -> Int[np.ndarray, " P"]:
    """The expert of every place, -1 for none: an expert that its device has already keeps its place."""
    after = np.full(len(before), -1, np.int64)
    for device, wanted in enumerate(placed):
        start, left = device * capacity, list(wanted)
        for place in range(start, start + capacity):
            if before[place] in left:
                after[place] = before[place]
                left.remove(int(before[place]))
        free = [place for place in range(start, start + capacity) if after[place] < 0]
        after[free[: len(left)]] = left
    return after


def replica_table(places: Int[np.ndarray, " P"], num_experts: int, width: int) -> Int[np.ndarray, "E K"]:
    """The places of each expert, repeated in turn to `width`. Raises ValueError for an expert that has none."""
    table = np.empty((num_experts, width), np.int32)
    for expert in range(num_experts):
        own = np.flatnonzero(places == expert)
        if not len(own):
            raise ValueError(f"expert {expert} has no place; every expert needs one")
        table[expert] = np.resize(own, width)
    return table


def sources_of(before: Int[np.ndarray, " P"], after: Int[np.ndarray, " P"]) -> Int[np.ndarray, " P"]:
    """For each place the place that its new expert comes from; -1 where nothing moves."""
    moves = (after != before) & (after >= 0)
    first = {int(expert): place for place, expert in reversed(list(enumerate(before.tolist())))}
    return np.array([first[int(e)] if m else -1 for e, m in zip(after, moves, strict=True)], np.int32)


def imbalance(loads: Real[np.ndarray, "W E"], places: Int[np.ndarray, " P"], *, num_shards: int) -> float:
    """The fullest device's rows over the mean, of all steps together weighted by their rows; 1.0 is even."""
    counts = np.bincount(places[places >= 0], minlength=loads.shape[1])
    shares = np.concatenate([loads / np.maximum(counts, 1), np.zeros((loads.shape[0], 1))], axis=1)
    by_device = shares[:, places].reshape(loads.shape[0], num_shards, -1).sum(axis=2)
    total = float(loads.sum())
    return float(by_device.max(axis=1).sum() * num_shards / total) if total else 1.0
