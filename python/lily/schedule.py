"""Dispatches, the byte ranges they touch, and the levels that follow from them (D3).

A concurrent Metal pass orders nothing but its barriers. Two dispatches conflict when their ranges in one buffer overlap
and at least one writes (RAW, WAR, WAW). A dispatch's level is one more than the highest level it conflicts with among
those before it; dispatches of one level run side by side, and a barrier stands only between levels. The result is plain
data: tests inspect and mutate it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace


HOST = "host"  # family of a step that the CPU does between two programs (P2's control)


@dataclass(frozen=True)
class Region:
    """`nbytes` bytes at `offset` of the buffer named `buffer`."""

    buffer: str
    offset: int
    nbytes: int

    def slice(self, offset: int, nbytes: int | None = None) -> Region:
        return Region(self.buffer, self.offset + offset, self.nbytes - offset if nbytes is None else nbytes)


@dataclass(frozen=True)
class Binding:
    """A region at a kernel's buffer index. `mode`: "r", "w" or "rw". `touched`: bytes really moved, for the cost model
    (a gather reads fewer bytes than it may address); None means all of the region. `group`: writers of one group write
    disjoint parts of the region in an order that only the GPU knows (P3's two tile lists), so they do not conflict."""

    index: int
    region: Region
    mode: str
    touched: int | None = None
    group: str | None = None

    @property
    def moved(self) -> int:
        return self.region.nbytes if self.touched is None else self.touched


@dataclass(frozen=True)
class Dispatch:
    """One launch: kernel, bindings, argument struct, grid in threadgroups and threads per threadgroup."""

    id: str
    family: str
    function: str
    bindings: tuple[Binding, ...]
    args_index: int
    args_struct: str
    args: tuple[tuple[str, float | int], ...]
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    constants: tuple[tuple[int, str, float | int | bool], ...] = ()
    macs: int = 0
    level: int = -1
    tags: tuple[str, ...] = field(default=())

    @property
    def bytes_read(self) -> int:
        return sum(b.moved for b in self.bindings if "r" in b.mode)

    @property
    def bytes_written(self) -> int:
        return sum(b.moved for b in self.bindings if "w" in b.mode)

    @property
    def threadgroups(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


class _Segment:
    """A byte range of a buffer with the levels that touched it: the last write, the latest read since; and, while the last
    writers are a group, what stood before the group."""

    __slots__ = ("end", "group", "read", "read_before", "start", "write", "write_before")

    def __init__(self, start: int, end: int, write: int = -1, read: int = -1, group: str | None = None, write_before: int = -1, read_before: int = -1) -> None:
        self.start, self.end, self.write, self.read = start, end, write, read
        self.group, self.write_before, self.read_before = group, write_before, read_before

    def required(self, mode: str, group: str | None) -> int:
        """The lowest level that an access may have."""
        if group is not None and group == self.group:
            return max(self.write_before, self.read_before) + 1
        return max(self.write, self.read if "w" in mode else -1) + 1

    def record(self, mode: str, group: str | None, level: int) -> None:
        if "w" not in mode:
            self.read = max(self.read, level)
            return
        if group is None or group != self.group:
            self.group, self.write_before, self.read_before = group, self.write, self.read
        self.write = max(self.write, level)
        if "r" in mode:
            self.read = max(self.read, level)


class _Ranges:
    """What one buffer has seen: disjoint segments in order."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.segments: list[_Segment] = []

    def _cut(self, at: int) -> None:
        i = bisect_left(self.starts, at)
        if i > 0:
            s = self.segments[i - 1]
            if s.start < at < s.end:
                self._insert(_Segment(at, s.end, s.write, s.read, s.group, s.write_before, s.read_before))
                s.end = at

    def overlapping(self, start: int, end: int) -> list[_Segment]:
        self._cut(start)
        self._cut(end)
        i = bisect_left(self.starts, start)
        out = []
        while i < len(self.segments) and self.segments[i].start < end:
            out.append(self.segments[i])
            i += 1
        return out

    def cover(self, start: int, end: int) -> None:
        """Fills the gaps of [start, end) with untouched segments."""
        at = start
        for s in self.overlapping(start, end):
            if at < s.start:
                self._insert(_Segment(at, s.start))
            at = s.end
        if at < end:
            self._insert(_Segment(at, end))

    def _insert(self, segment: _Segment) -> None:
        i = bisect_left(self.starts, segment.start)
        self.starts.insert(i, segment.start)
        self.segments.insert(i, segment)


def assign_levels(dispatches: Iterable[Dispatch]) -> list[Dispatch]:
    """Gives every dispatch its level and returns them ordered by level, in order of submission within a level."""
    seen: dict[str, _Ranges] = {}
    out = []
    for d in dispatches:
        touched = []
        for b in d.bindings:
            if b.region.nbytes == 0:
                continue
            ranges = seen.setdefault(b.region.buffer, _Ranges())
            start, end = b.region.offset, b.region.offset + b.region.nbytes
            ranges.cover(start, end)
            touched.append((ranges, start, end, b))
        # Two passes: cutting a range for one binding may split the segments of another.
        level = max((s.required(b.mode, b.group) for ranges, start, end, b in touched for s in ranges.overlapping(start, end)), default=0)
        for ranges, start, end, b in touched:
            for s in ranges.overlapping(start, end):
                s.record(b.mode, b.group, level)
        out.append(replace(d, level=level))
    out.sort(key=lambda d: d.level)
    return out


def barriers(dispatches: Sequence[Dispatch]) -> list[bool]:
    """True where a barrier stands before the dispatch: wherever the level changes."""
    return [i > 0 and d.level != dispatches[i - 1].level for i, d in enumerate(dispatches)]


def conflicts(a: Dispatch, b: Dispatch) -> bool:
    """Whether two dispatches touch overlapping bytes and at least one of them writes there."""
    return any(
        x.region.buffer == y.region.buffer
        and min(x.region.nbytes, y.region.nbytes) > 0
        and x.region.offset < y.region.offset + y.region.nbytes
        and y.region.offset < x.region.offset + x.region.nbytes
        and ("w" in x.mode or "w" in y.mode)
        and (x.group is None or x.group != y.group)
        for x in a.bindings
        for y in b.bindings
    )
