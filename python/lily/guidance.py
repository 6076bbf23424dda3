"""Structured output: an answer's grammar from `response_format` and forced tool calls, and its masks (extra `guidance`).

A mask needs the host before each token, so a request with a grammar does not run ahead (D2) once the grammar has begun.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import RequestError
from .tokenizer import Tokenizer

# Between tokens of JSON: a space, or a new line and its indentation. Unbounded, a model can write blanks until max_tokens (case 46).
WHITE_SPACE = r"(\x20|\x0A\x20{0,24})"
MAX_SCHEMA_BYTES = 1 << 20
_FORMS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": …}}'
_tokenizers: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


def available() -> bool:
    """Whether the extra is installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


def response_schema(response_format: object) -> dict[str, Any] | None:
    """The JSON schema that a request's `response_format` asks for; None for free text. Raises RequestError for another form."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping) or response_format.get("type") not in ("text", "json_object", "json_schema"):
        raise RequestError(f"must be {_FORMS}", where="response_format")
    if response_format["type"] == "text":
        return None
    if response_format["type"] == "json_object":
        return {"type": "object"}
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("must be an object", where="response_format.json_schema.schema", fix=f"use {_FORMS}")
    return dict(schema)


class GuidedGrammar:
    """A `Grammar` (steering.py) that llguidance runs."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros(-(-vocab_size // 32), np.int32)

    def accept(self, token: int) -> None:
        """Raises RequestError when the grammar has grown past llguidance's limits."""
        if not self._matcher.consume_token(token):
            raise _refusal(self._matcher.get_error())

    def fill(self, mask: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())
        mask[:] = self._words.view(np.uint32)


def guided(tokenizer: Tokenizer, vocab_size: int, lark: str) -> GuidedGrammar:
    """A grammar in llguidance's Lark form as a matcher. Raises RequestError without the extra and for what it does not support."""
    try:
        from llguidance import LLMatcher, LLTokenizer
    except ImportError as error:
        raise RequestError("structured output needs the `guidance` extra", where="response_format", fix='pip install "lily-metal[guidance]"') from error
    known = _tokenizers.get(tokenizer)
    if known is None:
        known = _tokenizers[tokenizer] = LLTokenizer(tokenizer.spec, n_vocab=vocab_size, eos_token=sorted(tokenizer.eos_ids) or None)
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(lark), log_level=0)
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    return GuidedGrammar(matcher, vocab_size)


def json_rule(schema: Mapping[str, Any]) -> str:
    """The part of a Lark rule that stands for JSON of a schema. Raises RequestError for a schema that is not JSON or too large."""
    try:
        text = json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON ({error})", where="response_format") from error
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestError(f"the schema has {len(text)} bytes, at most {MAX_SCHEMA_BYTES} are supported", where="response_format")
    return f"%json {text}"


def _refusal(message: str) -> RequestError:
    return RequestError(f"the schema is not supported: {' '.join(message.split())[:300]}", where="response_format",
                        fix="leave out what the message names")
