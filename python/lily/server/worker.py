"""One generation at a time, in one thread, in the order of arrival.

The event loop only queues: a `Ticket` is a request's place in the queue and the way its pieces come back. The thread owns
the model while it runs; a ticket that is cancelled stops it between two prefill chunks or two tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from ..errors import LilyError
from ..reply import Piece
from .errors import ApiError

log = logging.getLogger("lily.server")

_FIRST_GUESS_SECONDS = 5.0  # of a generation, before one was measured
_SMOOTHING = 0.2
_ENDING = "the server is shutting down"


@dataclass(frozen=True)
class Prefill:
    """Progress: prompt tokens that are computed, of those that must be."""

    done: int
    total: int


Update = Prefill | Piece


class Cancelled(Exception):
    """Raised into a generation whose client is gone."""


class Ticket:
    """One request in the queue. Made and awaited in the event loop, filled by the worker's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update | BaseException | None] = asyncio.Queue()
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """The client is gone; from any thread, any number of times, also after the end."""
        self._cancelled.set()

    def progress(self, done: int, total: int) -> None:
        """The `progress` keyword of the generation; ends it when the ticket is cancelled."""
        if self.cancelled:
            raise Cancelled
        self.post(Prefill(done, total))

    def post(self, update: Update | BaseException | None) -> None:
        """From the worker: an update, an error, or None at the end."""
        try:
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self.cancel()

    async def updates(self) -> AsyncIterator[Update]:
        """What the worker reports, in order; raises what the generation raised."""
        while (update := await self._updates.get()) is not None:
            if isinstance(update, BaseException):
                raise update
            yield update


class Worker:
    """The thread and its queue. ``queue_size`` requests may wait beside the one that runs.

    If the thread dies, whoever waits gets an error at once, and so does whoever comes later.
    """

    def __init__(self, queue_size: int) -> None:
        self._queue_size = queue_size
        self._changed = threading.Condition()
        self._queue: deque[tuple[Ticket, Iterator[Piece]]] = deque()
        self._admitted = 0  # tickets whose generation is not in the queue yet
        self._current: Ticket | None = None
        self._seconds = _FIRST_GUESS_SECONDS
        self._closed = False
        self._death: str | None = None
        self.on_cancelled: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._main, name="lily-generation", daemon=True)

    # -- state -----------------------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        with self._changed:
            return self._waiting()

    @property
    def running(self) -> bool:
        return self._current is not None

    @property
    def fault(self) -> str | None:
        """Why nothing can be served, None if all is well."""
        if self._death is None and self._thread.ident is not None and not self._thread.is_alive() and not self._closed:
            return "the generation thread is gone"
        return self._death

    # -- the event loop's side -------------------------------------------------------------------------------------------
    def start(self) -> None:
        with self._changed:
            if self._thread.ident is None:
                self._thread.start()

    def admit(self) -> Ticket:
        """A place for a new request, to be followed by `enqueue` or `withdraw`. Raises ApiError 429 when the queue is full,
        503 when nothing can be served."""
        with self._changed:
            self._refuse_if_down()
            # The first one in line does not wait if nothing runs.
            if self._waiting() >= self._queue_size + (self._current is None):
                seconds = max(1, math.ceil(self._seconds * (self._waiting() + 1)))
                raise ApiError(429, f"The queue is full ({self._queue_size} requests wait); try again in about {seconds} s.", code="queue_full",
                               headers={"Retry-After": str(seconds)})
            self._admitted += 1
        return Ticket()

    def withdraw(self) -> None:
        """Gives an admitted place back."""
        with self._changed:
            self._admitted -= 1

    def enqueue(self, ticket: Ticket, pieces: Iterator[Piece]) -> int:
        """Puts an admitted request in line and returns how many are before it."""
        self.start()
        with self._changed:
            self._admitted -= 1
            self._refuse_if_down()
            ahead = sum(not waiting.cancelled for waiting, _ in self._queue) + (self._current is not None)
            self._queue.append((ticket, pieces))
            self._changed.notify()
            return ahead

    def stop(self) -> None:
        """Ends without waiting: nobody is admitted, whoever runs or waits gets 503, the generation that runs is cancelled."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            error = ApiError(503, _ENDING, code="shutting_down")
            self._fail_waiting(error)
            if self._current is not None:
                self._current.post(error)
                self._current.cancel()
            self._changed.notify()

    def close(self, timeout: float = 10.0) -> None:
        """`stop`, and blocks until the thread has ended."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _waiting(self) -> int:
        return self._admitted + sum(not ticket.cancelled for ticket, _ in self._queue)

    def _refuse_if_down(self) -> None:
        if self._closed:
            raise ApiError(503, _ENDING, code="shutting_down")
        if self.fault is not None:
            raise ApiError(503, f"the server cannot generate: {self.fault}", code="worker_died")

    # -- the thread's side -----------------------------------------------------------------------------------------------
    def _main(self) -> None:
        reason = "the generation thread ended"
        try:
            while (job := self._next()) is not None:
                self._run(*job)
        except BaseException as error:  # also SystemExit and the like from deep inside: clients must never hang
            reason = f"the generation thread died of {type(error).__name__}"
            log.critical("%s", reason, exc_info=error)
        finally:
            self._die(reason)

    def _next(self) -> tuple[Ticket, Iterator[Piece]] | None:
        with self._changed:
            self._current = None
            while not self._queue and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            ticket, pieces = self._queue.popleft()
            self._current = ticket
            return ticket, pieces

    def _run(self, ticket: Ticket, pieces: Iterator[Piece]) -> None:
        begun = time.monotonic()
        try:
            if not ticket.cancelled:
                for piece in pieces:
                    if ticket.cancelled:
                        break
                    ticket.post(piece)
        except Cancelled:
            pass
        except Exception as error:
            ticket.post(error)
        finally:
            _close(pieces)
        if ticket.cancelled:
            self.on_cancelled()
        else:
            self._seconds += _SMOOTHING * (time.monotonic() - begun - self._seconds)
        # Not current any more when the client learns of the end: its next request must not find a full queue.
        self._current = None
        ticket.post(None)

    def _die(self, reason: str) -> None:
        with self._changed:
            if not self._closed:
                self._death = reason
            current, self._current = self._current, None
            error = ApiError(503, f"the request failed: {reason}", code="worker_died")
            if current is not None:
                current.post(error)
            self._fail_waiting(error)

    def _fail_waiting(self, error: ApiError) -> None:
        while self._queue:
            ticket, pieces = self._queue.popleft()
            ticket.post(error)
            _close(pieces)


def _close(pieces: Iterator[Piece]) -> None:
    close = getattr(pieces, "close", None)
    if close is not None:
        try:
            close()
        except LilyError as error:  # the device failed what a cancelled generation still had in flight
            log.error("a request failed at its end: %s", error)
        except Exception:
            log.exception("a generation did not close cleanly")
