"""What Metal refuses and C++ for OpenCL would let pass: found in the tokens, with file and line."""
from __future__ import annotations

from declarations import ADDRESS_SPACES
from lexer import Cursor

REFUSED = {
    "double": "double does not exist in Metal",
    "goto": "goto does not exist in Metal",
    "throw": "exceptions do not exist in Metal",
    "try": "exceptions do not exist in Metal",
    "catch": "exceptions do not exist in Metal",
    "new": "dynamic memory does not exist in Metal",
    "delete": "dynamic memory does not exist in Metal",
    "virtual": "virtual functions do not exist in Metal",
    "dynamic_cast": "run-time type information does not exist in Metal",
    "typeid": "run-time type information does not exist in Metal",
    "thread_local": "thread_local does not exist in Metal",
    "asm": "inline assembly does not exist in Metal",
}
_TYPES = set(
    "bool char uchar short ushort int uint long ulong half bfloat float size_t int8_t uint8_t int16_t uint16_t int32_t uint32_t "
    "int64_t uint64_t".split()
) | {f"{t}{n}" for t in "bool char uchar short ushort int uint long ulong half bfloat float".split() for n in (2, 3, 4)}
_NOT_VARIABLES = {"using", "typedef", "template", "operator", "extern", "enum", "struct", "class", "union", "namespace", "friend", "static_assert"}


def lint(text: str) -> list[str]:
    """Messages `file:line: error: …` for the preprocessed source `text`."""
    return _Lint(text).run()


class _Lint:
    def __init__(self, text: str):
        self.c = Cursor(text)
        self.messages: list[str] = []

    def error(self, i: int, message: str) -> None:
        self.messages.append(f"{self.c.where(i)}: error: {message}")

    def run(self) -> list[str]:
        self._words()
        self._scopes()
        return self.messages

    def _words(self) -> None:
        c = self.c
        for i, token in enumerate(c.tokens):
            if token.kind != "name" or token.text not in REFUSED or c.at(i - 1) in (".", "->"):
                continue
            if token.text == "delete" and c.at(i - 1) == "=":
                continue                                # a deleted function
            self.error(i, REFUSED[token.text])

    def _scopes(self) -> None:
        """Walks declarations: program-scope variables, static locals, pointers without an address space."""
        c, scopes, start, depth, saved, i = self.c, ["namespace"], 0, 0, [], 0
        while i < len(c):
            text = c.at(i)
            if text == "[[":
                i = c.close_attribute(i)
                if depth == 0 and self._only_attributes(start, i):
                    start = i
                continue
            if text in ("(", "["):
                depth += 1
            elif text in (")", "]"):
                depth -= 1
            elif text == "{":
                kind = self._open(start, i, scopes[-1], depth)
                scopes.append(kind)
                saved.append(depth)
                depth, start = 0, i + 1
            elif text == "}":
                if not saved:
                    return
                scopes.pop()
                depth = saved.pop()
                if not depth:
                    start = i + 1
            elif text == ";" and depth == 0:
                self._declaration(start, i, scopes[-1])
                start = i + 1
            i += 1

    def _only_attributes(self, a: int, b: int) -> bool:
        i = a
        while i < b and self.c.at(i) == "[[":
            i = self.c.close_attribute(i)
        return i == b

    def _skip_template(self, a: int, b: int) -> int:
        while self.c.at(a) == "template" and self.c.at(a + 1) == "<":
            close = self.c.close_angle(a + 1)
            if close is None or close >= b:
                return a
            a = close + 1
        return a

    def _open(self, start: int, brace: int, outer: str, depth: int) -> str:
        if depth:
            return "initialiser"
        first = self._skip_template(start, brace)
        head = self.c.span(first, brace)
        if outer in ("namespace", "class"):
            if "namespace" in head or head[:1] == ["extern"]:
                return "namespace"
            if {"struct", "class", "union", "enum"} & set(head) and "(" not in head:
                return "class"
            if "(" in head and "=" not in head[: head.index("(")]:
                self._function(first, brace)
                return "function"
            self._declaration(start, brace, outer)
            return "initialiser"
        if outer == "initialiser":
            return "initialiser"
        if "=" in head or (head and head[-1] not in (")", "else", "do") and "(" not in head):
            self._declaration(start, brace, outer)
            return "initialiser"
        return "function"

    def _declaration(self, a: int, b: int, scope: str) -> None:
        c = self.c
        head = c.span(a, b)
        if not head:
            return
        if scope == "namespace":
            if head[0] == "template" or _NOT_VARIABLES & set(head):
                return
            before = head[: head.index("=")] if "=" in head else head
            if "(" in before and "function_constant" not in before:
                self._function(a, b)                   # a declaration of a function
                return
            if "constant" not in before and "constexpr" not in before:
                self.error(a, f"program-scope variable outside the constant address space: {' '.join(before)}")
        elif scope == "function":
            if "static" in head and "constexpr" not in head:
                self.error(a, f"static local variable: {' '.join(head[:6])}")
            self._local_pointer(a, b)

    def _local_pointer(self, a: int, b: int) -> None:
        """`float* p = …` needs to say which memory p points to."""
        c, i = self.c, a
        while c.at(i) in ("const", "volatile"):
            i += 1
        if c.at(i) not in _TYPES:
            return
        if c.at(i + 1) in ("*", "&") and c.tokens[i + 2 if c.at(i + 2) != "const" else i + 3].kind == "name":
            self.error(a, f"pointer or reference without an address space: {c.text(a, min(b, a + 5))}")

    def _function(self, a: int, b: int) -> None:
        """Parameters of the function whose head is a..b."""
        c, k = self.c, a
        while k < b and c.at(k) != "(":
            k = c.close_attribute(k) if c.at(k) == "[[" else k + 1
        if c.at(k - 1) in ("alignas", "decltype", "static_assert", "__attribute__") or k >= b:
            return
        end, start, depth, j = c.close(k), k + 1, 0, k + 1
        while j <= end:
            text = c.at(j)
            if (text == "," and depth == 0) or j == end:
                parameter = c.span(start, j)
                if {"*", "&"} & set(parameter) and not ADDRESS_SPACES & set(parameter):
                    self.error(start, f"pointer or reference parameter without an address space: {' '.join(parameter)}")
                start = j + 1
            elif text == "[[":
                j = c.close_attribute(j)
                continue
            depth += {"(": 1, "[": 1, "<": 1, "{": 1, ")": -1, "]": -1, ">": -1, "}": -1}.get(text, 0)
            j += 1
