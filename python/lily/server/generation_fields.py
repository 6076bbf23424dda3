"""Fields of a request that become keywords of the generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .fields import Fields, wrong_type

Reader = Callable[[Fields, str], Any]

# One entry a field: how it is read; the keyword has the same name.
_READERS: dict[str, Reader] = {
    "temperature": Fields.number, "top_p": Fields.number, "top_k": Fields.integer, "min_p": Fields.number, "seed": Fields.integer,
    "presence_penalty": Fields.number, "frequency_penalty": Fields.number, "repetition_penalty": Fields.number, "thinking_budget": Fields.integer,
    "logit_bias": lambda fields, name: fields.object(name) and fields.raw(name), "response_format": lambda fields, name: fields.object(name) and fields.raw(name),
}

# What is not supported, with the values that ask for nothing: those are accepted, others refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "best_of": (1,), "n": (1,), "functions": ([],)}


def generation_keywords(fields: Fields) -> dict[str, Any]:
    """Keywords for what the request sets; ranges are checked by the model, where the defaults are known too."""
    for name, neutral in _NEUTRAL.items():
        if name in fields:
            value = fields.raw(name)
            if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral):
                raise fields.refuse(name, f"this server supports only {neutral[0]!r}.")
    read = {name: reader(fields, name) for name, reader in _READERS.items()}
    return {name: value for name, value in read.items() if value is not None}


def chat_logprobs(fields: Fields) -> dict[str, Any]:
    """``logprobs`` and ``top_logprobs`` of a chat request."""
    asked, top = fields.boolean("logprobs"), fields.integer("top_logprobs")
    if top and not asked:
        raise fields.refuse("top_logprobs", "only allowed when 'logprobs' is true.")
    return {"logprobs": True, "top_logprobs": top or 0} if asked else {}


def completion_logprobs(fields: Fields) -> dict[str, Any]:
    """``logprobs`` of a completion request: how many of the likeliest tokens to show beside the chosen one."""
    count = fields.integer("logprobs")
    return {} if count is None else {"logprobs": True, "top_logprobs": count}


def token_limit(fields: Fields, *names: str) -> dict[str, int]:
    """``max_tokens`` from the first of the fields that is set."""
    found = [value for name in names if (value := fields.integer(name)) is not None]
    if found and found[0] < 1:
        raise fields.refuse(next(name for name in names if name in fields), "must be at least 1.")
    return {"max_tokens": found[0]} if found else {}


def stop_strings(fields: Fields, name: str = "stop") -> dict[str, list[str]]:
    """``stop`` from a string or an array of strings."""
    value = fields.raw(name)
    values = [value] if isinstance(value, str) else value
    if values is None:
        return {}
    if not isinstance(values, list):
        raise wrong_type(fields.path(name), "a string or an array of strings", value)
    for index, entry in enumerate(values):
        if not isinstance(entry, str):
            raise wrong_type(f"{fields.path(name)}[{index}]", "a string", entry)
    return {"stop": values} if values else {}
