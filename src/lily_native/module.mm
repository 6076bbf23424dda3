// Python bindings of the native part (lily._native). No logic here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>

#include "blit.h"
#include "buffer.h"
#include "decode_loop.h"
#include "device.h"
#include "layouts.h"
#include "library.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace lily;

namespace {

bool signal_pending() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// lily.errors.DeviceError, looked up when first raised: the package imports this module while it is being imported.
void raise_device_error(const char* message) {
  try {
    nb::module_::import_("lily.errors").attr("DeviceError");
  } catch (nb::python_error&) {
    PyErr_SetString(PyExc_RuntimeError, message);
    return;
  }
  nb::object type = nb::module_::import_("lily.errors").attr("DeviceError");
  PyErr_SetString(type.ptr(), message);
}

std::array<size_t, 3> size3(nb::handle value) {
  auto tuple = nb::cast<nb::tuple>(value);
  return {nb::cast<size_t>(tuple[0]), nb::cast<size_t>(tuple[1]), nb::cast<size_t>(tuple[2])};
}

// (pipeline, [(index, buffer, offset)], args | None, args_index, grid, threads, barrier_before, cost_ns, label, [(index, bytes)])
Dispatch dispatch_of(nb::handle value) {
  auto fields = nb::cast<nb::tuple>(value);
  if (fields.size() != 10) throw std::invalid_argument("a dispatch has 10 fields, not " + std::to_string(fields.size()));
  Dispatch dispatch;
  dispatch.pipeline = nb::cast<std::shared_ptr<Pipeline>>(fields[0]);
  for (nb::handle item : fields[1]) {
    auto binding = nb::cast<nb::tuple>(item);
    dispatch.bindings.push_back(
        {nb::cast<unsigned>(binding[0]), nb::cast<std::shared_ptr<Buffer>>(binding[1]), nb::cast<size_t>(binding[2])});
  }
  if (!fields[2].is_none()) {
    auto bytes = nb::cast<nb::bytes>(fields[2]);
    dispatch.args.assign(bytes.c_str(), bytes.size());
  }
  dispatch.args_index = nb::cast<unsigned>(fields[3]);
  dispatch.grid = size3(fields[4]);
  dispatch.threads = size3(fields[5]);
  dispatch.barrier_before = nb::cast<bool>(fields[6]);
  dispatch.cost_ns = nb::cast<double>(fields[7]);
  dispatch.label = nb::cast<std::string>(fields[8]);
  for (nb::handle item : fields[9]) {
    auto entry = nb::cast<nb::tuple>(item);
    dispatch.threadgroup_memory.emplace_back(nb::cast<unsigned>(entry[0]), nb::cast<size_t>(entry[1]));
  }
  return dispatch;
}

std::shared_ptr<Program> new_program(std::shared_ptr<Device> device, nb::iterable dispatches, bool concurrent) {
  std::vector<Dispatch> recorded;
  for (nb::handle item : dispatches) recorded.push_back(dispatch_of(item));
  return std::make_shared<Program>(std::move(device), std::move(recorded), concurrent);
}

// [(source, source_offset, destination, destination_offset, length)], [(buffer, offset, length, byte)]
void run_blit(Device& device, nb::iterable copies, nb::iterable fills) {
  std::vector<Copy> copied;
  std::vector<Fill> filled;
  for (nb::handle item : copies) {
    auto c = nb::cast<nb::tuple>(item);
    copied.push_back({nb::cast<std::shared_ptr<Buffer>>(c[0]), nb::cast<size_t>(c[1]), nb::cast<std::shared_ptr<Buffer>>(c[2]),
                      nb::cast<size_t>(c[3]), nb::cast<size_t>(c[4])});
  }
  for (nb::handle item : fills) {
    auto f = nb::cast<nb::tuple>(item);
    filled.push_back({nb::cast<std::shared_ptr<Buffer>>(f[0]), nb::cast<size_t>(f[1]), nb::cast<size_t>(f[2]), nb::cast<int>(f[3])});
  }
  nb::gil_scoped_release release;
  blit(device, copied, filled);
}

nb::dict run_program(Program& program, double max_ms) {
  RunResult result;
  {
    nb::gil_scoped_release release;
    result = program.run(max_ms, signal_pending);
  }
  nb::dict answer;
  answer["gpu_ms"] = result.gpu_ms;
  answer["command_buffers"] = result.command_buffers;
  return answer;
}

nb::dict info_dict(const Device& device) {
  DeviceInfo info = device.info();
  nb::dict answer;
  answer["name"] = info.name;
  answer["max_threads"] = info.max_threads;
  answer["threadgroup_memory"] = info.threadgroup_memory;
  answer["max_buffer_length"] = info.max_buffer_length;
  answer["working_set"] = info.working_set;
  answer["families"] = info.families;
  answer["tensor_ops"] = info.tensor_ops;
  answer["simd_width"] = info.simd_width;
  answer["unified_memory"] = info.unified_memory;
  answer["core_count"] = nb::none();  // Metal does not tell
  return answer;
}

std::vector<FunctionConstant> constants_of(nb::dict constants) {
  std::vector<FunctionConstant> result;
  for (auto [index, setting] : constants) {
    auto pair = nb::cast<nb::tuple>(setting);
    result.push_back({nb::cast<unsigned>(index), nb::cast<std::string>(pair[0]), nb::cast<double>(nb::float_(nb::handle(pair[1])))});
  }
  return result;
}

nb::dict layouts_dict() {
  nb::dict answer;
  for (const StructLayout& layout : struct_layouts()) {
    nb::dict fields, entry;
    for (const auto& [name, offset] : layout.fields) fields[name.c_str()] = offset;
    entry["size"] = layout.size;
    entry["fields"] = fields;
    answer[layout.name.c_str()] = entry;
  }
  return answer;
}

// A function that this library has when a debugging runtime is linked into it; Apple's frameworks have none of them.
void* own_function(const char* name) {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&own_function), &info)) return nullptr;
  void* self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (!self) return nullptr;
  void* found = dlsym(self, name);
  dlclose(self);
  return found;
}

nb::object live_objects() {
  auto count = reinterpret_cast<long (*)()>(own_function("lily_objc_live_objects"));
  return count ? nb::cast(count()) : nb::none();
}

// [(kind, reason)] of devices that a software Metal could offer on another machine; Apple's framework knows none.
nb::list absent_devices() {
  using Visit = void (*)(void*, const char*, const char*);
  nb::list answer;
  Visit add = [](void* context, const char* kind, const char* reason) { static_cast<nb::list*>(context)->append(nb::make_tuple(kind, reason)); };
  if (auto visit_all = reinterpret_cast<void (*)(Visit, void*)>(own_function("lily_metal_absent_devices"))) visit_all(add, &answer);
  return answer;
}

nb::object recorded_accesses() {
  using Visit = void (*)(void*, uint64_t, const char*, const char*, int, uint64_t, uint64_t);
  auto visit_all = reinterpret_cast<int (*)(Visit, void*)>(own_function("lily_metal_recorded_accesses"));
  if (!visit_all) return nb::none();
  nb::list answer;
  Visit add = [](void* context, uint64_t dispatch, const char* kernel, const char* buffer, int written, uint64_t start, uint64_t end) {
    static_cast<nb::list*>(context)->append(nb::make_tuple(dispatch, kernel, buffer, written ? "w" : "r", start, end));
  };
  return visit_all(add, &answer) ? nb::object(answer) : nb::none();
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Metal devices, buffers, pipelines, recorded programs and the decode loop.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const DeviceError& error) {
      raise_device_error(error.what());
    } catch (const Interrupted&) {
      // The signal handler's exception is set already.
      if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
    }
  });

  m.def("devices", [] {
    nb::list answer;
    size_t index = 0;
    for (const std::string& name : Device::names()) {
      nb::dict entry;
      entry["name"] = name;
      entry["index"] = index++;
      answer.append(entry);
    }
    return answer;
  }, "All Metal devices: [{'name', 'index'}].");
  m.def("absent_devices", &absent_devices, "Kinds of devices that this build knows and this machine lacks, with the reason: [(kind, reason)].");
  m.def("default_device_name", [] { return Device(std::nullopt).name(); });
  m.def("live_objects", &live_objects, "Objective-C objects alive; None where the runtime does not count them.");
  m.def("recorded_accesses", &recorded_accesses,
        "Byte ranges that dispatches have touched since the last call, in order: [(dispatch, kernel, buffer label, 'r' or 'w', start, end)];\n"
        "dispatches are counted on from 0. None where accesses are not recorded (the software Metal records with hazards=on).");
  m.def("buffers_created", &Buffer::created, "MTLBuffers made by this process so far.");
  m.def("struct_layouts", &layouts_dict, "{struct: {'size', 'fields': {name: offset}}} of metal/common.h.");

  nb::class_<Device>(m, "Device")
      .def(nb::init<std::optional<int>>(), "index"_a = nb::none())
      .def_prop_ro("name", &Device::name)
      .def("info", &info_dict)
      .def("buffer", [](std::shared_ptr<Device> device, size_t nbytes, const std::string& storage, const std::string& label, bool tracked) {
        if (storage != "shared" && storage != "private") throw std::invalid_argument("storage " + storage + ": expected shared or private");
        return std::make_shared<Buffer>(std::move(device), nbytes, storage == "shared", label, tracked);
      }, "nbytes"_a, "storage"_a = "shared", "label"_a = "", "tracked"_a = true)
      .def("library", [](std::shared_ptr<Device> device, const std::string& source, const std::string& label, const std::string& version) {
        nb::gil_scoped_release release;  // compiling may take long
        return std::make_shared<Library>(std::move(device), source, label, version);
      }, "source"_a, "label"_a = "", "language_version"_a = "3.1")
      .def("pipeline", [](std::shared_ptr<Device> device, const Library& library, const std::string& function, nb::dict constants,
                          const std::string& label) {
        std::vector<FunctionConstant> values = constants_of(constants);
        nb::gil_scoped_release release;  // compiling may take long; several threads may do it at once
        return std::make_shared<Pipeline>(device, library, function, values, label);
      }, "library"_a, "function"_a, "constants"_a = nb::dict(), "label"_a = "")
      .def("blit", &run_blit, "copies"_a, "fills"_a = nb::list(),
           "Copies (source, source_offset, destination, destination_offset, length) and fills (buffer, offset, length, byte) in one\n"
           "command buffer, and waits. A written range must not overlap another range of the batch.")
      .def("run_once", [](std::shared_ptr<Device> device, nb::iterable dispatches) {
        return run_program(*new_program(std::move(device), dispatches, true), 50.0);
      }, "dispatches"_a, "Records the dispatches as a Program and runs it once.");

  nb::class_<Buffer>(m, "Buffer")
      .def_prop_ro("nbytes", &Buffer::nbytes)
      .def_prop_ro("label", &Buffer::label)
      .def("view", [](nb::handle self) {
        Buffer& buffer = *nb::cast<std::shared_ptr<Buffer>>(self);
        size_t shape[1] = {buffer.nbytes()};
        return nb::ndarray<nb::numpy, uint8_t>(buffer.contents(), 1, shape, self);
      }, "The bytes as a NumPy array that keeps the buffer alive (shared storage only).")
      .def("fill", [](Buffer& buffer, int byte, size_t offset, std::optional<size_t> length) {
        if (byte < 0 || byte > 255) throw std::invalid_argument("fill: a byte is 0 to 255");
        nb::gil_scoped_release release;
        buffer.fill(byte, offset, length ? *length : buffer.nbytes() - std::min(offset, buffer.nbytes()));
      }, "byte"_a, "offset"_a = 0, "length"_a = nb::none())
      .def("copy_to", &Buffer::copy_to, "destination"_a, "src_offset"_a, "dst_offset"_a, "length"_a, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Library>(m, "Library")
      .def_prop_ro("label", &Library::label)
      .def_prop_ro("function_names", &Library::function_names);

  nb::class_<Pipeline>(m, "Pipeline")
      .def_prop_ro("name", &Pipeline::name)
      .def_prop_ro("max_threads", &Pipeline::max_threads)
      .def_prop_ro("simd_width", &Pipeline::simd_width)
      .def_prop_ro("static_threadgroup_memory", &Pipeline::static_threadgroup_memory);

  nb::class_<Program>(m, "Program")
      .def(nb::new_(&new_program), "device"_a, "dispatches"_a, "concurrent"_a = true)
      .def("run", &run_program, "max_ms"_a = 50.0)
      .def_prop_ro("dispatch_count", &Program::dispatch_count)
      .def_prop_ro("barrier_count", &Program::barrier_count);

  nb::class_<DecodeLoop>(m, "DecodeLoop")
      .def(nb::init<std::shared_ptr<Program>, std::shared_ptr<Buffer>, unsigned, std::shared_ptr<Buffer>>(), "program"_a, "step_state"_a,
           "max_in_flight"_a = 2, "host_state"_a.none() = nb::none())
      .def("start", &DecodeLoop::start, "steps"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("next", [](DecodeLoop& loop) -> nb::object {
        std::optional<StepResult> result;
        {
          nb::gil_scoped_release release;
          result = loop.next(signal_pending);
        }
        if (!result) return nb::none();
        return nb::make_tuple(result->token, result->flag);
      }, "(token, flag) of the next step, or None when there is none.")
      .def("drain", [](DecodeLoop& loop) { return loop.drain(signal_pending); }, nb::call_guard<nb::gil_scoped_release>(),
           "Waits for the steps in flight; how many were completed beyond the last one delivered.")
      .def("set_program", &DecodeLoop::set_program, "program"_a)
      .def_prop_ro("gpu_ms", &DecodeLoop::gpu_ms);

  // Memory that the GPU still uses must not go away under it.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
    nb::gil_scoped_release release;
    Device::drain_all();
  }));
}
