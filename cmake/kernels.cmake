# Builds lily/_kernels: the amalgamated text of every kernel family, which is compiled by Metal at run time, and off
# macOS the machine code that the software Metal runs instead, in one variant per instruction set.

set(KERNELS "${CMAKE_BINARY_DIR}/kernels")
set(LILY_KERNEL_TARGETS "x86-64-v3,x86-64-v4,x86-64-v4-bf16" CACHE STRING "instruction set variants of the kernels (off macOS)")
set(LILY_KERNEL_JOBS 2 CACHE STRING "kernels compiled at the same time")

file(GLOB KERNEL_SOURCES CONFIGURE_DEPENDS metal/*.metal metal/*.h)
file(GLOB_RECURSE FRONTEND_SOURCES CONFIGURE_DEPENDS src/metal_host/frontend/*.py src/metal_host/stdlib/* src/metal_host/simt/*.h)
list(FILTER FRONTEND_SOURCES EXCLUDE REGEX "__pycache__")

if(APPLE)
  set(KERNEL_COMMAND "${CMAKE_SOURCE_DIR}/src/metal_host/frontend/amalgamate.py" --metal "${CMAKE_SOURCE_DIR}/metal" --out "${KERNELS}")
else()
  set(KERNEL_COMMAND "${CMAKE_SOURCE_DIR}/src/metal_host/frontend/build_kernels.py" --metal "${CMAKE_SOURCE_DIR}/metal" --out "${KERNELS}"
      --targets "${LILY_KERNEL_TARGETS}" --jobs ${LILY_KERNEL_JOBS})
endif()
# Code is found by the hash of its text; when the compiler's own files change, all of it is stale.
add_custom_command(
  OUTPUT "${CMAKE_BINARY_DIR}/frontend.stamp"
  COMMAND "${CMAKE_COMMAND}" -E rm -rf "${KERNELS}"
  COMMAND "${CMAKE_COMMAND}" -E make_directory "${KERNELS}"
  COMMAND "${CMAKE_COMMAND}" -E touch "${CMAKE_BINARY_DIR}/frontend.stamp"
  DEPENDS ${FRONTEND_SOURCES})
add_custom_command(
  OUTPUT "${CMAKE_BINARY_DIR}/kernels.stamp"
  COMMAND "${Python_EXECUTABLE}" ${KERNEL_COMMAND}
  COMMAND "${CMAKE_COMMAND}" -E touch "${CMAKE_BINARY_DIR}/kernels.stamp"
  DEPENDS ${KERNEL_SOURCES} "${CMAKE_BINARY_DIR}/frontend.stamp"
  COMMENT "Building the kernels" USES_TERMINAL)
add_custom_target(kernels ALL DEPENDS "${CMAKE_BINARY_DIR}/kernels.stamp")

# python/lily/kernel_args.py packs arguments from the same header.
install(DIRECTORY "${KERNELS}/" DESTINATION lily/_kernels)
install(FILES metal/common.h DESTINATION lily/_kernels)
