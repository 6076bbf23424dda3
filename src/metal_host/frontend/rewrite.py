"""Rewrites preprocessed Metal source into C++ for OpenCL (or CUDA C++) with the engine's standard library.

What changes: address-space names, kernels (marked inline; entries are generated), `threadgroup`
variables, function constants, explicit instantiations with host names, literals, attributes. Everything
else is passed through, so that compiler messages keep their lines and columns.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field

from declarations import ADDRESS_SPACES, POSITIONS, Entry, FunctionConstant, Kernel, Parameter
from lexer import Cursor, raise_at
from literals import number


@dataclass(frozen=True)
class Dialect:
    """Spellings of the address spaces; `data`: of program-scope arrays."""
    device: str
    constant: str
    threadgroup: str
    thread: str
    data: str
    erased: bool = False         # address spaces are no part of a type
    pragmas: bool = False        # loop pragmas are passed on


# `constant` data and `device` data are two subsets of OpenCL's global memory: neither converts to the
# other, yet a struct can be copied from both (which OpenCL's own __constant does not allow).
OPENCL = Dialect("__attribute__((opencl_global_device))", "const __attribute__((opencl_global_host))", "__local", "__private", "__constant")
CUDA = Dialect("", "const", "", "", "__constant__", erased=True, pragmas=True)


@dataclass
class Scope:
    kind: str                    # namespace, class, function, block, initialiser
    kernel: bool = False         # function: a kernel
    start: int = 0               # first token of its head
    functions: set[tuple[str, ...]] = field(default_factory=set)   # namespace, class: definitions seen, without address spaces


@dataclass
class Rewriter:
    text: str
    dialect: Dialect = OPENCL
    kernels: dict[str, Kernel] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    constants: list[FunctionConstant] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    threadgroup_variables: int = 0

    def run(self) -> str:
        """Rewritten source. Faults that the compiler would not see are in `errors` afterwards."""
        self.c = Cursor(self.text)
        self.derived: dict[str, tuple[str, int, int]] = {}
        self.program_constants: set[int] = set()       # tokens `constant` that declare program-scope data
        self.pending_kernel = False
        self._walk()
        self._tokens()
        return self.c.output()

    def error(self, i: int, message: str) -> None:
        self.errors.append(f"{self.c.where(i)}: error: {message}")

    # -------------------------------------------------------------------------------- structure
    def _walk(self) -> None:
        c, scopes, start, i, depth = self.c, [Scope("namespace")], 0, 0, 0
        saved: list[int] = []                          # paren depths outside of braces inside parentheses
        while i < len(c):
            text = c.at(i)
            if i == start and depth == 0 and text not in ("}", ";"):
                after = self._statement(i, scopes)
                if after is not None:
                    i = start = after
                    continue
                text = c.at(i)
            if text == "[[":
                end = c.close_attribute(i)
                c.blank(i, end)
                i = end
                continue
            if text in ("(", "["):
                depth += 1
            elif text in (")", "]"):
                depth -= 1
            elif text == "{":
                if depth:
                    scopes.append(Scope("initialiser"))
                else:
                    scopes.append(self._scope(start, i, scopes[-1]))
                    scopes[-1].start = start
                saved.append(depth)
                depth = 0
                start = i + 1
            elif text == "}":
                if not saved:
                    raise_at(c, i, "'}' without '{'")
                self._drop_twin(scopes.pop(), i, scopes[-1])
                depth = saved.pop()
                if not depth:
                    start = i + 1
            elif (text == ";" or (text == ":" and c.at(i - 1) in ("public", "private", "protected"))) and depth == 0:
                start = i + 1
            i += 1
        if len(scopes) > 1:
            raise_at(c, len(c) - 1, "'{' is never closed")

    def _drop_twin(self, scope: Scope, end: int, outer: Scope) -> None:
        """Without address spaces, overloads for device and threadgroup memory with equal text are one function."""
        if not self.dialect.erased or scope.kind != "function" or scope.kernel or outer.kind not in ("namespace", "class"):
            return
        key = tuple(t for t in self.c.span(scope.start, end + 1) if t not in ADDRESS_SPACES)
        if key in outer.functions:
            self.c.blank(scope.start, end + 1)
        outer.functions.add(key)

    def _scope(self, start: int, brace: int, outer: Scope) -> Scope:
        head = self._without_template(self.c.span(start, brace))
        if outer.kind in ("namespace", "class"):
            if "namespace" in head or head[:1] == ["extern"]:
                return Scope("namespace")
            if {"struct", "class", "union", "enum"} & set(head) and "(" not in head:
                return Scope("class")
            if "(" in head:
                kernel, self.pending_kernel = self.pending_kernel, False
                return Scope("function", kernel)
            return Scope("initialiser")
        if outer.kind == "initialiser":
            return Scope("initialiser")
        if "=" in head and "(" not in head[: head.index("=")]:
            return Scope("initialiser") if "[" not in head[head.index("="):] else Scope("block", outer.kernel)
        return Scope("block", outer.kernel)

    @staticmethod
    def _without_template(head: list[str]) -> list[str]:
        if head[:2] != ["template", "<"]:
            return head
        depth = 0
        for n, text in enumerate(head):
            depth += {"<": 1, ">": -1}.get(text, 0)
            if text == ">" and depth == 0:
                return Rewriter._without_template(head[n + 1:])
        return head

    def _statement(self, i: int, scopes: list[Scope]) -> int | None:
        """Looks at the declaration or statement that starts at i; index behind it when it was replaced."""
        c, scope = self.c, scopes[-1]
        if scope.kind == "namespace":
            if c.at(i) == "template" and c.at(i + 1) != "<":
                return self._instantiation(i)
            end = self._head_end(i)
            if end is None:
                return None
            after = self._program_constant(i, end)
            if after is not None:
                return after
            self._kernel_head(i, end)
            return None
        if scope.kind == "class":
            end = self._head_end(i)
            if end is not None and "(" not in c.span(i, end):
                self._mark_program_constants(i, end)
            return None
        if scope.kind in ("function", "block"):
            k = i
            while c.at(k) in ("const", "volatile"):
                k += 1
            if c.at(k) == "threadgroup":
                return self._threadgroup_variable(i, k, scope)
            if c.at(k) in ("constant", "constexpr", "static"):
                end = self._head_end(i)
                if end is not None and not {"*", "&"} & set(self._before_initialiser(i, end)):
                    self._mark_program_constants(i, end)
        return None

    def _before_initialiser(self, i: int, end: int) -> list[str]:
        head = self.c.span(i, end)
        return head[: head.index("=")] if "=" in head else head

    def _head_end(self, i: int) -> int | None:
        """Index of the `;` or `{` that ends the declaration head at i."""
        c, depth = self.c, 0
        for j in range(i, len(c)):
            text = c.at(j)
            depth += {"(": 1, "[": 1, "[[": 2, ")": -1, "]": -1}.get(text, 0)
            if depth == 0 and text in (";", "{"):
                return j
        return None

    # -------------------------------------------------------------------------------- constants
    def _program_constant(self, i: int, end: int) -> int | None:
        c = self.c
        head = c.span(i, end)
        if "constant" not in head or "(" in self._before_initialiser(i, end) and "[[" not in head:
            return None
        if "function_constant" in head and c.at(end) == ";":
            bracket = head.index("[[")
            before = self._before_initialiser(i, end)
            if "(" in before[:bracket]:
                return None                            # a kernel with function constant arguments
            name = head[bracket - 1]
            index = head[head.index("function_constant") + 2]
            kind = "".join(t for t in head[: bracket - 1] if t not in ("constant", "const", "static", "constexpr"))
            self.constants.append(FunctionConstant(name, kind, index))
            c.blank(i, end + 1)
            return end + 1
        names = {f.name for f in self.constants} | set(self.derived)
        if "=" in head and names & set(head):
            # Computed from function constants, so it has no value at compile time: a function instead.
            equals = head.index("=")
            name = head[equals - 1]
            kind = "".join(t for t in head[: equals - 1] if t not in ("constant", "const", "static", "constexpr"))
            self.derived[name] = (kind, i + equals + 1, end)
            c.blank(i, i + equals + 1)
            c.tokens[i].out = f"static inline {kind} lily_derived_{name}() {{ return {kind}("
            c.tokens[end].out = "); }"
            return end + 1
        if "(" not in self._before_initialiser(i, end):
            self._mark_program_constants(i, end)
        return None

    def _mark_program_constants(self, i: int, end: int) -> None:
        """`constant` here names OpenCL's __constant, or nothing for a constexpr that is no array."""
        c, before = self.c, self._before_initialiser(i, end)
        scalar = "constexpr" in before and "[" not in before
        for k in range(i, i + len(before)):
            if c.at(k) == "constant":
                c.tokens[k].out = "" if scalar else f"const {self.dialect.data}" if "const" not in before and "constexpr" not in before else self.dialect.data
                self.program_constants.add(k)

    # -------------------------------------------------------------------------------- kernels
    def _kernel_head(self, i: int, end: int) -> None:
        c, k, is_template = self.c, i, False
        if c.at(k) == "template":
            close = c.close_angle(k + 1)
            if close is None:
                return
            is_template, k = True, close + 1
        is_kernel, max_threads = False, "0"
        while k < end and c.at(k) != "(":
            if c.at(k) == "[[":
                behind = c.close_attribute(k)
                attribute = c.span(k, behind)
                is_kernel |= "kernel" in attribute
                if "max_total_threads_per_threadgroup" in attribute:
                    n = k + attribute.index("max_total_threads_per_threadgroup") + 1
                    max_threads = c.text(n + 1, c.close(n))
                k = behind
                continue
            if c.at(k) == "kernel":
                is_kernel = True
                c.tokens[k].out = ""
            k += 1
        if not is_kernel or c.at(k) != "(":
            return
        close = c.close(k)
        tail = close + 1                               # attributes may also follow the parameters
        while c.at(tail) == "[[":
            behind = c.close_attribute(tail)
            attribute = c.span(tail, behind)
            if "max_total_threads_per_threadgroup" in attribute:
                n = tail + attribute.index("max_total_threads_per_threadgroup") + 1
                max_threads = c.text(n + 1, c.close(n))
            tail = behind
        kernel = Kernel(c.at(k - 1), c.tokens[k - 1].line, is_template, self._parameters(k + 1, close), max_threads)
        if kernel.name in self.kernels and c.at(end) == "{":
            self.error(k - 1, f"kernel {kernel.name} is defined twice")
        self.kernels[kernel.name] = kernel
        self.pending_kernel = c.at(end) == "{"
        c.tokens[k - 2].out = "static LILY_INLINE " + c.at(k - 2)      # the return type; an attribute would be blanked
        if not is_template:
            self.entries.append(Entry(kernel.name, kernel.name, kernel))

    def _parameters(self, a: int, b: int) -> list[Parameter]:
        c, out, used, start = self.c, [], 0, a
        depth, j, spans = 0, a, []
        while j < b:
            text = c.at(j)
            if text == "<" and depth == 0:
                j = c.close_angle(j) or j
            depth += {"(": 1, "[": 1, "[[": 2, "{": 1, ")": -1, "]": -1, "}": -1}.get(text, 0)
            if text == "," and depth == 0:
                spans.append((start, j))
                start = j + 1
            j += 1
        if start < b:
            spans.append((start, b))
        for p, q in spans:
            bracket = next((k for k in range(p, q) if c.at(k) == "[["), q)
            name, declared = c.at(bracket - 1), c.span(p, bracket)
            parameter = Parameter(name, "")
            for k in range(bracket, q):
                if c.at(k) in ("buffer", "threadgroup") and c.at(k + 1) == "(":
                    parameter.attribute, parameter.index = c.at(k), int(c.text(k + 2, c.close(k + 1)), 0)
                elif c.at(k) in POSITIONS:
                    parameter.attribute = c.at(k)
            if not parameter.attribute:
                if not {"*", "&"} & set(declared):
                    self.error(p, f"kernel parameter {name} has no attribute")
                parameter.attribute, parameter.index = "buffer", used
            if parameter.attribute in ("buffer", "threadgroup"):
                spaces = [t for t in declared if t in ADDRESS_SPACES]
                parameter.space = spaces[0] if spaces else ""
                expected = ("threadgroup",) if parameter.attribute == "threadgroup" else ("device", "constant")
                if parameter.space not in expected:
                    self.error(p, f"kernel parameter {name} must point to {' or '.join(expected)} memory")
                parameter.reference = "&" in declared
                parameter.writable = parameter.space == "device" and "const" not in declared
                limit = 31
                if parameter.index >= limit:
                    self.error(p, f"buffer index {parameter.index} is above {limit - 1}")
            if parameter.attribute == "buffer":
                used = parameter.index + 1
            out.append(parameter)
        taken = [(p.attribute, p.index) for p in out if p.space]
        for n, one in enumerate(taken):
            if one in taken[:n]:
                self.error(a, f"{one[0]} index {one[1]} is used twice")
        return out

    def _instantiation(self, i: int) -> int | None:
        """`template [[host_name("…")]] [[kernel]] void f<…>(…);`"""
        c, end, k = self.c, i, i + 1
        while c.at(end) != ";":
            end += 1
            if end >= len(c):
                raise_at(c, i, "explicit instantiation without ';'")
        name, is_kernel = None, False
        while c.at(k) == "[[":
            behind = c.close_attribute(k)
            attribute = c.span(k, behind)
            if "host_name" in attribute:
                n = k + attribute.index("host_name") + 1
                name = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', c.text(n + 1, c.close(n))))
            is_kernel |= "kernel" in attribute
            k = behind
        if c.at(k) == "kernel":
            is_kernel, k = True, k + 1
        if not is_kernel and name is None:
            return None
        while c.at(k) == "[[":
            k = c.close_attribute(k)
        k = c.close(k + 1) + 1 if c.at(k) == "decltype" else k + 1
        function = c.at(k)
        close = c.close_angle(k + 1) if c.at(k + 1) == "<" else None
        if function not in self.kernels:
            raise_at(c, k, f"{function} is not a kernel template of this file")
        callee = c.text(k, close + 1) if close else function
        entry = Entry(name or function, callee, self.kernels[function])
        if any(e.name == entry.name for e in self.entries):
            self.error(i, f"two kernels are named {entry.name}")
        self.entries.append(entry)
        c.blank(i, end + 1)
        return end + 1

    def _threadgroup_variable(self, i: int, k: int, scope: Scope) -> int | None:
        c, end = self.c, self._head_end(i)
        if end is None or c.at(end) == "{":
            if end is not None and "=" not in c.span(i, end):
                return None
            self.error(k, "a threadgroup variable cannot have an initialiser")
            return None
        p = k + 1
        while c.at(p) in ("const", "volatile", "typename"):
            p += 1
        first = p
        while True:                                    # the type: name, template arguments, ::member
            p += 1
            if c.at(p) == "<":
                close = c.close_angle(p)
                if close is None:
                    raise_at(c, p, "cannot read the type of this threadgroup variable")
                p = close + 1
            if c.at(p) != "::":
                break
            p += 1
        if c.at(p) in ("*", "&", "const"):
            return None                                # a pointer or reference into threadgroup memory
        if not scope.kernel:
            self.error(k, "threadgroup variable outside a kernel function")
        kind, out = c.text(first, p), []
        while p < end:
            name, suffix, p = c.at(p), "", p + 1
            while c.at(p) == "[":
                close = c.close(p)
                suffix += "".join(self._constant_use(t) for t in c.span(p, close + 1))
                p = close + 1
            while c.at(p) == "[[":
                p = c.close_attribute(p)
            if c.at(p) == "=":
                self.error(k, "a threadgroup variable cannot have an initialiser")
                break
            out.append(f"LILY_THREADGROUP({self.threadgroup_variables}, {name}, {kind} {suffix})")
            self.threadgroup_variables += 1
            p += 1
        c.blank(i, end + 1)
        c.tokens[i].out = " ".join(out)
        return end + 1

    # -------------------------------------------------------------------------------- tokens
    def _constant_use(self, name: str) -> str:
        for n, constant in enumerate(self.constants):
            if constant.name == name:
                return f"(lily_constant<{constant.type}, {n}>())"
        return f"lily_derived_{name}()" if name in self.derived else name

    def _tokens(self) -> None:
        c = self.c
        names = {f.name for f in self.constants} | set(self.derived)
        for i, token in enumerate(c.tokens):
            if token.out != token.text:
                continue
            if token.kind == "number":
                token.out = number(token.text)
            elif token.kind != "name":
                continue
            elif token.text == "is_function_constant_defined":
                name = c.at(i + 2)
                slot = next((n for n, f in enumerate(self.constants) if f.name == name), None)
                if slot is None:
                    self.error(i, f"{name} is not a function constant")
                    continue
                self.constants[slot].required = False
                c.blank(i, i + 4)
                token.out = f"lily_constant_defined<{slot}>()"
            elif token.text in names and c.at(i - 1) not in (".", "->", "::"):
                token.out = self._constant_use(token.text)
            elif token.text == "device":
                token.out = self.dialect.device
            elif token.text == "threadgroup":
                token.out = self.dialect.threadgroup
            elif token.text == "thread":
                behind = c.at(i - 2) if c.at(i - 1) == "const" else c.at(i - 1)
                token.out = "" if behind == ")" else self.dialect.thread       # `) thread` qualifies a member function
            elif token.text == "constant" and i not in self.program_constants:
                behind = c.at(i - 2) if c.at(i - 1) == "const" else c.at(i - 1)
                token.out = "" if behind == ")" else self.dialect.constant
        for token in c.all:
            if token.kind == "directive":
                marker = re.match(r'\s*#\s*(\d+)\s+("[^"]*")', token.text)
                token.out = f"#line {marker.group(1)} {marker.group(2)}" if marker else self._pragma(token.text)

    def _pragma(self, text: str) -> str:
        if not self.dialect.pragmas or not re.match(r"\s*#\s*pragma\b", text):
            return ""
        return re.sub(r"clang\s+loop\s+unroll\((full|enable)\)", "unroll", text)
