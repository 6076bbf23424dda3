"""Typed access to JSON objects: each complaint names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError


@dataclass(frozen=True)
class Fields:
    """One JSON object, the file it came from, and the path of keys that leads to it (ends with a dot, or is empty)."""

    raw: Mapping[str, Any]
    where: str
    prefix: str = ""

    def error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.prefix}{key} {what}", where=self.where)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {value!r}, expected an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # an integer beyond every float
                number = math.inf
            if math.isfinite(number):
                return number
        raise self.error(key, f"is {str(value)[:40]}, expected a finite number")

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, expected true or false")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError names the file when it cannot be read, parsed, or is not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON ({error})", where=str(path), fix="download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError("must hold a JSON object", where=str(path))
    return value


def eos_ids(fields: Fields, value: Any) -> list[int]:
    """Ids of an ``eos_token_id`` entry: null, one id or a list of ids."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int):
            raise fields.error("eos_token_id", f"holds {token!r}, expected token ids")
    return list(values)


def token_text(entry: Any) -> str | None:
    """Text of a special-token entry of tokenizer_config.json: a string, or an object with ``content``."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def tokenizer_eos_ids(folder: Path) -> list[int]:
    """The id of the tokenizer's ``eos_token``, if the folder names one."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return []
    raw = read_json(path)
    eos = token_text(raw.get("eos_token"))
    if eos is None:
        return []
    decoder = raw.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        return [int(key) for key, entry in decoder.items() if token_text(entry) == eos and key.isascii() and key.isdigit()]
    spec = folder / "tokenizer.json"
    if not spec.is_file():
        return []
    return [token for text, token, _ in added_tokens(read_json(spec), str(spec)) if text == eos]


def added_tokens(spec: Mapping[str, Any], where: str) -> list[tuple[str, int, bool]]:
    """(text, id, special) of a tokenizer.json's `added_tokens`; CheckpointError names the file when they are of another form."""
    entries = spec.get("added_tokens") or []
    good = isinstance(entries, list) and all(
        isinstance(e, Mapping) and isinstance(e.get("content"), str) and isinstance(e.get("id"), int)
        for e in entries
    )
    if not good:
        raise CheckpointError("added_tokens must be a list of objects with a content and an id", where=where, fix="copy the file from the original model")
    return [(e["content"], e["id"], bool(e.get("special"))) for e in entries]
