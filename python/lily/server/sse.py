"""Server-sent events: one line of JSON each, comments that keep the connection alive, and an end when the client goes."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from .worker import Prefill, Ticket

SHUTDOWN_GRACE_SECONDS = 25.0  # in which answers may finish at the end of the server
_NEVER_SECONDS = 3600.0  # the worker ends every stream with an error of its protocol; sse-starlette would just cut it
_PING_SECONDS = 10
# Line ends to Python's str.splitlines, which some clients use, though not to the standard.
_OTHER_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def to_json(value: Any) -> str:
    """Compact JSON on one line by any client's measure."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _OTHER_LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def data(value: Any, event: str | None = None) -> ServerSentEvent:
    """One event with a JSON payload."""
    return ServerSentEvent(value if isinstance(value, str) else to_json(value), event=event, sep="\n")


def progress(update: Prefill) -> ServerSentEvent:
    return ServerSentEvent(comment=f"prefill {update.done}/{update.total}", sep="\n")


class AnswerStream(EventSourceResponse):
    """Sends events until they end or the client is gone; either way the ticket is cancelled, so the model stops."""

    def __init__(self, ticket: Ticket, events: AsyncIterator[ServerSentEvent], ahead: int) -> None:
        self._ticket = ticket
        super().__init__(_with_opening(events, ahead), ping=_PING_SECONDS, sep="\n", shutdown_grace_period=_NEVER_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()


async def _with_opening(events: AsyncIterator[ServerSentEvent], ahead: int) -> AsyncIterator[ServerSentEvent]:
    """A first comment, so that headers and something of the body arrive while the request waits."""
    yield ServerSentEvent(comment=f"accepted, {ahead} ahead", sep="\n")
    async for event in events:
        yield event
