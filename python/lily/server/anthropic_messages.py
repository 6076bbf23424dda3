"""Anthropic's `/v1/messages`, the request: translated to the messages and tools that templates know."""

from __future__ import annotations

from typing import Any

from .errors import ApiError
from .fields import Fields, wrong_type
from .generation_fields import generation_keywords, stop_strings, token_limit
from .requests import GenerationRequest, check_model

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages(fields: Fields, name: str) -> GenerationRequest:
    """Raises ApiError or RequestError for what is not acceptable."""
    check_model(fields, name)
    fields.required("max_tokens")
    fields.required("messages")
    keywords = {**generation_keywords(fields), **_thinking(fields), **_tools(fields), **_format(fields), **token_limit(fields, "max_tokens"),
                **stop_strings(fields, "stop_sequences")}
    return GenerationRequest(fields.boolean("stream") or False, keywords, messages=_messages(fields), include_usage=True)


def _thinking(fields: Fields) -> dict[str, Any]:
    """Off unless asked for, as Anthropic's own is."""
    thinking = fields.object("thinking")
    if thinking is None:
        return {"enable_thinking": False}
    kind = thinking.text("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise thinking.refuse("type", "use 'enabled', 'adaptive' or 'disabled'.")
    budget = thinking.integer("budget_tokens")
    if kind != "disabled" and (choice := fields.object("tool_choice")) is not None and choice.text("type") in ("any", "tool"):
        raise fields.refuse("tool_choice", "thinking cannot be combined with a forced tool call.")
    return {"enable_thinking": kind != "disabled", **({} if budget is None or kind == "disabled" else {"thinking_budget": budget})}


def _format(fields: Fields) -> dict[str, Any]:
    """`output_config.format`: JSON of a schema."""
    config = fields.object("output_config")
    form = config.object("format") if config is not None else None
    if form is None:
        return {}
    if form.text("type") != "json_schema":
        raise form.refuse("type", "use 'json_schema'.")
    form.required("schema")
    form.object("schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.raw("schema")}}}


def _tools(fields: Fields) -> dict[str, Any]:
    """Keywords for the tools and the choice between them."""
    tools = []
    for tool in fields.objects("tools"):
        if (tool.text("type") or "custom") != "custom":
            raise tool.refuse("type", "only tools of the client's own are supported.")
        tool.object("input_schema")
        function = {"name": tool.required("name"), "description": tool.text("description") or "", "parameters": tool.required("input_schema")}
        tools.append({"type": "function", "function": function})
    choice = fields.object("tool_choice")
    if choice is None:
        return {"tools": tools} if tools else {}
    kind = choice.text("type")
    named = {"type": "function", "function": {"name": choice.required("name")}} if kind == "tool" else None
    if kind != "tool" and kind not in _CHOICES:
        raise choice.refuse("type", "use 'auto', 'any', 'tool' or 'none'.")
    return {"tools": tools, "tool_choice": named or _CHOICES[str(kind)], "parallel_tool_calls": choice.boolean("disable_parallel_tool_use") is not True}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = _text_of(fields, "system")
    if system:
        messages.append({"role": "system", "content": system})
    given = fields.objects("messages")
    for message in given:
        role = message.required("role")
        if role not in ("user", "assistant"):
            raise message.refuse("role", "use 'user' or 'assistant'.")
        message.required("content")
        messages += _user(message) if role == "user" else [_assistant(message)]
    if given and given[-1].raw("role") == "assistant":
        raise ApiError(400, "The last message must be the user's: continuing an assistant message is not supported.", param="messages", code="invalid_value")
    return messages


def _user(message: Fields) -> list[dict[str, Any]]:
    """A user's blocks in their order: tool results as tool messages, texts between them as user messages."""
    found: list[dict[str, Any]] = []
    for block in _blocks(message):
        kind = block.text("type")
        if kind == "text":
            text = block.required("text")
            block.text("text")
            if found and found[-1]["role"] == "user":
                found[-1]["content"] += "\n" + text
            else:
                found.append({"role": "user", "content": text})
        elif kind == "tool_result":
            block.required("tool_use_id")
            found.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": _text_of(block, "content")})
        else:
            raise block.refuse("type", f"{kind!r} is not supported in a user's message.")
    return found


def _assistant(message: Fields) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in _blocks(message):
        kind = block.text("type")
        if kind == "text":
            block.required("text")
            texts.append(block.text("text") or "")
        elif kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            block.object("input")
            function = {"name": block.required("name"), "arguments": block.raw("input") or {}}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise block.refuse("type", f"{kind!r} is not supported in an assistant's message.")
    found: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _blocks(message: Fields) -> list[Fields]:
    content = message.raw("content")
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, message.path("content"))]
    return message.objects("content")


def _text_of(fields: Fields, name: str) -> str:
    """A text, or the texts of text blocks; absent is empty."""
    value = fields.raw(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong_type(fields.path(name), "a string or an array of text blocks", value)
    texts = []
    for block in fields.objects(name):
        if block.text("type") != "text":
            raise block.refuse("type", "only text blocks are supported here.")
        block.required("text")
        texts.append(block.text("text") or "")
    return "\n".join(texts)
