# Off macOS: the software Metal is linked into the extension, and the parts that compile kernels at run time are installed.

list(APPEND OBJCXX -fobjc-runtime=macosx-10.15)
file(GLOB HOST_OBJC CONFIGURE_DEPENDS src/metal_host/objc/*.cpp)
file(GLOB HOST_FRAMEWORK CONFIGURE_DEPENDS src/metal_host/framework/*.mm src/metal_host/cuda/*.mm)
file(GLOB HOST_CUDA CONFIGURE_DEPENDS src/metal_host/cuda/*.cpp)
file(GLOB HOST_ENGINE CONFIGURE_DEPENDS src/metal_host/simt/*.cpp)

set_source_files_properties(${NATIVE_SOURCES} ${HOST_FRAMEWORK} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${OBJCXX}")
# The root class implements what ARC calls, so it is compiled without.
set_source_files_properties(src/metal_host/framework/NSObject.mm PROPERTIES
  LANGUAGE CXX COMPILE_OPTIONS "-x;objective-c++;-fblocks;-fno-objc-arc;-fobjc-runtime=macosx-10.15;-Wno-deprecated-objc-isa-usage")
# The engine switches stacks; nothing may live below the stack pointer.
set_source_files_properties(${HOST_ENGINE} PROPERTIES COMPILE_OPTIONS "-O3;-std=c++20;-mno-red-zone")

target_sources(_native PRIVATE ${HOST_OBJC} ${HOST_FRAMEWORK} ${HOST_CUDA} ${HOST_ENGINE})
target_include_directories(_native PRIVATE src/metal_host/framework/include)
target_link_libraries(_native PRIVATE dl pthread)
target_link_options(_native PRIVATE -Wl,-s)

install(DIRECTORY src/metal_host/frontend src/metal_host/stdlib DESTINATION lily/_metal_host
        PATTERN "__pycache__" EXCLUDE)
install(DIRECTORY src/metal_host/simt DESTINATION lily/_metal_host FILES_MATCHING PATTERN "*.h")
