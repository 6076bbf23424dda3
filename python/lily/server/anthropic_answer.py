"""Anthropic's `/v1/messages`, the answer: content blocks, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from sse_starlette import ServerSentEvent

from ..reply import Usage
from ..tool_calls import ArgumentDelta, CallCut, CallFinished, CallStarted, TextDelta
from . import sse
from .answer import AnswerEvent, Finished, ReasoningDelta
from .errors import as_api_error
from .worker import Prefill

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_body(events: list[AnswerEvent], name: str) -> dict[str, Any]:
    """The whole answer."""
    content: list[dict[str, Any]] = []
    body = _message(name)
    for event in events:
        if isinstance(event, TextDelta):
            _append(content, {"type": "text", "text": ""}, "text", event.text)
        elif isinstance(event, ReasoningDelta):
            _append(content, {"type": "thinking", "thinking": "", "signature": ""}, "thinking", event.text)
        elif isinstance(event, CallFinished):
            content.append({"type": "tool_use", "id": event.id, "name": event.name, "input": json.loads(event.arguments)})
        elif isinstance(event, Finished):
            body.update(_stop(event), usage=_usage(event.usage))
    return {**body, "content": content}


def _append(content: list[dict[str, Any]], empty: dict[str, Any], key: str, text: str) -> None:
    if not content or content[-1]["type"] != empty["type"]:
        content.append(empty)
    content[-1][key] += text


def _message(name: str) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": name, "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _stop(event: Finished) -> dict[str, Any]:
    reason = "stop_sequence" if event.stop_string is not None else _REASONS[event.reason]
    return {"stop_reason": reason, "stop_sequence": event.stop_string}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts cached tokens beside the input, not in it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_read_input_tokens": usage.cached_tokens, "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


async def message_stream(events: AsyncIterator[AnswerEvent | Prefill], name: str) -> AsyncIterator[ServerSentEvent]:
    """The answer as events. Token counts of the prompt are known at the end only, in `message_delta`."""
    blocks = _Blocks()
    try:
        yield _event("message_start", message=_message(name))
        async for event in events:
            if isinstance(event, Prefill):
                yield sse.progress(event)
            elif isinstance(event, Finished):
                for out in blocks.close():
                    yield out
                yield _event("message_delta", delta=_stop(event), usage=_usage(event.usage))
            else:
                for out in blocks.push(event):
                    yield out
        yield _event("message_stop")
    except Exception as error:
        yield sse.data(as_api_error(error).anthropic_body(), "error")


def _event(kind: str, **fields: Any) -> ServerSentEvent:
    return sse.data({"type": kind, **fields}, kind)


class _Blocks:
    """Content blocks of a stream: one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def push(self, event: AnswerEvent) -> Iterator[ServerSentEvent]:
        if isinstance(event, TextDelta):
            yield from self._ensure("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, ReasoningDelta):
            yield from self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, CallStarted):
            yield from self.close()
            yield from self._ensure("tool_use", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        elif isinstance(event, ArgumentDelta):
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        elif isinstance(event, (CallFinished, CallCut)):
            yield from self.close()

    def close(self) -> Iterator[ServerSentEvent]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._index)

    def _ensure(self, kind: str, block: dict[str, Any]) -> Iterator[ServerSentEvent]:
        if self._open != kind:
            yield from self.close()
            self._index, self._open = self._index + 1, kind
            yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> ServerSentEvent:
        return _event("content_block_delta", index=self._index, delta=delta)
