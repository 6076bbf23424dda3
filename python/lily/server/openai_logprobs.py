"""Log probabilities in OpenAI's two forms: a list of entries for chat, parallel lists for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ..logprobs import TokenLogprob, TopLogprob

_LEAST = -9999.0  # OpenAI's value for what is too unlikely to say; JSON has no infinity


def chat_entries(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """`logprobs` of a chat choice; None without tokens."""
    if not tokens:
        return None
    return {"content": [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in tokens], "refusal": None}


def _entry(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": _name(token.bytes), "logprob": max(token.logprob, _LEAST), "bytes": list(token.bytes)}


def _name(data: bytes) -> str:
    """A token's text; one that is part of a character as its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """`logprobs` of a completion's chunks. text_offset counts characters of the answer from its beginning."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def entries(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The parallel lists; None without tokens."""
        if not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.bytes))
        tops = [{_name(other.bytes): max(other.logprob, _LEAST) for other in token.top} or None for token in tokens]
        return {
            "tokens": [_name(token.bytes) for token in tokens], "token_logprobs": [max(token.logprob, _LEAST) for token in tokens],
            "top_logprobs": tops if any(tops) else None, "text_offset": offsets,
        }
