"""Validation of chat messages and tools, before a template sees them: clear refusals, and one normal form.

The normal form: every content is a string (or None where an assistant only calls tools), every call's arguments an object.
OpenAI's older `function_call` and role `function` become calls and results of tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64  # nesting of tool schemas and arguments

_Json = Any


def normal_messages(messages: object) -> list[dict[str, _Json]]:
    """Checked copies of the messages. Raises RequestError naming the message and field at fault.

    Order and presence of roles are the template's business: it refuses in its own words.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"must be a list of messages, got {type(messages).__name__}", where="messages")
    if not messages:
        raise RequestError("the list is empty", where="messages", fix="give at least one user message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def normal_tools(tools: object) -> list[dict[str, _Json]] | None:
    """Checked copies of the tool descriptions; None for none. Raises RequestError naming the tool at fault."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"must be a list of tool descriptions, got {type(tools).__name__}", where="tools")
    found = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise RequestError(f"must be an object, got {type(tool).__name__}", where=where)
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("has no function name", where=where, fix='give {"type": "function", "function": {"name": …}}')
        found.append(json_copy(tool, where))
    return found or None


def json_copy(value: object, where: str, depth: int = 0) -> Any:
    """A copy made of JSON's types only. Raises RequestError naming the place of anything else, and of broken Unicode."""
    if depth > MAX_DEPTH:
        raise RequestError(f"is nested deeper than {MAX_DEPTH} levels", where=where)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, Mapping):
        copy = {}
        for key, inner in value.items():
            if not isinstance(key, str):
                raise RequestError(f"has the key {key!r}, expected a string", where=where)
            copy[_text(key, where)] = json_copy(inner, f"{where}.{key}", depth + 1)
        return copy
    if isinstance(value, (list, tuple)):
        return [json_copy(inner, f"{where}[{index}]", depth + 1) for index, inner in enumerate(value)]
    raise RequestError(f"has type {type(value).__name__}, expected JSON types", where=where)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"is not valid Unicode (a lone surrogate at character {error.start})", where=where) from error
    return str(text)


def _message(message: object, where: str) -> dict[str, _Json]:
    if not isinstance(message, Mapping):
        raise RequestError(f"must be an object with role and content, got {type(message).__name__}", where=where)
    role = message.get("role")
    if role == "function":  # OpenAI's older name of a result
        role = "tool"
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"unknown role {role!r}", where=where, fix=f"use one of {', '.join(ROLES)}")
    calls, old_call = (message.get("tool_calls"), message.get("function_call")) if role == "assistant" else (None, None)
    rest = {key: value for key, value in message.items() if key not in ("content", "tool_calls", "function_call")}
    normal: dict[str, _Json] = {**json_copy(rest, where), "role": role}
    content = _content(message.get("content"), f"{where}.content")
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        if reasoning is not None and not isinstance(reasoning, str):
            raise RequestError(f"must be a string, got {type(reasoning).__name__}", where=f"{where}.reasoning_content")
        if content is not None and not reasoning and "</think>" in content:
            # Templates recognise an inline thought by this tag, which guarding would hide from them.
            before, _, content = content.rpartition("</think>")
            normal["reasoning_content"] = before.split("</think>")[0].split("<think>")[-1].strip("\n")
            content = content.lstrip("\n")
        if calls:
            normal["tool_calls"] = _calls(calls, f"{where}.tool_calls")
        elif old_call is not None:
            normal["tool_calls"] = [_call(old_call, f"{where}.function_call")]
        elif content is None and not reasoning:
            raise RequestError("an assistant message needs content or tool_calls", where=where)
    elif content is None:
        raise RequestError(f"a {role} message needs content", where=where)
    normal["content"] = content
    return normal


def _content(content: object, where: str) -> str | None:
    """The text of a content: a string, or text parts, which are joined as templates do."""
    if content is None:
        return None
    if isinstance(content, str):
        return _text(content, where)
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise RequestError(f"must be a string or a list of text parts, got {type(content).__name__}", where=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text":
            raise RequestError(f"only text parts are supported, got {kind}", where=f"{where}[{index}]")
        if not isinstance(part.get("text"), str):
            raise RequestError("a text part needs a string as its text", where=f"{where}[{index}]")
        texts.append(_text(part["text"], f"{where}[{index}].text"))
    return "".join(texts)


def _calls(calls: object, where: str) -> list[dict[str, _Json]]:
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise RequestError(f"must be a list of calls, got {type(calls).__name__}", where=where)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, _Json]:
    if not isinstance(call, Mapping):
        raise RequestError(f"must be an object, got {type(call).__name__}", where=where)
    normal: dict[str, _Json] = json_copy(call, where)
    function = normal.get("function", normal)
    place = f"{where}.function" if function is not normal else where
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError("has no function name", where=place)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json_copy(json.loads(arguments), f"{place}.arguments")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"is not valid JSON ({error})", where=f"{place}.arguments") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"must be an object, got {type(arguments).__name__}", where=f"{place}.arguments")
    function["arguments"] = arguments
    return normal
