"""One generation at a time per model, without deadlocks between streams of one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from .errors import RequestError


class Turnstile:
    """A lock that other threads wait for. The thread that already holds it through an open stream gets a RequestError
    instead of waiting for itself. It may be released from another thread, as a stream can be closed anywhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._closed = False
        self._free: Callable[[], None] | None = None

    def __enter__(self) -> Turnstile:
        if self._mine():
            raise RequestError("another stream of this model is still open in this thread", fix="finish or close() it first")
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise RequestError("the model is closed", fix="load it again")
        self._owner = threading.get_ident()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._owner = None
        try:
            self._run_free()
        finally:
            self._lock.release()

    def close(self, free: Callable[[], None]) -> None:
        """Lets nobody in any more and calls `free` once, when nobody is inside: at once, or after a stream that this thread
        still holds open. Other threads' streams are waited for."""
        if self._mine():
            self._closed, self._free = True, free
            return
        with self._lock:
            if not self._closed:
                self._closed, self._free = True, free
                self._run_free()

    def _mine(self) -> bool:
        return self._owner == threading.get_ident() and self._lock.locked()

    def _run_free(self) -> None:
        free, self._free = self._free, None
        if free is not None:
            free()
