"""The HTTP server process: uvicorn, with an end that gives every client an answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette

from . import sse

_CUT_SECONDS = 5  # after the grace, for what still has to be sent; then uvicorn cuts connections


class Server(uvicorn.Server):
    """Serves an application of `create_app`. When it is told to end, it accepts nothing new; answers that run or wait may finish
    for `grace` seconds, then each gets a 503 or an error event of its protocol."""

    def __init__(self, app: Starlette, *, grace: float = sse.SHUTDOWN_GRACE_SECONDS, **settings: Any) -> None:
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=int(grace) + _CUT_SECONDS, **settings))
        self._grace = grace
        self._worker = app.state.worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(self._grace, self._worker.stop)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
