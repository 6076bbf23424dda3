"""A stream of pieces for asyncio: the generation runs in a thread of its own and ends when the task does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress

from .reply import Piece

Check = Callable[[], None]


class Cancelled(Exception):
    """Raised into a generation that nobody waits for any more."""


async def async_pieces(open_stream: Callable[[Check], Iterator[Piece]]) -> AsyncGenerator[Piece, None]:
    """The pieces of `open_stream(check)`, which runs in a new thread and calls `check` when its turn has come and after every
    prefill chunk. A pool of threads would not do: those that wait for their turn could keep out the one that has it.
    The thread does not wait for a slow reader; at most `max_tokens` pieces wait for it."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
    cancelled = threading.Event()

    def check() -> None:
        if cancelled.is_set():
            raise Cancelled

    def post(item: Piece | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(arrived.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody waits any more
            cancelled.set()

    def work() -> None:
        end: BaseException | None = None
        try:
            stream = open_stream(check)
            try:
                for piece in stream:
                    post(piece)
                    check()
            finally:
                close = getattr(stream, "close", None)
                if close is not None:
                    close()
        except Cancelled:
            pass
        except BaseException as error:
            end = error
        post(end)

    threading.Thread(target=work, name="lily-async").start()
    try:
        while (item := await arrived.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        cancelled.set()


async def gathered(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    """All pieces; the generation ends with the task that waits for them."""
    try:
        return [piece async for piece in pieces]
    finally:
        with suppress(RuntimeError):  # already running its own end
            await pieces.aclose()
