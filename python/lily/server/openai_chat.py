"""OpenAI's `/v1/chat/completions`: the request, the whole answer, and the streamed one."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import ServerSentEvent

from ..logprobs import TokenLogprob
from ..reply import Usage
from ..tool_calls import ArgumentDelta, CallStarted, TextDelta
from . import sse
from .answer import Answer, AnswerEvent, Finished, Logprobs, ReasoningDelta
from .errors import as_api_error
from .fields import Fields
from .generation_fields import chat_logprobs, generation_keywords, stop_strings, token_limit
from .openai_logprobs import chat_entries
from .requests import GenerationRequest, check_model
from .worker import Prefill


def parse_chat(fields: Fields, name: str) -> GenerationRequest:
    """Raises ApiError or RequestError for what is not acceptable."""
    check_model(fields, name)
    messages = fields.required("messages")
    fields.array("messages")
    for index, tool in enumerate(fields.objects("tools")):
        if (tool.text("type") or "function") != "function":
            raise fields.refuse(f"tools[{index}].type", "only 'function' is supported.")
    asked = {"tools": fields.raw("tools"), "tool_choice": fields.raw("tool_choice"), "parallel_tool_calls": fields.boolean("parallel_tool_calls"),
             "enable_thinking": _thinking(fields)}
    stream, include_usage = stream_settings(fields)
    keywords = {**generation_keywords(fields), **chat_logprobs(fields), **token_limit(fields, "max_completion_tokens", "max_tokens"),
                **stop_strings(fields), **{name: value for name, value in asked.items() if value is not None}}
    return GenerationRequest(stream, keywords, messages=messages, include_usage=include_usage)


def stream_settings(fields: Fields) -> tuple[bool, bool]:
    """(stream, stream_options.include_usage)."""
    stream = fields.boolean("stream") or False
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise fields.refuse("stream_options", "only allowed when 'stream' is true.")
    return stream, bool(options is not None and options.boolean("include_usage"))


def _thinking(fields: Fields) -> bool | None:
    """Whether to think: `enable_thinking`, also inside `chat_template_kwargs` where other local servers take it, or no effort."""
    template = fields.object("chat_template_kwargs")
    for place in (fields, template):
        asked = place.boolean("enable_thinking") if place is not None else None
        if asked is not None:
            return asked
    return False if fields.text("reasoning_effort") == "none" else None


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chat_body(answer: Answer, name: str) -> dict[str, Any]:
    """The whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text if answer.text or not answer.calls else None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [call.as_message_call() for call in answer.calls]
    choice = {"index": 0, "message": message, "logprobs": chat_entries(answer.logprobs), "finish_reason": answer.finished.reason}
    return {**head("chat.completion", "chatcmpl", name), "choices": [choice], "usage": usage_body(answer.finished.usage)}


def head(kind: str, prefix: str, name: str) -> dict[str, Any]:
    """Fields that every answer and chunk begins with."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": name, "system_fingerprint": None}


async def chat_stream(events: AsyncIterator[AnswerEvent | Prefill], name: str, include_usage: bool) -> AsyncIterator[ServerSentEvent]:
    """The answer as chunks."""
    opening = head("chat.completion.chunk", "chatcmpl", name)
    with_usage = {"usage": None} if include_usage else {}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> ServerSentEvent:
        choice = {"index": 0, "delta": delta, "logprobs": chat_entries(logprobs), "finish_reason": reason}
        logprobs.clear()
        return sse.data({**opening, "choices": [choice], **with_usage})

    logprobs: list[TokenLogprob] = []  # of the text that the next chunk shows
    begun = False
    try:
        async for event in events:
            if isinstance(event, Prefill):
                yield sse.progress(event)
                continue
            if not begun:
                begun = True
                yield chunk({"role": "assistant", "content": ""})
            if isinstance(event, Logprobs):
                logprobs += event.tokens
            elif isinstance(event, Finished):
                yield chunk({}, event.reason)
                if include_usage:
                    yield sse.data({**opening, "choices": [], "usage": usage_body(event.usage)})
            elif (delta := _delta(event)) is not None:
                yield chunk(delta)
    except Exception as error:
        yield sse.data(as_api_error(error).openai_body())
        return
    yield sse.data("[DONE]")


def _delta(event: AnswerEvent) -> dict[str, Any] | None:
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, CallStarted):
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}]}
    if isinstance(event, ArgumentDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
