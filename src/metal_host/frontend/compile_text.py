"""Compiles one Metal text at run time (development: needs ziglang).

    compile_text.py --text FILE --out FILE.so --target T [--strict] [--name gemv.metal]
    compile_text.py --text FILE --out FILE.cu --target cuda [--name gemv.metal]          (also FILE.cuda.json)

Exit status 1 and `file:line: error: …` on the standard error when the text is wrong. The module appears
under its name only when complete.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cuda
from errors import SourceError, ToolError
from toolchain import TARGETS, compile_text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", required=True, choices=[*TARGETS, "cuda"])
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--name", help="file name for messages")
    parser.add_argument("--keep", type=Path, help="folder for the generated sources")
    options = parser.parse_args()
    name = options.name or options.text.name
    try:
        text = options.text.read_text()
        if not text.startswith("#line"):
            text = f'#line 1 "{name}"\n{text}'
        if options.target == "cuda":
            cuda.write(text, name, options.out.parent, options.out.stem)
            return 0
        compile_text(text, name, options.out.parent, {options.target: options.out}, options.strict, options.keep)
    except SourceError as error:
        print(error, file=sys.stderr)
        return 1
    except ToolError as error:
        print(f"{name}:1: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
