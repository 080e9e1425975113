"""Known prefixes of one rank: which pages, and which state, a new request can take over instead of computing them.

A tree of full pages: a child of a node is found by its exact tokens, so nothing is taken for something else; the tokens
of an image are a digest of what it shows. Each node holds one page. The positions in front of p never change in a page
whose owner goes on behind p, so the cache may hold pages that a running request still fills; whoever goes on in the
middle of a page copies it first.

exact: a page alone is not enough, the rings have to be right too. Snapshots hang on the nodes: a state slot of their
own, and the tokens and the page behind the last full one. What a hit gives is what computing would give.
replay: pages only. The rings are filled by computing some known positions again, which is nearly the same.

When a state can be saved and used (plan n stands for its copies, then its rows):
- A mark that is made with plan n, or while it is the last one, queues a copy for plan n + 1: behind the rows of n.
- Until then no row can change the source slot. If its request has ended, its next user comes with plan n + 1 at the
  earliest: as the target of a copy (all copies read first) or with rows (behind the copies). A state that is written
  outside of plans (an adoption) must avoid `source_slots`.
- A snapshot is found once plan n has been read: a plan that breaks leaves nothing behind. While its copy is queued, a
  hit reads where that copy reads.
- A snapshot that goes may have been found by the same plan: a new one in its slot is written by a later plan, and a
  new owner of its pages writes behind that plan's reads.
"""

import dataclasses
from collections import OrderedDict, abc
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.scheduler.pages import PageAllocator
from deepinfer_jax.scheduler.policy import Counters, SchedulerConfig
from deepinfer_jax.scheduler.sequence import Copy, Sequence


@dataclasses.dataclass(kw_only=True, eq=False)
class Node:
    """A full page behind its parent's."""

    parent: "Node | None"  # None: the root, which has no page
    tokens: tuple[int, ...]
    page: int
    step: int  # the page is there once this step was read; -1: it is
    children: "dict[tuple[int, ...], Node]" = dataclasses.field(default_factory=dict)
    snapshots: "list[Snapshot]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True, eq=False)
class Snapshot:
    """The state behind a node's tokens and those of the remainder, which is less than a page."""

    node: Node
    remainder: tuple[int, ...]
    page: int  # holds the remainder; -1 if there is none
    length: int  # tokens in all
    state_end: int  # positions that the rings have seen
    slot: int
    step: int  # computes its last rows: it can be used once this was read; -1: it can
    last_use: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """What a request takes over."""

    position: int  # its first row to compute
    nodes: tuple[Node, ...]  # whose pages it shares
    snapshot: Snapshot | None = None  # None: its rings are empty at `position`
    source_slot: int = -1  # where the state of the snapshot is
    source_page: int = -1  # the page that `position` is in the middle of


class PrefixCache:
    """The tree, the snapshots, and what they hold. The least recently used goes first.

    Pages that nobody else holds are as good as free: whoever needs them calls `evict` until there are enough. It
    takes snapshots whose copy is still queued last, and cancels the copy.
    """

    def __init__(self, config: SchedulerConfig, pages: PageAllocator, counters: Counters) -> None:
        self._config, self._pages, self._counters = config, pages, counters
        self.root = Node(parent=None, tokens=(), page=-1, step=-1)
        self.snapshots: list[Snapshot] = []
        self._queue: dict[Snapshot, Copy] = {}  # copies of the next plan
        self._free_slots: list[int] = []
        self._holds: Int32[np.ndarray, " P"] = np.zeros(config.num_pages, np.int32)  # how often each page is held here
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # by last use; a child is in front of its parent
        self._clock = 0
        self.clear()

    @property
    def num_pages_cached(self) -> int:
        """Pages that are held here and nowhere else."""
        if not self._nodes and not self.snapshots:
            return 0
        return int(np.count_nonzero((self._holds > 0) & (self._holds == self._pages.holders)))

    @property
    def source_slots(self) -> frozenset[int]:
        """Slots of requests whose state the next plan saves."""
        return frozenset(copy.source_slot for copy in self._queue.values())

    def is_queued(self, snapshot: Snapshot) -> bool:
        """Whether its copy is not in a plan yet."""
        return snapshot in self._queue

    def take_saves(self) -> tuple[Copy, ...]:
        """The copies of the plan that is made now."""
        saves = tuple(self._queue.values())
        self._queue.clear()
        self._counters.snapshots_saved += len(saves)
        return saves

    def clear(self) -> None:
        """Forgets everything, and cancels the copies that are queued."""
        for page in np.flatnonzero(self._holds).tolist():
            while self._holds[page]:
                self._release(page)
        self.root.children.clear()
        self.root.snapshots.clear()
        self.snapshots.clear()
        self._queue.clear()
        self._nodes.clear()
        first = self._config.num_slots
        self._free_slots = list(range(first, first + self._config.num_snapshots))[::-1]

    # Finding.

    def look_up(self, sequence: Sequence, *, last_read: int) -> Hit | None:
        """The most that a waiting request can take over; None if that is nothing. Sets its branch point."""
        config = self._config
        limit = sequence.prefill_len - 1  # one row draws
        if config.has_tails:
            limit = min(limit, sequence.tail_start)
        limit = sequence.outside_images(limit)
        tokens = sequence.cache_tokens(sequence.prefill_len)
        path = self._match(tokens)
        if config.prefix_mode == "replay":
            return self._find_pages(sequence, path, limit, last_read)
        hit = self._find_snapshot(path, tokens, limit, last_read)
        num_known = sequence.outside_images(len(path) * config.page_tokens)
        sequence.branch_point = num_known if hit is None or num_known > hit.position else 0
        return hit

    def use(self, hit: Hit) -> None:
        """Notes that a request has taken this over."""
        self._touch_nodes(hit.nodes)
        if hit.snapshot is not None:
            self._touch(hit.snapshot)

    def _match(self, tokens: abc.Sequence[int]) -> list[Node]:
        """The nodes along these tokens."""
        size, node, path = self._config.page_tokens, self.root, []
        for start in range(0, len(tokens) - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(node := child)
        return path

    def _find_pages(self, sequence: Sequence, path: list[Node], limit: int, last_read: int) -> Hit | None:
        """Mode replay: full pages that are there, less the rows that fill the rings, up to a bound of no image."""
        size, num_there = self._config.page_tokens, 0
        while num_there < len(path) and path[num_there].step <= last_read:
            num_there += 1
        num_known = min(num_there, limit // size)
        num_shared = (num_known * size - self._config.replay_rows) // size
        while num_shared > 0 and (start := sequence.outside_images(num_shared * size)) < num_shared * size:
            num_shared = start // size
        if num_shared <= 0:
            return None
        return Hit(position=num_shared * size, nodes=tuple(path[:num_shared]))

    def _find_snapshot(self, path: list[Node], tokens: abc.Sequence[int], limit: int, last_read: int) -> Hit | None:
        """Mode exact: the snapshot that goes furthest; of equals the one that was used last."""
        best: tuple[int, int] = (0, 0)
        found: Snapshot | None = None
        for snapshot, num_common in self._candidates(path, tokens):
            position = min(snapshot.length, num_common, limit)
            is_valid = position >= snapshot.state_end - self._config.rollback_tokens
            merit = (position, snapshot.last_use)
            if position > 0 and is_valid and snapshot.step <= last_read and merit > best:
                best, found = merit, snapshot
        if found is None:
            return None
        position = best[0]
        nodes = _path_to(found.node)
        pages = [*(node.page for node in nodes), found.page]
        num_shared, num_partial = divmod(position, self._config.page_tokens)
        return Hit(
            position=position,
            nodes=tuple(nodes[:num_shared]),
            snapshot=found,
            source_slot=self._queue[found].source_slot if self.is_queued(found) else found.slot,
            source_page=pages[num_shared] if num_partial else -1,
        )

    def _candidates(self, path: list[Node], tokens: abc.Sequence[int]) -> Iterator[tuple[Snapshot, int]]:
        """Snapshots along the path and those that go beyond it by no more than the rings reach back.

        With each the number of its tokens that are the same.
        """
        size = self._config.page_tokens
        for depth, node in enumerate((self.root, *path)):
            rest = tokens[depth * size : (depth + 1) * size]
            for snapshot in node.snapshots:
                yield snapshot, depth * size + _num_common(snapshot.remainder, rest)
        depth = len(path)
        rest = tokens[depth * size : (depth + 1) * size]
        for child in (path[-1] if path else self.root).children.values():
            if rest and child.tokens[0] == rest[0]:
                num_common = depth * size + _num_common(child.tokens, rest)
                for snapshot in self._snapshots_below(child, depth + 1, num_common + self._config.rollback_tokens):
                    yield snapshot, num_common

    def _snapshots_below(self, node: Node, depth: int, max_len: int) -> Iterator[Snapshot]:
        """Snapshots of a node and its descendants, of pages within max_len."""
        if depth * self._config.page_tokens <= max_len:
            yield from node.snapshots
            for child in node.children.values():
                yield from self._snapshots_below(child, depth + 1, max_len)

    # Keeping.

    def keep(self, sequence: Sequence, length: int, *, step: int) -> None:
        """A mark: keeps the first `length` tokens of a running request, whose rows this step computes; -1: are read.

        Nothing is kept if the state has gone too far, or if every snapshot slot waits for its copy.
        """
        config = self._config
        tokens = sequence.cache_tokens(length)
        if config.prefix_mode == "replay":
            self._touch_nodes(self._insert(tokens, sequence.pages, step))
            return
        num_full = length // config.page_tokens
        remainder = tuple(tokens[num_full * config.page_tokens :])
        if sequence.state_end - length > config.rollback_tokens:
            return
        path = self._match(tokens)
        if len(path) == num_full:
            for snapshot in (path[-1] if path else self.root).snapshots:
                if snapshot.remainder == remainder and snapshot.state_end <= sequence.state_end:
                    self._touch(snapshot)
                    return
        if not self._free_slots and not self._evict_snapshot():
            return
        path = self._insert(tokens, sequence.pages, step)
        snapshot = Snapshot(
            node=path[-1] if path else self.root,
            remainder=remainder,
            page=sequence.pages[num_full] if remainder else -1,
            length=length,
            state_end=sequence.state_end,
            slot=self._free_slots.pop(),
            step=step,
            last_use=0,
        )
        if remainder:
            self._hold(snapshot.page)
        snapshot.node.snapshots.append(snapshot)
        self.snapshots.append(snapshot)
        self._queue[snapshot] = Copy(sequence.slot, snapshot.slot)
        self._touch(snapshot)

    def _insert(self, tokens: abc.Sequence[int], pages: list[int], step: int) -> list[Node]:
        """The nodes of these tokens; those that were there keep their pages."""
        size, path = self._config.page_tokens, self._match(tokens)
        node = path[-1] if path else self.root
        for index in range(len(path), len(tokens) // size):
            key = tuple(tokens[index * size : (index + 1) * size])
            child = Node(parent=node, tokens=key, page=pages[index], step=step)
            self._hold(child.page)
            node.children[key] = child
            self._nodes[child] = None
            path.append(node := child)
        return path

    # Forgetting.

    def evict(self) -> bool:
        """Lets the least recently used go, which may free pages; False if there is nothing."""
        if self._config.prefix_mode != "replay":
            return self._evict_snapshot() or self._evict_snapshot(is_queued=True)
        if not self._nodes:
            return False
        self._remove_leaf(next(iter(self._nodes)))
        return True

    def _evict_snapshot(self, *, is_queued: bool = False) -> bool:
        """Lets a snapshot go whose copy is queued, or was made."""
        candidates = [snapshot for snapshot in self.snapshots if self.is_queued(snapshot) == is_queued]
        if not candidates:
            return False
        snapshot = min(candidates, key=lambda candidate: candidate.last_use)
        self._queue.pop(snapshot, None)
        self.snapshots.remove(snapshot)
        self._free_slots.append(snapshot.slot)
        self._counters.snapshots_evicted += not is_queued
        if snapshot.page >= 0:
            self._release(snapshot.page)
        node = snapshot.node
        node.snapshots.remove(snapshot)
        while node.parent is not None and not node.children and not node.snapshots:
            self._remove_leaf(node)
            node = node.parent
        return True

    def _remove_leaf(self, node: Node) -> None:
        assert node.parent is not None and not node.children and not node.snapshots, "the node is still needed"
        del node.parent.children[node.tokens]
        del self._nodes[node]
        self._release(node.page)

    def _touch(self, snapshot: Snapshot) -> None:
        self._clock += 1
        snapshot.last_use = self._clock

    def _touch_nodes(self, path: abc.Sequence[Node]) -> None:
        """From the last to the first, so that a child stays in front of its parent: the first of all is a leaf."""
        for node in reversed(path):
            self._nodes.move_to_end(node)

    def _hold(self, page: int) -> None:
        self._pages.share([page])
        self._holds[page] += 1

    def _release(self, page: int) -> None:
        self._holds[page] -= 1
        self._pages.release([page])


def _num_common(first: abc.Sequence[int], second: abc.Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _path_to(node: Node) -> list[Node]:
    """From the child of the root down to this node."""
    path: list[Node] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
