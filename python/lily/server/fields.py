"""Reads a request's JSON body: unknown fields are ignored, null counts as absent, wrong types are a 400 that names the field."""

from __future__ import annotations

import json
import math
from typing import Any

from .errors import ApiError

_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer", float: "a number", type(None): "null"}


def parse_body(raw: bytes) -> Fields:
    """The body's object. Raises ApiError 400 for anything that is not a JSON object."""
    try:
        body = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be a JSON object, got {_named(body)}.", code="invalid_json")
    return Fields(body)


class Fields:
    """An object of a request, read field by field. ``where`` is the path to it, for messages."""

    def __init__(self, body: dict[str, Any], where: str = "") -> None:
        self._body = body
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._body.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it is, None if absent."""
        return self._body.get(name)

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def text(self, name: str) -> str | None:
        value = self._typed(name, "a string", str)
        return None if value is None else str(value)

    def boolean(self, name: str) -> bool | None:
        value = self._typed(name, "a boolean", bool)
        return None if value is None else bool(value)

    def integer(self, name: str) -> int | None:
        value = self._typed(name, "an integer", int)
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        value = self._typed(name, "a number", int, float)
        if value is not None and not math.isfinite(value):
            raise ApiError(400, f"Invalid value for '{self.path(name)}': must be finite.", param=self.path(name), code="invalid_value")
        return value  # type: ignore[no-any-return]

    def array(self, name: str) -> list[Any] | None:
        value = self._typed(name, "an array", list)
        return None if value is None else list(value)

    def object(self, name: str) -> Fields | None:
        value = self._typed(name, "an object", dict)
        return None if value is None else Fields(value, self.path(name))

    def objects(self, name: str) -> list[Fields]:
        """An array of objects; absent is empty."""
        found = []
        for index, value in enumerate(self.array(name) or []):
            where = f"{self.path(name)}[{index}]"
            if not isinstance(value, dict):
                raise wrong_type(where, "an object", value)
            found.append(Fields(value, where))
        return found

    def required(self, name: str) -> Any:
        """The value, or ApiError if it is absent."""
        if name not in self:
            raise ApiError(400, f"Missing required parameter: '{self.path(name)}'.", param=self.path(name), code="missing_required_parameter")
        return self._body[name]

    def refuse(self, name: str, why: str) -> ApiError:
        """An error about this field's value, to be raised."""
        return ApiError(400, f"Invalid value for '{self.path(name)}': {why}", param=self.path(name), code="invalid_value")

    def _typed(self, name: str, expected: str, *kinds: type) -> Any:
        value = self._body.get(name)
        if value is None or isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
            return value
        raise wrong_type(self.path(name), expected, value)


def wrong_type(where: str, expected: str, value: object) -> ApiError:
    """OpenAI's words for a wrong type."""
    return ApiError(400, f"Invalid type for '{where}': expected {expected}, but got {_named(value)} instead.", param=where, code="invalid_type")


def _named(value: object) -> str:
    return _NAMES.get(type(value), type(value).__name__)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
