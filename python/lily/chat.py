"""Chat templates: messages to token ids, such that nothing a user writes can become a control token.

Control strings inside messages and tools are broken up by a mark, the template is rendered, the result is cut at the
control strings that are left, which are the template's own, and the pieces between are encoded as ordinary text without
the mark.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .config_fields import read_json, token_text
from .errors import LilyError, RequestError, TemplateError
from .messages import json_copy, normal_messages, normal_tools
from .tokenizer import Tokenizer

# U+E000 by choice; others of the private-use areas stand in when a text itself holds it.
_MARKS = [range(0xE000, 0xF900), range(0xF0000, 0xF1000)]
_RESERVED = ("messages", "tools", "add_generation_prompt", "enable_thinking")
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A model's Jinja template with its tokenizer. Compiled on first use, so that raw completion works without one."""

    def __init__(self, source: str | None, tokenizer: Tokenizer, special_texts: Mapping[str, str] | None = None,
                 where: str = "chat template") -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._special_texts = dict(special_texts or {})
        self._where = where
        self._template: jinja2.Template | None = None
        # A text is safe when no control string can begin in it: mark every first character, not whole strings only,
        # since the template may put two texts (or a text and its own '>') next to each other.
        self._guards = sorted({text[0] for text in tokenizer.control if not text[0].isalnum()})
        self._guarded_whole = [text for text in tokenizer.control if text[0].isalnum()]

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """``chat_template.jinja``, else the ``chat_template`` of ``chat_template.json`` or ``tokenizer_config.json``."""
        folder = Path(folder)
        settings_path = folder / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.is_file() else {}
        special = {name: text for name in _SPECIAL_NAMES if (text := token_text(settings.get(name))) is not None}
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), tokenizer, special, str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise TemplateError(f"the chat template cannot be read ({error})", where=str(path)) from error
        path = folder / "chat_template.json"
        if path.is_file():
            return cls(_chosen(read_json(path).get("chat_template")), tokenizer, special, str(path))
        return cls(_chosen(settings.get("chat_template")), tokenizer, special, str(settings_path))

    def render(self, messages: object, *, tools: object = None, enable_thinking: bool | None = None,
               add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt as text, for people to read. Arguments and errors as for :meth:`encode`."""
        text, mark = self._render(messages, tools, enable_thinking, add_generation_prompt, extra)
        return text.replace(mark, "")

    def encode(self, messages: object, *, tools: object = None, enable_thinking: bool | None = None,
               add_generation_prompt: bool = True, **extra: Any) -> list[int]:
        """Token ids of the prompt.

        ``enable_thinking`` reaches the template only when it is not None; ``extra`` are further template arguments.
        Raises RequestError for messages that are not acceptable to us or (in its own words) to the template, TemplateError
        for a template that is missing or cannot be rendered.
        """
        text, mark = self._render(messages, tools, enable_thinking, add_generation_prompt, extra)
        ids: list[int] = []
        for piece in self._tokenizer.split_control(text):
            ids += [piece] if isinstance(piece, int) else self._tokenizer.encode(piece.replace(mark, ""))
        return ids

    def _render(self, messages: object, tools: object, enable_thinking: bool | None, add_generation_prompt: bool,
                extra: Mapping[str, Any]) -> tuple[str, str]:
        for name in extra:
            if name in _RESERVED or name in _SPECIAL_NAMES:
                raise RequestError(f"the template argument {name!r} is reserved")
        given = {**json_copy(dict(extra), "template arguments"), "messages": normal_messages(messages), "tools": normal_tools(tools)}
        if enable_thinking is not None:
            given["enable_thinking"] = bool(enable_thinking)
        mark = self._free_mark(given)
        template = self._compiled()
        try:
            text = template.render(**self._special_texts, **self._guard(given, mark), add_generation_prompt=add_generation_prompt)
        except LilyError:
            raise
        except Exception as error:  # whatever a template does wrong: undefined values, wrong types, sandbox refusals
            raise TemplateError(f"the chat template cannot be rendered ({type(error).__name__}: {error})", where=self._where) from error
        return text, mark

    def _compiled(self) -> jinja2.Template:
        if self._template is None:
            if self._source is None:
                raise TemplateError("the model has no chat template", where=self._where, fix="use raw=True for plain completion")
            try:
                self._template = _environment().from_string(self._source)
            except Exception as error:  # jinja2's own errors, and what Python says of the code made from a template
                raise TemplateError(f"the chat template does not compile ({error})", where=self._where) from error
        return self._template

    def _free_mark(self, given: object) -> str:
        """A private-use character that occurs in none of the texts."""
        used = set(self._source or "")
        for text in _texts(given):
            if not text.isascii():
                used.update(text)
        for marks in _MARKS:
            for code in marks:
                if chr(code) not in used:
                    return chr(code)
        raise RequestError("the messages use every private-use character")

    def _guard(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            for text in self._guarded_whole:
                value = value.replace(text, text[0] + mark + text[1:])
            for first in self._guards:
                value = value.replace(first, first + mark)
            return value
        if isinstance(value, list):
            return [self._guard(inner, mark) for inner in value]
        if isinstance(value, dict):
            return {self._guard(key, mark): self._guard(inner, mark) for key, inner in value.items()}
        return value


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)


def _chosen(entry: object) -> str | None:
    """A template entry: one text, or a list of named ones of which `default` is ours."""
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, Mapping)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that Hugging Face templates are written for."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
            sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML and sorts keys, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise RequestError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
