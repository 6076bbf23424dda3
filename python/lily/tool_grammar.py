"""The grammar of tool calls in the model family's format: the offered names, and arguments of their declared types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .guidance import json_rule
from .tokenizer import Tokenizer
from .tool_arguments import choices, declared_types
from .tool_calls import CALL_CLOSE, CALL_OPEN, FUNCTION_CLOSE, FUNCTION_OPEN, PARAMETER_CLOSE, PARAMETER_OPEN


def answer_grammar(tokenizer: Tokenizer, *, schema: Mapping[str, Any] | None, tools: Iterable[Mapping[str, Any]] = (), several: bool = True) -> str:
    """Lark text of an answer that is JSON of `schema` (None: it must be a call), or one call of `tools`, or `several`.

    Parameters come in the schema's order, the required ones always. Strings are free text up to their closing tag, so their
    patterns and lengths are not enforced; other types are.
    """
    rules: list[str] = []
    answers = []
    if schema is not None:
        rules.append(f"answer: {json_rule(schema)}")
        answers.append("answer")
    functions = [_function(rules, f"f{index}", tool.get("function", tool)) for index, tool in enumerate(tools)]
    if functions:
        opening, closing = (f"<{text[1:-1]}>" if text in tokenizer.control else _literal(text) for text in (CALL_OPEN, CALL_CLOSE))
        rules.append(f"call: {opening} {_literal(chr(10) + FUNCTION_OPEN)} ({' | '.join(functions)}) {_literal(FUNCTION_CLOSE + chr(10))} {closing}")
        answers.append('call ("\\n" call)*' if several else "call")
    return "\n".join([f"start: {' | '.join(answers)}", *rules])


def _function(rules: list[str], name: str, function: Mapping[str, Any]) -> str:
    root = function.get("parameters")
    root = root if isinstance(root, Mapping) else {}
    properties = root.get("properties")
    required = root.get("required")
    parts = [_literal(f"{function['name']}>\n")]
    for index, (key, schema) in enumerate((properties if isinstance(properties, Mapping) else {}).items()):
        rule = f"{name}p{index}"
        _parameter(rules, rule, key, schema, root)
        parts.append(rule if isinstance(required, list) and key in required else f"{rule}?")
    rules.append(f"{name}: {' '.join(parts)}")
    return name


def _parameter(rules: list[str], rule: str, key: str, schema: object, root: Mapping[str, Any]) -> None:
    end = f"\n{PARAMETER_CLOSE}\n"
    types, listed = declared_types(schema, root), list(choices(schema, root))
    opening = _literal(f"{PARAMETER_OPEN}{key}>\n")
    if listed and all(isinstance(value, str) for value in listed) and types == {"string"}:
        rules.append(f"{rule}: {opening} ({' | '.join(_literal(value + end) for value in listed)})")
    elif types and "string" not in types and isinstance(schema, Mapping):
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        rules.append(f"{rule}v: {json_rule({**shared, **schema})}")
        rules.append(f"{rule}: {opening} {rule}v {_literal(end)}")
    else:
        rules.append(f"{rule}v[suffix={_literal(end)}]: /(.|\\n)*/")
        rules.append(f"{rule}: {opening} {rule}v")


def _literal(text: str) -> str:
    return json.dumps(text)
