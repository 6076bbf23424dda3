"""Tokens of preprocessed Metal source, each with the file and line that it came from."""
from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
    (?P<directive>^[ \t]*\#[^\n]*$)
  | (?P<space>\s+)
  | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<number>0[xX][0-9a-fA-F']+[uUlL]*|(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?:bf|BF|[fFhHuUlL]*))
  | (?P<name>[A-Za-z_]\w*)
  | (?P<operator>\[\[|::|->|<<=|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|.)
    """,
    re.M | re.S | re.X,
)
_LINE = re.compile(r'\s*#\s*(?:line\s+)?(\d+)\s+"((?:\\.|[^"\\])*)"')


class Token:
    """kind, text, the text to write instead (`out`), and where it is."""

    __slots__ = ("kind", "text", "out", "file", "line")

    def __init__(self, kind: str, text: str, file: str, line: int):
        self.kind, self.text, self.out, self.file, self.line = kind, text, text, file, line

    def where(self) -> str:
        return f"{self.file}:{self.line}"


def tokenize(text: str) -> list[Token]:
    """All tokens, white space and directives included, so that joining their texts gives `text` back."""
    tokens, file, line = [], "?", 1
    for match in _TOKEN.finditer(text):
        kind, piece = match.lastgroup, match.group()
        tokens.append(Token(kind, piece, file, line))
        marker = _LINE.match(piece) if kind == "directive" else None
        if marker:                       # the line after the marker has its number
            file, line = marker.group(2), int(marker.group(1)) - 1
        else:
            line += piece.count("\n")
    return tokens


class Cursor:
    """Index-based view of the significant tokens (no white space, no directives)."""

    def __init__(self, text: str):
        self.all = tokenize(text)
        self.tokens = [t for t in self.all if t.kind not in ("space", "directive")]

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def where(self, i: int) -> str:
        return self.tokens[min(i, len(self.tokens) - 1)].where()

    def span(self, a: int, b: int) -> list[str]:
        return [t.text for t in self.tokens[a:b]]

    def text(self, a: int, b: int) -> str:
        return " ".join(self.span(a, b))

    def blank(self, a: int, b: int) -> None:
        for t in self.tokens[a:b]:
            t.out = ""

    def close(self, i: int) -> int:
        """Index of the bracket that closes the one at i."""
        opening = self.at(i)
        closing = {"(": ")", "[": "]", "{": "}"}[opening]
        depth = 0
        for j in range(i, len(self.tokens)):
            if self.at(j) == opening or (opening == "[" and self.at(j) == "[["):
                depth += 2 if self.at(j) == "[[" else 1
            elif self.at(j) == closing:
                depth -= 1
                if depth == 0:
                    return j
        raise_at(self, i, f"'{opening}' is never closed")

    def close_attribute(self, i: int) -> int:
        """Index behind the `]]` of the attribute that starts with `[[` at i."""
        depth = 0
        for j in range(i, len(self.tokens)):
            text = self.at(j)
            depth += {"[[": 2, "[": 1, "]": -1}.get(text, 0)
            if depth == 0:
                return j + 1
        raise_at(self, i, "'[[' is never closed")

    def close_angle(self, i: int) -> int | None:
        """Index of the `>` that closes the template argument list at i, None if it is none."""
        depth, j = 0, i
        while j < len(self.tokens):
            text = self.at(j)
            if text in ("(", "["):
                j = self.close(j)
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return j
            elif text in (";", "{", "}"):
                return None
            j += 1
        return None

    def output(self) -> str:
        return "".join(t.out for t in self.all)


def raise_at(cursor: Cursor, i: int, message: str):
    from errors import SourceError

    raise SourceError([f"{cursor.where(i)}: error: {message}"])
