"""Reading stored bytes into given memory: positioned reads, scattered over destinations, several threads, no copies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .errors import CheckpointError
from .safetensors_file import TensorEntry
from .weight_layout import Part, Piece

Bytes = npt.NDArray[np.uint8]

BATCH_BYTES = 16 << 20  # one read: large enough to stream, small enough to share among threads and to stop quickly
MAX_VECTORS = 512       # destinations of one scattered read; the systems' limit is 1,024
THREADS = 8             # enough reads in flight to keep an SSD busy


Batch = tuple[int, list[memoryview]]  # file offset, destinations that consecutive bytes go to


class Reader:
    """Open files and a thread pool, both made on first use. ``close`` releases them."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def read(self, entry: TensorEntry, destination: Bytes) -> None:
        """Read a whole tensor into ``destination`` (uint8, ``entry.nbytes`` long)."""
        _fill(self._open(entry.file), entry, entry.offset, [destination.data])

    def read_pieces(self, pieces: Sequence[Piece], tensors: Mapping[str, TensorEntry], views: Mapping[Part, Bytes | None],
                    advance: Callable[[int], None]) -> None:
        """Read all pieces, in parallel when there are several batches; ``advance(nbytes)`` is called one at a time.

        On an error or an interrupt no read is left running when the exception leaves.
        """
        jobs = []
        for piece in pieces:
            view = views[piece.part]
            if view is None:
                raise ValueError(f"no destination for the {piece.part} of {piece.tensor}")
            entry = tensors[piece.tensor]
            jobs += [(entry, batch) for batch in batches(piece, entry.offset, view.data)]

        def run(entry: TensorEntry, batch: Batch) -> None:
            _fill(self._open(entry.file), entry, *batch)
            with self._lock:
                advance(sum(len(part) for part in batch[1]))

        if sum(len(part) for _, (_, parts) in jobs for part in parts) <= BATCH_BYTES:
            for entry, batch in jobs:
                run(entry, batch)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lily-read")
        futures: list[Future[None]] = [self._pool.submit(run, entry, batch) for entry, batch in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from error
            return self._files[path]


def batches(piece: Piece, start: int, view: memoryview) -> Iterator[Batch]:
    """Cut a piece of the tensor that begins at file offset ``start`` into reads of consecutive bytes."""
    offset, parts, size = 0, list[memoryview](), 0
    for i in range(piece.segments):
        source, dest = start + piece.source + i * piece.source_stride, piece.dest + i * piece.dest_stride
        for at in range(0, piece.nbytes, BATCH_BYTES):
            length = min(BATCH_BYTES, piece.nbytes - at)
            if parts and (source + at != offset + size or size + length > BATCH_BYTES or len(parts) == MAX_VECTORS):
                yield offset, parts
                parts, size = [], 0
            if not parts:
                offset = source + at
            parts.append(view[dest + at : dest + at + length])
            size += length
    if parts:
        yield offset, parts


def _fill(descriptor: int, entry: TensorEntry, offset: int, parts: Sequence[memoryview]) -> None:
    """Fill ``parts`` one after another from consecutive bytes; a read may return less than asked."""
    left = list(parts)
    while left:
        try:
            count = os.preadv(descriptor, left, offset)
        except OSError as error:
            raise CheckpointError(f"tensor {entry.name} cannot be read ({error.strerror})", where=str(entry.file)) from error
        if count == 0:
            raise CheckpointError(f"the file ended inside tensor {entry.name}; it changed after it was opened", where=str(entry.file))
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left and count:
            left[0] = left[0][count:]
