"""The application: routes, the api key, the body limit, and the way of a request through the queue."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from sse_starlette import ServerSentEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from . import sse
from .anthropic_answer import message_body, message_stream
from .anthropic_messages import parse_messages
from .answer import AnswerEvent, Finished, answer_events, joined
from .backend import Backend
from .errors import ApiError, as_api_error
from .fields import Fields, parse_body
from .metrics import Metrics
from .openai_chat import chat_body, chat_stream, parse_chat
from .openai_completions import completion_body, completion_stream, parse_completion
from .requests import GenerationRequest
from .worker import Prefill, Ticket, Worker

DEFAULT_QUEUE_SIZE = 32
DEFAULT_BODY_LIMIT = 16 << 20
_DRAIN_FACTOR = 4  # of the limit: read on so far to let a client finish sending and see the refusal
_CLIENT_CLOSED = 499

Parse = Callable[[Fields, str], GenerationRequest]
Events = AsyncIterator[AnswerEvent | Prefill]
WriteStream = Callable[[Events, GenerationRequest], AsyncIterator[ServerSentEvent]]
WriteBody = Callable[[list[AnswerEvent]], dict[str, Any]]


def create_app(model: Backend, *, name: str, api_key: str | None = None, queue_size: int = DEFAULT_QUEUE_SIZE,
               body_limit: int = DEFAULT_BODY_LIMIT) -> Starlette:
    """An ASGI application that serves ``model`` under ``name``.

    api_key: required as a bearer token (or `x-api-key`) on everything under /v1. queue_size: requests that may wait beside
    the one that runs; beyond it they get 429 with Retry-After. body_limit: bytes of a request's body, 413 beyond it.
    """
    return _Server(model, name, api_key, queue_size, body_limit).app()


class _Server:
    def __init__(self, model: Backend, name: str, api_key: str | None, queue_size: int, body_limit: int) -> None:
        self._model = model
        self._name = name
        self._api_key = api_key
        self._body_limit = body_limit
        self._worker = Worker(queue_size)
        self._metrics = Metrics(self._worker)
        self._created = int(time.time())

    def app(self) -> Starlette:
        chat = partial(self._generate, parse_chat, lambda events, request: chat_stream(events, self._name, request.include_usage),
                       lambda events: chat_body(joined(events), self._name))
        completion = partial(self._generate, parse_completion, lambda events, request: completion_stream(events, self._name, request.include_usage),
                             lambda events: completion_body(joined(events), self._name))
        messages = partial(self._generate, parse_messages, lambda events, request: message_stream(events, self._name),
                           lambda events: message_body(events, self._name))
        app = Starlette(
            routes=[
                self._route("/v1/chat/completions", chat, "POST"),
                self._route("/v1/completions", completion, "POST"),
                self._route("/v1/messages", messages, "POST"),
                self._route("/v1/models", self._models, "GET"),
                self._route("/v1/models/{name:path}", self._one_model, "GET"),
                Route("/health", self._health),
                Route("/metrics", self._metrics_page),
            ],
            exception_handlers={HTTPException: self._http_error},
            lifespan=self._lifespan,
        )
        app.state.worker = self._worker
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._worker.close)

    def _route(self, path: str, handler: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        """A route under the api key whose errors have the shape of its protocol."""

        async def endpoint(request: Request) -> Response:
            try:
                self._check_key(request)
                response = await handler(request)
            except ClientDisconnect:
                response = Response(status_code=_CLIENT_CLOSED)
            except Exception as error:
                response = _error_response(request, as_api_error(error))
            self._metrics.answered(path, response.status_code)
            return response

        return Route(path, endpoint, methods=[method])

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("latin-1"), self._api_key.encode()):  # the bytes as they were sent
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    # -- generation ------------------------------------------------------------------------------------------------------
    async def _generate(self, parse: Parse, write_stream: WriteStream, write_body: WriteBody, http: Request) -> Response:
        request = parse(parse_body(await self._body(http)), self._name)
        ticket, ahead = await self._queued(request)
        events = self._counted(answer_events(ticket))
        if request.stream:
            return sse.AnswerStream(ticket, write_stream(events, request), ahead)
        found = await _until_disconnect(http, ticket, events)
        return Response(status_code=_CLIENT_CLOSED) if found is None else _json_response(write_body(found))

    async def _queued(self, request: GenerationRequest) -> tuple[Ticket, int]:
        """Checks the request and puts it in line; rendering and encoding a long prompt is no work for the event loop."""
        ticket = self._worker.admit()
        try:
            pieces = await asyncio.to_thread(request.open, self._model, ticket.progress)
        except BaseException:
            self._worker.withdraw()
            raise
        return ticket, self._worker.enqueue(ticket, pieces)

    async def _counted(self, events: Events) -> Events:
        async for event in events:
            if isinstance(event, Finished):
                self._metrics.generated(event.usage)
            yield event

    async def _body(self, request: Request) -> bytes:
        """The body. Raises ApiError 413 beyond the limit, as soon as a well-behaved client can see it."""
        body = bytearray()
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self._body_limit:
                body += chunk
            elif size > _DRAIN_FACTOR * self._body_limit:
                break
        if size > self._body_limit:
            raise ApiError(413, f"The body is larger than the limit of {self._body_limit} bytes.", code="request_too_large")
        return bytes(body)

    # -- the rest --------------------------------------------------------------------------------------------------------
    async def _models(self, request: Request) -> Response:
        """OpenAI's list, with the fields that Anthropic's clients look for."""
        return _json_response({"object": "list", "data": [self._model_body()], "has_more": False, "first_id": self._name, "last_id": self._name})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._name:
            raise ApiError(404, f"The model {name!r} does not exist; this server has {self._name!r}.", param="model", code="model_not_found")
        return _json_response(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        return {"id": self._name, "object": "model", "created": self._created, "owned_by": "lily", "type": "model", "display_name": self._name, "created_at": created}

    async def _health(self, request: Request) -> Response:
        fault = self._worker.fault
        state = {"status": "ok" if fault is None else "unhealthy", "model": self._name, "running": int(self._worker.running), "waiting": self._worker.waiting}
        return _json_response(state if fault is None else {**state, "error": fault}, 200 if fault is None else 503)

    async def _metrics_page(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error_response(request, ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}", headers=error.headers))


async def _until_disconnect(http: Request, ticket: Ticket, events: Events) -> list[AnswerEvent] | None:
    """All events, or None when the client went away first; the ticket is cancelled however this ends."""

    async def collect() -> list[AnswerEvent]:
        return [event async for event in events if not isinstance(event, Prefill)]

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    collecting, watching = asyncio.create_task(collect()), asyncio.create_task(watch())
    try:
        await asyncio.wait({collecting, watching}, return_when=asyncio.FIRST_COMPLETED)
        return collecting.result() if collecting.done() else None
    finally:
        ticket.cancel()
        for task in (collecting, watching):
            task.cancel()
        await asyncio.gather(collecting, watching, return_exceptions=True)


def _json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # A lone surrogate can reach an error message; it must not turn a 400 into a 500.
    return Response(sse.to_json(body).encode("utf-8", "replace"), status, headers, "application/json")


def _error_response(request: Request, error: ApiError) -> Response:
    anthropic = request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return _json_response(error.anthropic_body() if anthropic else error.openai_body(), error.status, error.headers)
