# Off macOS everything is compiled by the clang inside the PyPI package ziglang: it knows Objective-C++ with ARC and
# brings its own C++ library, so a machine needs no compiler, no binutils and nothing from its distribution.
set(_python "${Python_EXECUTABLE}")
if(NOT _python)
  find_program(_python NAMES python3 python REQUIRED)
endif()
execute_process(
  COMMAND "${_python}" -c "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'))"
  OUTPUT_VARIABLE _zig OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _failed)
if(_failed)
  message(FATAL_ERROR "The Python package ziglang is needed to build lily off macOS (pip install ziglang)")
endif()

cmake_host_system_information(RESULT _processor QUERY OS_PLATFORM)
if(NOT _processor STREQUAL "x86_64")
  message(FATAL_ERROR "lily builds on macOS arm64 and Linux x86-64; this is ${_processor}")
endif()
# Any Linux since 2018 (glibc 2.28) on any x86-64 of the last ten years; the kernels have their own variants.
set(_target "-target x86_64-linux-gnu.2.28 -mcpu=x86_64_v2")

# zig builds its C++ library once and keeps it in the user's cache; without a home folder, in the build folder.
set(_cache "")
if(NOT DEFINED ENV{ZIG_GLOBAL_CACHE_DIR} AND NOT EXISTS "$ENV{HOME}")
  set(_cache "ZIG_GLOBAL_CACHE_DIR='${CMAKE_BINARY_DIR}/zig-cache'; export ZIG_GLOBAL_CACHE_DIR\n")
endif()

# CMake wants one program per tool.
foreach(_tool cc c++ ar ranlib)
  set(_arguments "")
  if(_tool MATCHES "^c")
    set(_arguments "${_target}")
  endif()
  file(WRITE "${CMAKE_BINARY_DIR}/zig-tools/${_tool}.new" "#!/bin/sh\n${_cache}exec '${_zig}' ${_tool} ${_arguments} \"$@\"\n")
  file(COPY_FILE "${CMAKE_BINARY_DIR}/zig-tools/${_tool}.new" "${CMAKE_BINARY_DIR}/zig-tools/${_tool}" ONLY_IF_DIFFERENT)
  file(CHMOD "${CMAKE_BINARY_DIR}/zig-tools/${_tool}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endforeach()
set(CMAKE_C_COMPILER "${CMAKE_BINARY_DIR}/zig-tools/cc")
set(CMAKE_CXX_COMPILER "${CMAKE_BINARY_DIR}/zig-tools/c++")
set(CMAKE_AR "${CMAKE_BINARY_DIR}/zig-tools/ar" CACHE FILEPATH "" FORCE)
set(CMAKE_RANLIB "${CMAKE_BINARY_DIR}/zig-tools/ranlib" CACHE FILEPATH "" FORCE)
set(CMAKE_CXX_COMPILER_AR "${CMAKE_AR}" CACHE FILEPATH "" FORCE)
set(CMAKE_CXX_COMPILER_RANLIB "${CMAKE_RANLIB}" CACHE FILEPATH "" FORCE)
