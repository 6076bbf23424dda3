"""Types for the arguments of a tool call: the call format carries text, the tool's JSON schema says what it means.

Templates write a string as it is and everything else as JSON, so one text can mean two things ("5"); only the schema
tells them apart. Nothing is ever refused: what does not fit its type stays what was written.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .errors import RequestError
from .messages import json_copy

# Names outside JSON schema that tool authors write all the same.
_ALIASES = {
    "str": "string", "text": "string", "enum": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "map": "object", "list": "array", "tuple": "array", "none": "null",
}
_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_MAX_REFERENCES = 16
_MAX_LITERAL = 100_000  # characters of a Python literal that are worth parsing
_WHOLE_DECIMAL = re.compile(r"([+-]?\d+)(?:\.0*)?")
_MISSING = object()


class ArgumentTypes:
    """Schemas of the offered tools: function name and parameter name to a parameter's declared types."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None) -> None:
        self._functions: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            schema = function.get("parameters")
            self._functions.setdefault(function["name"], schema if isinstance(schema, Mapping) else {})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the offered functions."""
        return tuple(self._functions)

    def is_plain_string(self, function: str, parameter: str) -> bool:
        """Whether any text at all is the value itself, so that it can be passed on before its end is known."""
        root = self._functions.get(function, {})
        schema = self._parameter(function, parameter)
        return declared_types(schema, root) == {"string"} and not list(choices(schema, root))

    def convert(self, function: str, parameter: str, text: str) -> Any:
        """The value that ``text`` stands for; unknown functions and parameters count as undeclared."""
        return convert(text, self._parameter(function, parameter), self._functions.get(function, {}))

    def _parameter(self, function: str, parameter: str) -> object:
        root = self._functions.get(function, {})
        for schema in _branches(root, root):
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and parameter in properties:
                return properties[parameter]
        return root.get("additionalProperties")


def convert(text: str, schema: object, root: Mapping[str, Any] | None = None) -> Any:
    """The value of one parameter's text.

    schema: the parameter's JSON schema, anything else for none. root: the schema that its ``$ref`` point into.
    Where a string is allowed beside other types, the others must be written exactly as JSON writes them.
    Without a declared type only objects and arrays are taken for JSON.
    """
    root = root or {}
    for choice in choices(schema, root):
        if choice == text if isinstance(choice, str) else _json(text) == choice and type(_json(text)) is type(choice):
            return choice
    types = declared_types(schema, root)
    if types == {"string"}:
        return text
    if not types:
        value = _json(text)
        return value if isinstance(value, (dict, list)) else text
    if "string" in types:
        value = _json(text)
        exact = isinstance(value, (dict, list)) or (value is not _MISSING and not isinstance(value, str) and json.dumps(value) == text)
        return value if exact and _fits(value, types) else text
    return _without_string(text.strip(), types, text)


def declared_types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows, empty if it doesn't say: unions, references and hints such as ``enum`` included."""
    found: set[str] = set()
    for branch in _branches(schema, root):
        found |= _own_types(branch)
    return found


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    found = {_ALIASES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)} & _TYPES
    if not found:
        if "enum" in schema or "const" in schema:
            found = {_type_of(value) for value in _own_choices(schema)}
        elif "properties" in schema:
            found = {"object"}
        elif "items" in schema or "prefixItems" in schema:
            found = {"array"}
        elif "pattern" in schema or "minLength" in schema or "maxLength" in schema or "format" in schema:
            found = {"string"}
    if found and schema.get("nullable") is True:
        found.add("null")
    return found


def _branches(schema: object, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schema and every alternative it names."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return
    yield schema
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key)
        for branch in inner if isinstance(inner, list) else ():
            yield from _branches(branch, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield from _branches(_pointed(root, reference), root, depth + 1)


def _pointed(root: Mapping[str, Any], reference: str) -> object:
    """What a local JSON pointer such as ``#/$defs/Place`` points to."""
    at: object = root
    for step in reference.lstrip("#").split("/")[1:]:
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at


def choices(schema: object, root: Mapping[str, Any]) -> Iterator[Any]:
    """The values that a schema lists: `enum` and `const`, its alternatives' included."""
    for branch in _branches(schema, root):
        yield from _own_choices(branch)


def _own_choices(schema: Mapping[str, Any]) -> list[Any]:
    values = schema.get("enum")
    return [*(values if isinstance(values, list) else []), *([schema["const"]] if "const" in schema else [])]


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _fits(value: Any, types: set[str]) -> bool:
    kind = _type_of(value)
    if kind == "integer" or kind == "number" and value.is_integer():
        return bool(types & {"integer", "number"})
    return kind in types


def _without_string(text: str, types: set[str], written: str) -> Any:
    """The value of a text whose types leave no room for a string, read as generously as is safe."""
    folded = text.lower()
    if "null" in types and folded in ("null", "none"):
        return None
    if "boolean" in types and folded in ("true", "false"):
        return folded == "true"
    if "integer" in types and (whole := _whole(text)) is not None:
        return whole
    if "number" in types and (number := _number(text)) is not None:
        return number
    value = _json(text)
    if value is _MISSING and types & {"object", "array"}:
        value = _python_literal(text)
    # What is JSON of another type is still clearer to the tool than the same in quotes.
    return written if value is _MISSING else value


def _whole(text: str) -> int | None:
    if match := _WHOLE_DECIMAL.fullmatch(text):
        try:
            return int(match[1])
        except ValueError:  # more digits than Python converts
            return None
    number = _number(text)
    return int(number) if isinstance(number, float) and number.is_integer() and abs(number) <= 2**53 else None


def _number(text: str) -> int | float | None:
    if re.fullmatch(r"[+-]?\d+", text):
        return _whole(text)
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def _json(text: str) -> Any:
    """The JSON value of a text, or _MISSING; stricter than json.loads, so that it can always be written again."""
    try:
        return json_copy(json.loads(text, parse_constant=_refuse, parse_float=_finite), "value")
    except (ValueError, RecursionError, RequestError):
        return _MISSING


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _python_literal(text: str) -> Any:
    """Objects and arrays written as Python does ({'a': True}), or _MISSING."""
    if len(text) > _MAX_LITERAL or not text.startswith(("{", "[", "(")):
        return _MISSING
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = json_copy(ast.literal_eval(text), "value")
            json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, RequestError):
        return _MISSING
    return value
