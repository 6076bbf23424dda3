"""Prefix cache: snapshots of sequences in a radix tree over token ids, bounded by bytes, least recently used out first.

A recurrent state cannot be cut, so a sequence can be resumed only where a snapshot of it was taken. A node of the tree is
a number of tokens; it may hold a snapshot (convolution and GDN state). The edge to it holds the KV rows of its tokens, so
that a chain of snapshots stores every row once, and branches share the rows of their common head. Where two sequences part
inside an edge, the edge is split: both parts are views of one block of rows, nothing is copied.

The tree knows nothing of a device: a `Store` makes, copies and frees what nodes hold. Use is serialised by the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import DeviceError


class Holder(Protocol):
    """A sequence whose state can be copied out and in: a `Session`."""

    tokens: list[int]


@dataclass
class Block:
    """KV rows of all attention layers, as captured at once. `users`: edges that view it."""

    rows: int
    nbytes: int
    data: Any
    users: int = 0


@dataclass(frozen=True)
class Segment:
    """`rows` rows of a block from row `first` on."""

    block: Block
    first: int
    rows: int


class Store(Protocol):
    """Memory of the snapshots. Methods raise DeviceError when the device fails."""

    state_bytes: int
    row_bytes: int

    def capture(self, holder: Any, first: int) -> tuple[Block | None, Any]:
        """Copies of the holder's KV rows from `first` on (None without rows) and of its recurrent state."""

    def merge(self, segments: Sequence[Segment]) -> Block:
        """A block with a copy of the segments' rows."""

    def restore(self, holder: Any, segments: Sequence[Segment], skip: int, state: Any) -> None:
        """Puts the segments' rows, but the first `skip`, and the state into the holder."""


# An edge whose last views are many and small gets one block for them, so that a conversation that grows by little steps
# does not hold a buffer per step.
_MERGE_VIEWS, _MERGE_ROWS = 8, 8192


@dataclass(eq=False)
class Node:
    """`length` tokens in all, `edge` the last of them; `segments` cover the edge. A node without parent is the root, or gone."""

    parent: Node | None
    edge: list[int]
    length: int
    segments: list[Segment] = field(default_factory=list)
    state: Any = None
    used: int = 0
    children: dict[int, Node] = field(default_factory=dict)

    def path(self) -> list[Node]:
        """From below the root down to this node."""
        out: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            out.append(node)
            node = node.parent
        return out[::-1]


@dataclass(frozen=True)
class CacheInfo:
    """What the prefix cache holds and has done. Bytes of GPU memory; `hits` and `misses` count requests, `tokens_reused`
    the tokens that hits skipped, `dropped` the snapshots that could not be taken or restored."""

    limit: int
    nbytes: int
    snapshots: int
    hits: int
    misses: int
    evictions: int
    dropped: int
    tokens_reused: int


class PrefixCache:
    """Snapshots by prefix. `limit`: bytes, 0 = off. `room()`: bytes that everything else leaves at the moment."""

    def __init__(self, store: Store, limit: int, room: Callable[[], int] | None = None) -> None:
        self._room = room
        self._store = store
        self.limit = limit
        self._root = Node(None, [], 0)
        self._snapshots: set[Node] = set()
        self._clock = 0
        self.nbytes = 0
        self.hits = self.misses = self.evictions = self.dropped = self.tokens_reused = 0

    @property
    def enabled(self) -> bool:
        return self.limit > 0

    def info(self) -> CacheInfo:
        """Counts for people and for tests."""
        return CacheInfo(self.limit, self.nbytes, len(self._snapshots), self.hits, self.misses, self.evictions, self.dropped, self.tokens_reused)

    # -- looking up ------------------------------------------------------------------------------------------------------
    def match(self, ids: Sequence[int]) -> tuple[Node | None, int]:
        """The longest snapshot that is a proper prefix of `ids`, and how many of the ids the tree knows at all."""
        ids = list(ids)
        node, known, _ = self._walk(ids)
        best: Node | None = node
        while best is not None and (best.state is None or best.length >= len(ids)):
            best = best.parent
        return best, known

    def resume(self, holder: Holder, node: Node, shared: int) -> bool:
        """Puts a snapshot into the holder, which has the KV rows of the first `shared` tokens already. False when the device
        failed: the snapshot is dropped, and the holder's state is undefined."""
        segments = [s for n in node.path() for s in n.segments]
        try:
            self._store.restore(holder, segments, shared, node.state)
        except DeviceError:
            self.dropped += 1
            self._drop_state(node)
            return False
        self._touch(node)
        return True

    def count(self, reused: int) -> None:
        """Notes a request that skipped `reused` tokens."""
        self.hits += reused > 0
        self.misses += reused == 0
        self.tokens_reused += reused

    def _walk(self, ids: list[int]) -> tuple[Node, int, Node | None]:
        """(deepest node whose tokens all match, tokens that match, child inside whose edge the match ends)."""
        node, at = self._root, 0
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                break
            same = common_prefix(child.edge, ids, at)
            at += same
            if same < len(child.edge):
                return node, at, child
            node = child
        return node, at, None

    # -- storing ---------------------------------------------------------------------------------------------------------
    def insert(self, holder: Holder) -> Node | None:
        """Takes a snapshot of the holder at its tokens, unless there is one. None if it does not fit or the device failed:
        then nothing has changed but what was evicted."""
        tokens = list(holder.tokens)
        whole = self._store.state_bytes + self._store.row_bytes * len(tokens)
        limit = self.limit if self._room is None else min(self.limit, self._room())
        if not tokens or whole > limit:
            return None
        node, known, _ = self._walk(tokens)
        if known == len(tokens) == node.length and node.state is not None:
            self._touch(node)
            return node
        self._make_room(self._store.state_bytes + self._store.row_bytes * (len(tokens) - known), limit, tokens)
        node, known, child = self._walk(tokens)  # eviction may have changed the nodes, not the rows along `tokens`
        try:
            block, state = self._store.capture(holder, known)
        except DeviceError:
            self.dropped += 1
            self._tidy(child or node)
            return None
        if child is not None:
            node = self._split(child, known - node.length)
        if block is not None:
            node = self._append(node, tokens[known:], block)
        node.state = state
        self._snapshots.add(node)
        self.nbytes += self._store.state_bytes
        self._touch(node)
        self._tidy(child or node)
        return node

    def _append(self, parent: Node, edge: list[int], block: Block) -> Node:
        node = Node(parent, edge, parent.length + len(edge), [Segment(block, 0, len(edge))])
        block.users = 1
        self.nbytes += block.nbytes
        parent.children[edge[0]] = node
        return node

    def _split(self, child: Node, at: int) -> Node:
        """Cuts an edge `at` tokens down; the upper part becomes a node without a snapshot."""
        assert child.parent is not None and 0 < at < len(child.edge)
        upper = Node(child.parent, child.edge[:at], child.length - len(child.edge) + at)
        lower: list[Segment] = []
        left = at
        for s in child.segments:
            take = min(left, s.rows)
            left -= take
            if take:
                upper.segments.append(Segment(s.block, s.first, take))
            if take < s.rows:
                lower.append(Segment(s.block, s.first + take, s.rows - take))
            s.block.users += (take > 0) + (take < s.rows) - 1
        upper.children[child.edge[at]] = child
        child.parent.children[upper.edge[0]] = upper
        child.parent, child.edge, child.segments = upper, child.edge[at:], lower
        return upper

    # -- forgetting ------------------------------------------------------------------------------------------------------
    def forget(self, node: Node) -> None:
        """Drops one snapshot; harmless when it is gone already."""
        if node.state is not None:
            self._drop_state(node)

    def shrink(self, nbytes: int) -> None:
        """Evicts until at most `nbytes` are held (memory is wanted for something else)."""
        self._make_room(0, max(0, nbytes), [])

    def clear(self) -> None:
        """Forgets every snapshot."""
        self.shrink(0)

    def _make_room(self, need: int, limit: int, keep: list[int]) -> None:
        """Evicts snapshots until `need` bytes fit; KV rows along `keep` stay."""
        if self.nbytes + need <= limit:
            return
        node, _, child = self._walk(keep)
        kept = frozenset(map(id, (child or node).path()))
        for victim in sorted(self._snapshots, key=lambda n: n.used):
            if self.nbytes + need <= limit:
                break
            self.evictions += 1
            self._drop_state(victim, kept)

    def _drop_state(self, node: Node, kept: frozenset[int] = frozenset()) -> None:
        node.state = None
        self._snapshots.discard(node)
        self.nbytes -= self._store.state_bytes
        self._prune(node, kept)

    def _prune(self, node: Node, kept: frozenset[int] = frozenset()) -> None:
        """Removes a node that leads to no snapshot, and joins one that neither branches nor holds one with its child."""
        while node.parent is not None and node.state is None and not node.children and id(node) not in kept:
            self._free(node.segments)
            del node.parent.children[node.edge[0]]
            above, node.parent = node.parent, None
            node = above
        if node.parent is not None and node.state is None and len(node.children) == 1 and id(node) not in kept:
            self._join(node)

    def _tidy(self, node: Node) -> None:
        """Prunes what was kept only for the insertion."""
        for one in reversed(node.path()):
            self._prune(one)

    def _join(self, node: Node) -> None:
        """A node that neither branches nor holds a snapshot becomes part of its child's edge."""
        (child,) = node.children.values()
        assert node.parent is not None
        child.edge, child.segments, child.parent = node.edge + child.edge, joined_segments([*node.segments, *child.segments]), node.parent
        node.parent.children[child.edge[0]] = child
        node.parent, node.children = None, {}
        self._compact(child)

    def _compact(self, node: Node) -> None:
        start, rows = len(node.segments), 0
        for s in reversed(node.segments):
            if s.block.users > 1 or rows + s.rows > _MERGE_ROWS:
                break
            start, rows = start - 1, rows + s.rows
        views = node.segments[start:]
        if len(views) < _MERGE_VIEWS:
            return
        try:
            block = self._store.merge(views)
        except DeviceError:
            return  # many small blocks do as well
        block.users = 1
        self.nbytes += block.nbytes
        self._free(views)
        node.segments[start:] = [Segment(block, 0, rows)]

    def _free(self, segments: list[Segment]) -> None:
        for s in segments:
            s.block.users -= 1
            if s.block.users == 0:
                self.nbytes -= s.block.nbytes
                s.block.data = None

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


def joined_segments(segments: list[Segment]) -> list[Segment]:
    """Neighbouring views of one block as one; the block counts an edge less for each."""
    out: list[Segment] = []
    for s in segments:
        if out and out[-1].block is s.block and out[-1].first + out[-1].rows == s.first:
            out[-1] = Segment(s.block, out[-1].first, out[-1].rows + s.rows)
            s.block.users -= 1
        else:
            out.append(s)
    return out


def common_prefix(edge: Sequence[int], ids: Sequence[int], at: int = 0) -> int:
    """How many tokens of `edge` equal those of `ids` from `at` on."""
    most = min(len(edge), len(ids) - at)
    if edge[:most] == ids[at : at + most]:
        return most
    low, high = 0, most  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == ids[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low
