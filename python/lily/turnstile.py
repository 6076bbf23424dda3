"""One generation at a time per model, without deadlocks between streams of one thread."""

from __future__ import annotations

import threading
from types import TracebackType

from .errors import RequestError


class Turnstile:
    """A lock that other threads wait for. The thread that already holds it through an open stream gets a RequestError
    instead of waiting for itself. It may be released from another thread, as a stream can be closed anywhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> Turnstile:
        if self._owner == threading.get_ident() and self._lock.locked():
            raise RequestError("another stream of this model is still open in this thread", fix="finish or close() it first")
        self._lock.acquire()
        self._owner = threading.get_ident()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._owner = None
        self._lock.release()
