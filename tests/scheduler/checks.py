"""What must hold for every plan, and between any two calls of the scheduler."""

from deepinfer_jax.scheduler.plan import Plan, RankPlan
from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.prefix import Node
from deepinfer_jax.scheduler.rank import Rank
from deepinfer_jax.scheduler.scheduler import Scheduler


def check_plan(plan: Plan, config: SchedulerConfig) -> None:
    """Budgets and kinds."""
    ids = [chunk.sequence.request_id for chunk in plan.chunks]
    assert ids and len(set(ids)) == len(ids)
    assert not any(chunk.is_stale for chunk in plan.chunks)
    for part in plan.ranks:
        assert part.num_rows <= config.max_num_batched_tokens
        _check_part(part, plan.is_prefill, config)


def _check_part(part: RankPlan, is_prefill: bool, config: SchedulerConfig) -> None:
    assert all(chunk.length > 0 and chunk.end <= config.max_model_len for chunk in part.chunks)
    if not is_prefill:
        assert all(chunk.draws and chunk.length <= config.max_decode_rows for chunk in part.chunks)
        return
    assert len(part.chunks) <= config.max_prompts
    assert len(part.chunks) <= 1 or sum(chunk.end for chunk in part.chunks) <= config.prefill_max_key_tokens
    arrivals = [chunk.sequence.arrival for chunk in part.chunks]
    assert arrivals == sorted(arrivals)
    for chunk in part.chunks:
        assert chunk.draws == (chunk.end == chunk.sequence.prefill_len)
        assert chunk.draws or (config.is_chunked and chunk.end % config.chunk_multiple == 0)


def check_invariants(scheduler: Scheduler) -> None:
    """Who holds what adds up."""
    config = scheduler.config
    assert scheduler.num_unfinished == sum(rank.num_unfinished for rank in scheduler.ranks)
    for rank in scheduler.ranks:
        holders, num_used = _count_holders(rank)
        assert (rank.num_pages_used, rank.pages.num_used) == (num_used, config.num_pages - holders.count(0))
        assert holders == [rank.pages.num_holders(page) for page in range(config.num_pages)]
        assert rank.pages.num_free == holders.count(0)
        slots = {sequence.slot for sequence in rank.running}
        assert len(slots) == len(rank.running) == rank.states.num_used <= config.max_num_seqs
        assert -1 not in slots and not slots & rank.states.quarantined
        assert rank.states.num_free + len(slots) + len(rank.states.quarantined) == config.num_slots
        assert all(sequence.slot == -1 and not sequence.pages for sequence in rank.waiting)
        for queue in (rank.waiting, rank.running):
            arrivals = [sequence.arrival for sequence in queue]
            assert arrivals == sorted(arrivals)
        _check_prefix(rank, config)
        _check_table(rank.page_table.tolist(), {sequence.slot: sequence.pages for sequence in rank.running})


def _count_holders(rank: Rank) -> tuple[list[int], int]:
    """How often requests and the prefix cache hold each page, and how many pages requests hold."""
    holders = [0] * rank.pages.num_pages
    for sequence in rank.running:
        assert len(set(sequence.pages)) == len(sequence.pages)
        for page in sequence.pages:
            holders[page] += 1
    num_used = len(holders) - holders.count(0)
    snapshots = []
    nodes = [rank.prefix.root]
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children.values())
        snapshots.extend(node.snapshots)
        assert all(child.parent is node and child.tokens == key for key, child in node.children.items())
        if node is not rank.prefix.root:
            holders[node.page] += 1
    assert set(snapshots) == set(rank.prefix.snapshots) and len(snapshots) == len(rank.prefix.snapshots)
    for snapshot in snapshots:
        assert (snapshot.page >= 0) == bool(snapshot.remainder)
        if snapshot.remainder:
            holders[snapshot.page] += 1
    return holders, num_used


def _check_prefix(rank: Rank, config: SchedulerConfig) -> None:
    """Snapshot slots have one owner each, and what the cache alone holds can be had."""
    slots = [snapshot.slot for snapshot in rank.prefix.snapshots]
    assert len(set(slots)) == len(slots) <= config.num_snapshots
    assert all(config.num_slots <= slot < config.num_slots_with_snapshots for slot in slots)
    assert rank.prefix.source_slots <= set(range(config.num_slots))
    assert all(
        0 <= snapshot.length - config.page_tokens * _depth_of(snapshot.node) < config.page_tokens
        for snapshot in rank.prefix.snapshots
    )


def _depth_of(node: Node) -> int:
    return 0 if node.parent is None else 1 + _depth_of(node.parent)


def _check_table(table: list[list[int]], pages_of_slot: dict[int, list[int]]) -> None:
    for slot, row in enumerate(table):
        pages = pages_of_slot.get(slot, [])
        assert row == pages + [-1] * (len(row) - len(pages))
