"""The front end's CUDA mode: text and manifest of every kernel family, and what NVRTC makes of them. No GPU needed."""
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import cuda_driver

ROOT = Path(__file__).parents[2]
FRONTEND, METAL = ROOT / "src/metal_host/frontend", ROOT / "metal"
FAMILIES = sorted(METAL.glob("*.metal"))
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed: Metal source cannot be read here")
needs_nvrtc = pytest.mark.skipif(cuda_driver.NVRTC is None, reason="nvidia-cuda-nvrtc is not installed (extra `cuda`)")


@pytest.fixture(scope="module")
def translate(tmp_path_factory):
    """translate(path or text, name) -> CUDA text, manifest; a file's translation is made once."""
    sys.path.insert(0, str(FRONTEND))
    import amalgamate
    import cuda
    made, scratch = {}, tmp_path_factory.mktemp("cuda")

    def run(source, name="k.metal", again=False):
        if isinstance(source, str):
            return cuda.translate(f'#line 1 "{name}"\n{source}', name, scratch)
        if source not in made or again:
            made[source] = cuda.translate(amalgamate.amalgamate(source), source.name, scratch)
        return made[source]

    yield run
    sys.path.remove(str(FRONTEND))


def constants_of(manifest):
    """A value for every function constant: 128 for sizes, true for switches."""
    return {c["index"]: 1 if c["type"] == "bool" else 128 for c in manifest["constants"]}


def test_translation_is_deterministic_and_self_contained(translate):
    for path in FAMILIES[:3]:
        first = translate(path)
        assert translate(path, again=True) == first
        assert "#include" not in first[0]
        assert not re.search(r"\b__local\b|opencl|\[\[kernel", first[0].split("<constants>")[1])
        assert str(ROOT) not in first[0]


def test_manifests_describe_every_kernel_as_declared(translate):
    sizes = {"uint": 4, "int": 4, "float": 4}
    fields = {}                                            # struct of common.h: bytes
    text = re.sub(r"//[^\n]*", "", (METAL / "common.h").read_text())
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.S):
        fields[name] = 0
        for kind, names in re.findall(r"(uint|int|float) ([^;]+);", body):
            for one in names.split(","):
                length = re.search(r"\[(\w+)\]", one)
                count = 1 if not length else int(length[1]) if length[1].isdigit() else int(re.search(rf"#define {length[1]} (\d+)", text)[1])
                fields[name] += sizes[kind] * count
    seen = set()
    for path in FAMILIES:
        code, manifest = translate(path)
        source = "".join(p.read_text() for p in (path, *METAL.glob("*.h")))
        for entry in manifest["entries"]:
            assert f"#ifdef LILY_ENTRY_{entry['symbol']}\n" in code and 32 <= entry["max_threads"] <= 1024
            assert entry["symbol"] not in seen
            seen.add(entry["symbol"])
            end = 0
            for argument in entry["arguments"]:
                assert argument["size"] >= argument["align"] >= 1 and 0 <= argument["index"] < 31
                declared = re.findall(rf"constant (\w+)& {argument['name']} \[\[buffer\({argument['index']}\)\]\]", source)
                if argument["by_value"]:
                    assert argument["size"] in {fields[name] for name in declared}
                    assert argument["inline_offset"] >= end and argument["inline_offset"] % argument["align"] == 0
                    end = argument["inline_offset"] + argument["size"]
            assert end <= cuda_driver.INLINE_BYTES
    assert len(seen) > 100


SMALL = """#include <metal_stdlib>
using namespace metal;
struct Args { uint n; float3 f; char c; };
constant uint kSize [[function_constant(3)]];
constant bool kFlag [[function_constant(7)]];
constant uint kTwice = 2 * kSize;
constant float kTable[2] = {1.0, 2.5};
template <typename T>
[[kernel, max_total_threads_per_threadgroup(64)]] void twice(device const T* x [[buffer(0)]], device T* y [[buffer(5)]], constant Args& args [[buffer(2)]],
    constant uint& more [[buffer(9)]], constant uint* list [[buffer(1)]], threadgroup float4* scratch [[threadgroup(0)]], uint2 at [[thread_position_in_grid]]) {
  threadgroup float own[8];
  own[at.x & 7] = kTable[at.y & 1] + float(list[more]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (is_function_constant_defined(kFlag) && kFlag) scratch[0] = float4(own[0]);
  y[at.x] = T(float(x[at.x]) * float(kTwice) + args.f.y);
}
template [[host_name("twice<f32>")]] [[kernel]] void twice<float>(device const float*, device float*, constant Args&, constant uint&, constant uint*, threadgroup float4*, uint2);
template [[host_name("twice.bf16")]] [[kernel]] void twice<bfloat>(device const bfloat*, device bfloat*, constant Args&, constant uint&, constant uint*, threadgroup float4*, uint2);
"""


def test_manifest_of_a_small_family(translate):
    _, manifest = translate(SMALL)
    assert manifest["constants"] == [{"index": 3, "name": "kSize", "type": "uint", "required": True}, {"index": 7, "name": "kFlag", "type": "bool", "required": False}]
    first, second = manifest["entries"]
    assert (first["name"], first["symbol"], first["max_threads"]) == ("twice<f32>", "lily_twice_f32_", 64)
    rows = [(a["name"], a["index"], a["kind"], a["writable"], a["size"], a["align"], a["by_value"], a.get("inline_offset")) for a in second["arguments"]]
    assert rows == [("x", 0, "device", False, 2, 2, False, None), ("y", 5, "device", True, 2, 2, False, None), ("args", 2, "constant", False, 48, 16, True, 0),
                    ("more", 9, "constant", False, 4, 4, True, 48), ("list", 1, "constant", False, 4, 4, False, None), ("scratch", 0, "threadgroup", False, 16, 16, False, None)]


def test_text_of_a_development_source_is_written_beside_its_manifest(translate, tmp_path):
    (tmp_path / "k.metal").write_text(SMALL)
    command = [sys.executable, str(FRONTEND / "compile_text.py"), "--text", str(tmp_path / "k.metal"), "--out", str(tmp_path / "out/key.cu"), "--target", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["key.cu", "key.cuda.json"]
    assert ((tmp_path / "out/key.cu").read_text(), json.loads((tmp_path / "out/key.cuda.json").read_text())) == translate(SMALL)


def test_faults_are_reported_at_their_line(translate):
    sys.path.insert(0, str(FRONTEND))
    from errors import SourceError
    sys.path.remove(str(FRONTEND))
    with pytest.raises(SourceError, match=r"k\.metal:3: error: double does not exist in Metal"):
        translate("#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device float* a [[buffer(0)]]) { double x = 1; a[0] = float(x); }\n")


OVERLOADS = """#include <metal_stdlib>
using namespace metal;
METAL_FUNC float first(device const float* x) { return x[0]; }
METAL_FUNC float first(threadgroup const float* x) { return x[0]; }
kernel void k(device float* a [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float s[32];
  s[i] = first(a);
  a[i] = first(s);
}
"""


@needs_nvrtc
def test_overloads_for_two_address_spaces_become_one_function(translate):
    code, _ = translate(OVERLOADS)
    cuda_driver.compile_cuda(code, "lily_k")


@needs_nvrtc
def test_a_constant_without_value_is_named(translate):
    code, _ = translate(SMALL)
    cuda_driver.compile_cuda(code, "lily_twice_f32_", constants={3: 5})
    cuda_driver.compile_cuda(code, "lily_twice_bf16", constants={3: 5, 7: 1})
    with pytest.raises(AssertionError, match=r"function constant kSize \(index 3\) has no value"):
        cuda_driver.compile_cuda(code, "lily_twice_f32_", constants={7: 1})


@needs_nvrtc
def test_packed_weights_are_read_by_wide_loads_and_weights_stay_in_registers(translate):
    code, manifest = translate(METAL / "gemv.metal")
    text = cuda_driver.compile_cuda(code, "lily_gemv_bf16_b4_g64", "compute_90", constants_of(manifest), ptx=True)[0].decode()
    assert "ld.global.v4.u32" in text
    assert "ld.v4" not in text and "ld.u16" not in text    # nothing goes by generic addresses


@needs_nvrtc
@pytest.mark.parametrize("kernel", ["grouped_gemm_tensor_silu_bf16_b4_g64_m64", "grouped_gemm_tensor_bf16_b4_g64_m32"])
def test_tensor_tiles_run_on_matrix_instructions_from_registers(translate, kernel):
    """P6: full m16n8k16 products, operands by ldmatrix and 16-byte stores, nothing in local memory."""
    code, _ = translate(METAL / "grouped_gemm_tensor.metal")
    text = cuda_driver.compile_cuda(code, f"lily_{kernel}", "compute_90", ptx=True)[0].decode()
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text and "ldmatrix.sync.aligned.m8n8.x4" in text and "mma.sync.aligned.m16n8k8" not in text
    assert "st.shared.v4" in text and "st.shared.u16" not in text and ".local" not in text


@needs_nvrtc
@pytest.mark.parametrize("ragged", [False, True])
def test_norm_compiles(translate, ragged):
    code, manifest = translate(METAL / "norm.metal")
    for entry in manifest["entries"]:
        cuda_driver.compile_cuda(code, entry["symbol"], ragged=ragged)


@needs_nvrtc
def test_primitives_compile(translate):
    code, manifest = translate(Path(__file__).parent / "cuda_primitives.metal")
    for entry in manifest["entries"]:
        for ragged in (False, True):
            cuda_driver.compile_cuda(code, entry["symbol"], ragged=ragged)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("path", FAMILIES, ids=lambda p: p.stem)
def test_every_family_compiles_with_and_without_constants(translate, path, arch):
    code, manifest = translate(path)
    given = [constants_of(manifest)]
    if manifest["constants"] and not any(c["required"] for c in manifest["constants"]):
        given.append({})
    for entry in manifest["entries"]:
        for constants in given:
            cuda_driver.compile_cuda(code, entry["symbol"], arch, constants)
