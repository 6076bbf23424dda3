"""Argument structs of the kernels, read from `metal/common.h` so that host and kernels share one definition.

Every field there is a four-byte scalar (`uint`, `int`, `float`) or an array of them, so a struct is packed without
padding and `offset = 4 * index`. `tests/test_kernel_args.py` proves that the compiled host and the kernels agree.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

_CODES = {"uint": "I", "int": "i", "float": "f"}


@dataclass(frozen=True)
class Field:
    """One member: `count` scalars of struct code `code` at byte `offset`."""

    name: str
    code: str
    count: int
    offset: int


@dataclass(frozen=True)
class Struct:
    """A kernel argument struct: fields in declaration order and the size in bytes."""

    name: str
    fields: tuple[Field, ...]
    size: int

    def field(self, name: str) -> Field:
        return next(f for f in self.fields if f.name == name)

    def pack(self, values: Mapping[str, float | int]) -> bytes:
        """Packs one value per scalar field. Raises KeyError for a missing and ValueError for an unknown field."""
        unknown = values.keys() - {f.name for f in self.fields}
        if unknown:
            raise ValueError(f"{self.name} has no field {', '.join(sorted(unknown))}")
        out = bytearray(self.size)
        for f in self.fields:
            struct.pack_into("<" + f.code, out, f.offset, values[f.name])
        return bytes(out)


def parse_structs(text: str) -> dict[str, Struct]:
    """Finds every `struct Name { uint a, b; float c; uint d[N]; };` of a header without nested types."""
    text = re.sub(r"//[^\n]*", "", text)
    constants = {m[1]: int(m[2].rstrip("u")) for m in re.finditer(r"#define\s+(\w+)\s+(\d+u?)\b", text)}
    structs = {}
    for m in re.finditer(r"struct\s+(\w+)\s*\{([^}]*)\}\s*;", text):
        fields: list[Field] = []
        offset = 0
        for statement in filter(None, (s.strip() for s in m[2].split(";"))):
            kind, names = statement.split(None, 1)
            for declarator in names.split(","):
                name, _, extent = declarator.strip().rstrip("]").partition("[")
                count = (constants[extent] if extent in constants else int(extent)) if extent else 1
                fields.append(Field(name, _CODES[kind], count, offset))
                offset += 4 * count
        structs[m[1]] = Struct(m[1], tuple(fields), offset)
    return structs


def common_header() -> str:
    """The text of `metal/common.h` as installed beside the kernels."""
    return (resources.files("lily") / "_kernels" / "common.h").read_text(encoding="utf-8")


@cache
def structs() -> dict[str, Struct]:
    """All structs of the installed header by name."""
    return parse_structs(common_header())


@cache
def constant(name: str) -> int:
    """An integer `#define` of the installed header, for example `LILY_HISTORY`."""
    m = re.search(rf"#define\s+{name}\s+(\d+)", common_header())
    if m is None:
        raise KeyError(name)
    return int(m[1])
