"""Lists the structs of metal/common.h as C++ initialisers: names come from the text, sizes and offsets from the compiler.

Usage: make_layouts.py COMMON_H OUTPUT
"""

import re
import sys


def structs(text: str) -> list[tuple[str, list[str]]]:
    """Name and field names of every `struct Name { … };` in the text."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    found = []
    for name, body in re.findall(r"\bstruct\s+(\w+)\s*\{([^}]*)\}", text):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            names = declaration.split(None, 1)[1]  # without the type
            fields += [re.match(r"\w+", part.strip()).group() for part in names.split(",")]
        found.append((name, fields))
    return found


def main(source: str, output: str) -> None:
    lines = []
    with open(source, encoding="utf-8") as file:
        for name, fields in structs(file.read()):
            entries = ", ".join(f'{{"{field}", offsetof({name}, {field})}}' for field in fields)
            lines.append(f'{{"{name}", sizeof({name}), {{{entries}}}}},\n')
    with open(output, "w", encoding="utf-8") as file:
        file.writelines(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
