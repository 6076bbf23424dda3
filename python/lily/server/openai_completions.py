"""OpenAI's `/v1/completions`: plain continuation of a text or of token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import ServerSentEvent

from ..logprobs import TokenLogprob
from ..tool_calls import TextDelta
from . import sse
from .answer import Answer, AnswerEvent, Finished, Logprobs
from .errors import as_api_error
from .fields import Fields, wrong_type
from .generation_fields import completion_logprobs, generation_keywords, stop_strings, token_limit
from .openai_chat import head, stream_settings, usage_body
from .openai_logprobs import CompletionLogprobs
from .requests import GenerationRequest, check_model
from .worker import Prefill


def parse_completion(fields: Fields, name: str) -> GenerationRequest:
    """Raises ApiError for what is not acceptable."""
    check_model(fields, name)
    prompt = _prompt(fields)
    stream, include_usage = stream_settings(fields)
    keywords = {**generation_keywords(fields), **completion_logprobs(fields), **token_limit(fields, "max_tokens"), **stop_strings(fields)}
    return GenerationRequest(stream, keywords, raw=prompt, include_usage=include_usage)


def _prompt(fields: Fields) -> str | list[int]:
    """A text or token ids, alone or as the only one of a batch."""
    prompt = fields.required("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise fields.refuse("prompt", "one prompt a request is supported.")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    raise wrong_type("prompt", "a string or an array of integers", prompt)


def completion_body(answer: Answer, name: str) -> dict[str, Any]:
    """The whole answer."""
    choice = {"index": 0, "text": answer.text, "logprobs": CompletionLogprobs().entries(answer.logprobs), "finish_reason": answer.finished.reason}
    return {**head("text_completion", "cmpl", name), "choices": [choice], "usage": usage_body(answer.finished.usage)}


async def completion_stream(events: AsyncIterator[AnswerEvent | Prefill], name: str, include_usage: bool) -> AsyncIterator[ServerSentEvent]:
    """The answer as chunks."""
    opening = head("text_completion", "cmpl", name)
    with_usage = {"usage": None} if include_usage else {}

    def chunk(text: str, reason: str | None = None) -> ServerSentEvent:
        entries = written.entries(logprobs)
        logprobs.clear()
        return sse.data({**opening, "choices": [{"index": 0, "text": text, "logprobs": entries, "finish_reason": reason}], **with_usage})

    written, logprobs = CompletionLogprobs(), list[TokenLogprob]()  # of the text that the next chunk shows

    try:
        async for event in events:
            if isinstance(event, Prefill):
                yield sse.progress(event)
            elif isinstance(event, Logprobs):
                logprobs += event.tokens
            elif isinstance(event, TextDelta):
                yield chunk(event.text)
            elif isinstance(event, Finished):
                yield chunk("", event.reason)
                if include_usage:
                    yield sse.data({**opening, "choices": [], "usage": usage_body(event.usage)})
    except Exception as error:
        yield sse.data(as_api_error(error).openai_body())
        return
    yield sse.data("[DONE]")
