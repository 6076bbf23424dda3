"""One definition of the argument structs: what Python packs is what the host compiled and what the kernels read."""

from __future__ import annotations

import pytest

from lily.kernel_args import parse_structs, structs


def test_scalars_arrays_and_constants_are_laid_out_four_bytes_apart() -> None:
    text = "#define N 3u\nstruct A { uint a, b; float c; // why\n uint d[N]; int e; };"
    a = parse_structs(text)["A"]
    assert [(f.name, f.code, f.count, f.offset) for f in a.fields] == [("a", "I", 1, 0), ("b", "I", 1, 4), ("c", "f", 1, 8), ("d", "I", 3, 12), ("e", "i", 1, 24)]
    assert a.size == 28


def test_packing_refuses_unknown_and_missing_fields() -> None:
    a = parse_structs("struct A { uint a; float b; };")["A"]
    assert a.pack({"a": 1, "b": 0.5}) == b"\x01\0\0\0\0\0\0\x3f"
    with pytest.raises(ValueError, match="no field c"):
        a.pack({"a": 1, "b": 2, "c": 3})
    with pytest.raises(KeyError):
        a.pack({"a": 1})


def test_the_compiled_host_has_the_same_sizes_and_offsets() -> None:
    from lily import _native

    compiled = _native.struct_layouts()
    parsed = structs()
    assert compiled.keys() == parsed.keys()
    for name, layout in parsed.items():
        assert compiled[name]["size"] == layout.size, name
        assert compiled[name]["fields"] == {f.name: f.offset for f in layout.fields}, name
