"""The CUDA driver and NVRTC through ctypes, as far as tests of the front end need them: compile a kernel, run it once."""
import ctypes
import importlib.util
from pathlib import Path

import numpy as np

INLINE_BYTES = 320


class Launch(ctypes.Structure):
    """LilyLaunch of stdlib/cuda/entry.h."""
    _fields_ = [("buffer", ctypes.c_uint64 * 31), ("inline_mask", ctypes.c_uint32), ("grid_threads", ctypes.c_uint32 * 3), ("grid_groups", ctypes.c_uint32 * 3),
                ("threadgroup_offset", ctypes.c_uint32 * 8), ("reserved", ctypes.c_uint32 * 3), ("bytes", ctypes.c_uint8 * INLINE_BYTES)]


def _nvrtc() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(root).glob("*/lib/libnvrtc.so.*")):
            if ".alt." not in path.name:
                return ctypes.CDLL(str(path))
    return None


NVRTC = _nvrtc()


def compile_cuda(code: str, symbol: str, arch: str = "sm_90", constants: dict[int, int] | None = None, ragged: bool = False, ptx: bool = False) -> tuple[bytes, str]:
    """Compiled code of one entry and the compiler's log; AssertionError with the log when it does not compile."""
    options = ["-std=c++17", "-default-device", f"-arch={arch}", f"-DLILY_ENTRY_{symbol}", f"-DLILY_RAGGED={int(ragged)}"]
    for index, bits in (constants or {}).items():
        options += [f"-DLILY_FC_{index}={bits}u", f"-DLILY_FC_{index}_SET=1"]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert NVRTC.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None) == 0
    status = NVRTC.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*[o.encode() for o in options]))
    NVRTC.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    NVRTC.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    get_size, get = (NVRTC.nvrtcGetPTXSize, NVRTC.nvrtcGetPTX) if ptx else (NVRTC.nvrtcGetCUBINSize, NVRTC.nvrtcGetCUBIN)
    get_size(program, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    get(program, result)
    NVRTC.nvrtcDestroyProgram(ctypes.byref(program))
    return result.raw, log.value.decode()


class Device:
    """The first GPU. Raises OSError when there is no driver and RuntimeError when there is no GPU."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self.cuda.cuInit(0))
        self._check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        self._check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._check(self.cuda.cuCtxSetCurrent(context))
        numbers = [ctypes.c_int(), ctypes.c_int()]
        for number, attribute in zip(numbers, (75, 76)):                # compute capability, major and minor
            self._check(self.cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device))
        self.arch = f"sm_{numbers[0].value}{numbers[1].value}"

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA driver: error {status}")

    def run(self, code: str, manifest: dict, name: str, buffers: list[np.ndarray], threads: tuple[int, ...], group: tuple[int, ...],
            constants: dict[int, int] | None = None) -> None:
        """Runs kernel `name` over `threads` in all; buffers[i] is the argument with index i, by value where the manifest says so;
        arrays of writable arguments are overwritten with the result."""
        entry = next(e for e in manifest["entries"] if e["name"] == name)
        threads, group = (*threads, 1, 1)[:3], (*group, 1, 1)[:3]
        ragged = any(t % g for t, g in zip(threads, group)) or np.prod(group) % 32 != 0
        image, _ = compile_cuda(code, entry["symbol"], self.arch, constants, bool(ragged))
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self.cuda.cuModuleLoadData(ctypes.byref(module), image))
        self._check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, entry["symbol"].encode()))
        launch, memory = Launch(), {}
        launch.grid_threads[:] = threads
        launch.grid_groups[:] = [-(-t // g) for t, g in zip(threads, group)]
        for argument in entry["arguments"]:
            data = buffers[argument["index"]]
            if argument["by_value"]:
                ctypes.memmove(ctypes.addressof(launch.bytes) + argument["inline_offset"], data.tobytes(), data.nbytes)
                launch.inline_mask |= 1 << argument["index"]
                continue
            address = ctypes.c_uint64()
            self._check(self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(data.nbytes)))
            self._check(self.cuda.cuMemcpyHtoD_v2(address, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)))
            launch.buffer[argument["index"]] = address.value
            memory[argument["index"]] = address
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(launch))
        self._check(self.cuda.cuLaunchKernel(function, *launch.grid_groups, *group, 0, None, parameters, None))
        self._check(self.cuda.cuCtxSynchronize())
        for argument in entry["arguments"]:
            if argument["index"] in memory:
                data, address = buffers[argument["index"]], memory[argument["index"]]
                if argument["writable"]:
                    self._check(self.cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(data.ctypes.data), address, ctypes.c_size_t(data.nbytes)))
                self._check(self.cuda.cuMemFree_v2(address))
        self._check(self.cuda.cuModuleUnload(module))
