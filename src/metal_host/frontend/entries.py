"""Generated code around the rewritten source: entry functions and the module's description."""
from __future__ import annotations

from declarations import Entry
from rewrite import Rewriter

_SPACES = {"device": "LILY_SPACE_DEVICE", "constant": "LILY_SPACE_CONSTANT", "threadgroup": "LILY_SPACE_THREADGROUP"}


def kernel_source(rewriter: Rewriter, rewritten: str, entries: bool = True) -> str:
    """The translation unit (C++ for OpenCL): library, source, one entry function per kernel and its description."""
    out = ["#include <metal_stdlib>", rewritten, '#line 1 "<entries>"']
    for n, entry in enumerate(rewriter.entries):
        arguments = ", ".join(_argument(p) for p in entry.kernel.parameters)
        if entries:
            out.append(f'extern "C" LILY_LANE_CALL void lily_entry_{n}(const LilyThread *thread) {{ {entry.callee}({arguments}); }}')
        out.append(f"LILY_DESCRIBE({n}, {entry.kernel.max_threads}, decltype({entry.callee}))")
    return "\n".join(out) + "\n"


def _argument(parameter) -> str:
    if parameter.attribute in ("buffer", "threadgroup"):
        return f"LILY_ARGUMENT_{parameter.attribute}({parameter.index})"
    return f"LILY_ARGUMENT_{parameter.attribute}"


def module_source(rewriter: Rewriter, file: str, strict: bool) -> str:
    """The C file that describes the module (LilyKernelModule of simt/engine.h)."""
    out = ['#include "module.h"']
    entries = rewriter.entries
    for n, entry in enumerate(entries):
        out.append(f"extern LILY_LANE_CALL void lily_entry_{n}(const LilyThread *);")
        out.append(f"extern const uint32_t lily_facts_{n}[];")
        out.append(f"static LilyParameter parameters_{n}[] = {{{_parameters(entry)}}};")
    out.append("static LilyKernelEntry entries[] = {")
    for n, entry in enumerate(entries):
        count = sum(1 for p in entry.kernel.parameters if p.space)
        out.append(f'  {{"{entry.name}", lily_entry_{n}, 0, {entry.kernel.line}, parameters_{n}, {count}, 0}},')
    out.append("  {0}};")
    out.append("static const LilyFunctionConstant constants[] = {")
    for constant in rewriter.constants:
        size = f"LILY_SIZE_{constant.type}"
        out.append(f'  {{"{constant.name}", "{constant.type}", {constant.index}, {size}, {int(constant.required)}}},')
    out.append("  {0}};")
    out.append("__attribute__((constructor)) static void lily_complete(void) {")
    for n, entry in enumerate(entries):
        facts = [i for i, p in enumerate(entry.kernel.parameters) if p.space]
        out.append(f"  lily_complete_entry(&entries[{n}], parameters_{n}, lily_facts_{n}, (const int[]){{{', '.join(map(str, facts)) or '0'}}});")
    out.append("}")
    out.append(f'LILY_MODULE("{file}", {int(strict)}, {len(entries)}, {len(rewriter.constants)})')
    return "\n".join(out) + "\n"


def _parameters(entry: Entry) -> str:
    rows = []
    for p in entry.kernel.parameters:
        if p.space:
            kind = "LILY_PARAMETER_BUFFER" if p.attribute == "buffer" else "LILY_PARAMETER_THREADGROUP"
            rows.append(f'{{"{p.name}", {kind}, {p.index}, {_SPACES[p.space]}, {int(p.writable)}, 0, 0}}')
    return ", ".join(rows) or "{0}"
