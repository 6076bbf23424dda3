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
    (a gather reads fewer bytes than it may address); None means all of the region."""

    index: int
    region: Region
    mode: str
    touched: int | None = None

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


class _Ranges:
    """What one buffer has seen: disjoint segments with the level of the last write and of the latest read since."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.segments: list[list[int]] = []  # [start, end, last write level, last read level]

    def _cut(self, at: int) -> None:
        i = bisect_left(self.starts, at)
        if i > 0:
            s = self.segments[i - 1]
            if s[0] < at < s[1]:
                self.segments.insert(i, [at, s[1], s[2], s[3]])
                self.starts.insert(i, at)
                s[1] = at

    def overlapping(self, start: int, end: int) -> list[list[int]]:
        self._cut(start)
        self._cut(end)
        i = bisect_left(self.starts, start)
        out = []
        while i < len(self.segments) and self.segments[i][0] < end:
            out.append(self.segments[i])
            i += 1
        return out

    def add(self, start: int, end: int) -> None:
        """Covers the gaps of [start, end) with untouched segments."""
        at = start
        for s in self.overlapping(start, end):
            if at < s[0]:
                self._insert(at, s[0])
            at = s[1]
        if at < end:
            self._insert(at, end)

    def _insert(self, start: int, end: int) -> None:
        i = bisect_left(self.starts, start)
        self.starts.insert(i, start)
        self.segments.insert(i, [start, end, -1, -1])


def assign_levels(dispatches: Iterable[Dispatch]) -> list[Dispatch]:
    """Gives every dispatch its level and returns them ordered by level, in order of submission within a level."""
    seen: dict[str, _Ranges] = {}
    out = []
    for d in dispatches:
        level = 0
        touched = []
        for b in d.bindings:
            if b.region.nbytes == 0:
                continue
            ranges = seen.setdefault(b.region.buffer, _Ranges())
            start, end = b.region.offset, b.region.offset + b.region.nbytes
            ranges.add(start, end)
            touched.append((ranges, start, end, b.mode))
        for ranges, start, end, mode in touched:
            for s in ranges.overlapping(start, end):
                level = max(level, s[2] + 1)
                if "w" in mode:
                    level = max(level, s[3] + 1)
        for ranges, start, end, mode in touched:
            for s in ranges.overlapping(start, end):
                if "w" in mode:
                    s[2] = max(s[2], level)
                    s[3] = max(s[3], level) if mode == "rw" else s[3]
                else:
                    s[3] = max(s[3], level)
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
        for x in a.bindings
        for y in b.bindings
    )
