"""One self-contained Metal text per kernel family: newLibraryWithSource: has no include path.

    amalgamate.py --metal metal --out OUTDIR [--families a,b]

Project includes (`#include "quant.h"`) are replaced by the file's text, each once; #line directives keep
the places of errors. Host independent: the same text is what a Mac compiles.
"""
from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")


def amalgamate(path: Path) -> str:
    """Text of the kernel file at `path` with its project includes in place."""
    lines: list[str] = []
    _append(path, lines, set())
    return "\n".join(lines) + "\n"


def _append(path: Path, lines: list[str], seen: set[Path]) -> None:
    seen.add(path.resolve())
    lines.append(f'#line 1 "{path.name}"')
    for number, line in enumerate(path.read_text().splitlines(), 1):
        include = _INCLUDE.match(line)
        if include:
            target = path.parent / include.group(1)
            if not target.is_file():
                from errors import SourceError

                raise SourceError([f"{path.name}:{number}: error: no file {include.group(1)}"])
            if target.resolve() not in seen:
                _append(target, lines, seen)
            lines.append(f'#line {number + 1} "{path.name}"')
        elif _ONCE.match(line):
            lines.append("")
        else:
            lines.append(line)


def text_key(text: str) -> str:
    """Name of the code built from `text`: 16 hex digits of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def family_files(metal: Path, families: str | None = None) -> list[Path]:
    files = sorted(metal.glob("*.metal"))
    if families:
        wanted = set(families.split(","))
        files = [f for f in files if f.stem in wanted]
        missing = wanted - {f.stem for f in files}
        if missing:
            raise SystemExit(f"no such kernel family: {', '.join(sorted(missing))}")
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metal", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in family_files(options.metal, options.families):
        (options.out / path.name).write_text(amalgamate(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
