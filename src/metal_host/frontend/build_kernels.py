"""Compiles the Metal kernels to native code for the software Metal.

    build_kernels.py --metal metal --out OUTDIR --targets x86-64-v3,x86-64-v4,x86-64-v4-bf16
                     [--jobs 2] [--families a,b] [--strict] [--keep DIR]

Writes OUTDIR/<family>.metal (the amalgamated text) and OUTDIR/<key>.<target>.so, where key is the hash of
that text; the software newLibraryWithSource: finds the code by it. For the CUDA device it writes OUTDIR/<key>.cu and
OUTDIR/<key>.cuda.json (cuda.py), text only. Errors come out as `gemv.metal:12: error: …` and the exit status is 1.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import sys
from pathlib import Path

import cuda
from amalgamate import amalgamate, family_files, text_key
from errors import SourceError, ToolError
from toolchain import TARGETS, compile_text


def build_family(path: Path, out: Path, targets: list[str], strict: bool, keep: Path | None) -> list[str]:
    """Builds one family; returns the messages of what is wrong with it."""
    try:
        text = amalgamate(path)
        key = text_key(text)
        suffix = ".strict.so" if strict else ".so"
        modules = {target: out / f"{key}.{target}{suffix}" for target in targets}
        (out / path.name).write_text(text)
        compile_text(text, path.name, out, {t: p for t, p in modules.items() if not p.exists()}, strict, keep)
        cuda.write(text, path.name, out, key)
    except SourceError as error:
        return error.messages
    except ToolError as error:
        return [f"{path.name}:1: error: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metal", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--families", help="comma-separated; all when left out")
    parser.add_argument("--strict", action="store_true", help="every load and store calls the engine")
    parser.add_argument("--keep", type=Path, help="folder for the generated sources")
    options = parser.parse_args()
    targets = options.targets.split(",")
    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        parser.error(f"unknown target {unknown[0]} (known: {', '.join(TARGETS)})")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool:
        files = family_files(options.metal, options.families)
        for messages in pool.map(lambda f: build_family(f, options.out, targets, options.strict, options.keep), files):
            for message in messages:
                print(message, file=sys.stderr)
                failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
