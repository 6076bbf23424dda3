"""The CUDA text of a kernel family: library and rewritten source in one translation unit for NVRTC, and a manifest.

NVRTC options: -std=c++17 -default-device -arch=…, -DLILY_ENTRY_<symbol> for the one entry to compile, -DLILY_FC_<index>=<bits>u
and -DLILY_FC_<index>_SET=1 for function constants, -DLILY_RAGGED=1 where simdgroups may be smaller than 32 lanes.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from amalgamate import amalgamate
from declarations import Entry, Parameter
from errors import SourceError
from lint import lint
from rewrite import CUDA, Rewriter
from toolchain import STDLIB, compile_facts, preprocess

INLINE_BYTES = 320               # LilyLaunch.bytes of stdlib/cuda/entry.h
MAX_THREADS = 1024               # of kernels that declare no limit


def symbol(name: str) -> str:
    """C name of the entry function of kernel `name`."""
    return "lily_" + re.sub(r"\W", "_", name)


def translate(text: str, file: str, scratch: Path) -> tuple[str, dict]:
    """CUDA text and manifest of amalgamated Metal `text`, called `file` in messages. Raises SourceError for faults of the source."""
    source = preprocess(text, file)
    rewriter = Rewriter(source, CUDA)
    rewritten = re.sub(r'^(#line \d+ ")[^"]*/', r"\1", rewriter.run(), flags=re.M)     # the same text wherever it is made
    faults = lint(source)
    faults += [e for e in rewriter.errors if e not in faults]
    if not faults and not rewriter.entries:
        faults = [f"{file}:1: error: no kernel in this file"]
    if faults:
        raise SourceError(faults)
    facts = compile_facts(source, file, scratch)
    entries = [_entry(entry, words) for entry, words in zip(rewriter.entries, facts, strict=True)]
    constants = [{"index": int(c.index, 0), "name": c.name, "type": c.type, "required": c.required} for c in rewriter.constants]
    out = ["namespace lily_metal {", amalgamate(STDLIB / "cuda" / "library.h"), '#line 1 "<constants>"']
    for n, constant in enumerate(rewriter.constants):
        out += _constant(n, int(constant.index, 0), constant.type, constant.name, constant.required)
    out += [rewritten, '#line 1 "<entries>"']
    for entry, row in zip(rewriter.entries, entries):
        places = {a["index"]: a["inline_offset"] for a in row["arguments"] if a["by_value"]}
        arguments = ", ".join(_argument(p, places) for p in entry.kernel.parameters)
        out += [f"#ifdef LILY_ENTRY_{row['symbol']}", f"LILY_ENTRY({row['symbol']}, {row['max_threads']}, {entry.callee}({arguments}))", "#endif"]
    code = "\n".join([*out, "}  // namespace lily_metal", ""])
    if len({row["symbol"] for row in entries}) != len(entries):
        raise SourceError([f"{file}:1: error: two kernels have the same name but for characters that C names lack"])
    return code, {"source": file, "hash": hashlib.sha256(code.encode()).hexdigest(), "constants": constants, "entries": entries}


def write(text: str, file: str, out: Path, key: str) -> None:
    """Writes OUT/<key>.cu and then OUT/<key>.cuda.json; each appears under its name only when complete."""
    out.mkdir(parents=True, exist_ok=True)
    code, manifest = translate(text, file, out)
    for name, content in ((f"{key}.cu", code), (f"{key}.cuda.json", json.dumps(manifest, indent=1) + "\n")):
        part = out / f".{name}.{os.getpid()}"
        part.write_text(content)
        os.replace(part, out / name)


def _entry(entry: Entry, words: list[int]) -> dict:
    """A manifest row; words: thread limit, then per parameter size | alignment << 24."""
    arguments, end = [], 0
    for parameter, word in zip(entry.kernel.parameters, words[1:], strict=True):
        if not parameter.space:
            continue
        size, align = word & 0xFFFFFF, word >> 24
        row = {"name": parameter.name, "index": parameter.index, "kind": parameter.space, "writable": parameter.writable, "size": size, "align": align}
        place = -(-end // max(align, 4)) * max(align, 4)
        row["by_value"] = parameter.reference and parameter.space == "constant" and place + size <= INLINE_BYTES
        if row["by_value"]:
            row["inline_offset"], end = place, place + size
        arguments.append(row)
    return {"name": entry.name, "symbol": symbol(entry.name), "line": entry.kernel.line, "max_threads": words[0] or MAX_THREADS, "arguments": arguments}


def _argument(parameter: Parameter, places: dict[int, int]) -> str:
    if parameter.attribute == "buffer" and parameter.space == "constant" and parameter.index in places:
        return f"LILY_ARGUMENT_value({parameter.index}, {places[parameter.index]})"
    if parameter.attribute in ("buffer", "threadgroup"):
        return f"LILY_ARGUMENT_{parameter.attribute}({parameter.index})"
    return f"LILY_ARGUMENT_{parameter.attribute}"


def _constant(n: int, index: int, kind: str, name: str, required: bool) -> list[str]:
    missing = f'#error "function constant {name} (index {index}) has no value"' if required else f"LILY_FUNCTION_CONSTANT({kind}, {n}, false, 0)"
    return [f"#ifdef LILY_FC_{index}_SET", f"LILY_FUNCTION_CONSTANT({kind}, {n}, true, LILY_FC_{index})", "#else", missing, "#endif"]
