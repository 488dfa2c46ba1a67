# Each file of tests/ is one executable. They are no part of `all`: a test that does not compile
# does not stop the library from being installed.
enable_testing()
add_custom_target(native_tests)
# What a test does is done in the core, which stays as it is shipped: its own code is compiled for a
# short build, half of which were the headers of the standard library.
add_library(kvw_test_flags INTERFACE)
target_compile_options(kvw_test_flags INTERFACE -O1)
set(KVW_COMMON_HEADERS
    <algorithm> <array> <atomic> <chrono> <condition_variable> <cstdint> <cstring> <deque>
    <filesystem> <fstream> <functional> <map> <memory> <mutex> <optional> <random> <set> <span>
    <string> <string_view> <thread> <unordered_map> <utility> <vector>)
file(GLOB KVW_TESTS CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/*.cc)

# NVIDIA's header: of a CUDA toolkit, or of the wheel nvidia-cuda-runtime beside the interpreter.
# Nothing but this test needs it.
if(Python_EXECUTABLE)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
                  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE KVW_SITE)
endif()
find_path(KVW_CUDA_INCLUDE cuda.h
          PATHS ${KVW_SITE}/nvidia/cu13/include ${KVW_SITE}/nvidia/cuda_runtime/include
                $ENV{CUDA_PATH}/include $ENV{CUDA_HOME}/include /usr/local/cuda/include)
if(NOT KVW_CUDA_INCLUDE)
  list(FILTER KVW_TESTS EXCLUDE REGEX "/gpu_headers_test\\.cc$")
  add_test(NAME gpu_headers_test
           COMMAND ${CMAKE_COMMAND} -E echo "skipped: no cuda.h (nvidia-cuda-runtime, a toolkit)")
  set_tests_properties(gpu_headers_test PROPERTIES SKIP_REGULAR_EXPRESSION "^skipped")
endif()

foreach(source ${KVW_TESTS})
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} EXCLUDE_FROM_ALL ${source})
  target_link_libraries(${name} PRIVATE kvw_core kvw_test_flags)
  if(KVW_FIRST_TEST)
    target_precompile_headers(${name} REUSE_FROM ${KVW_FIRST_TEST})
  else()
    target_precompile_headers(${name} PRIVATE ${KVW_COMMON_HEADERS})
    set(KVW_FIRST_TEST ${name})
  endif()
  add_dependencies(native_tests ${name})
  add_test(NAME ${name} COMMAND ${name})
  # A test that hangs is a failure, not a long night. Sanitizers slow each down up to ten times.
  if(KVW_SANITIZE)
    set_tests_properties(${name} PROPERTIES TIMEOUT 1200)
  else()
    set_tests_properties(${name} PROPERTIES TIMEOUT 300)
  endif()
endforeach()

# Copies of the files that have sequence points, with them; they come before the core's own.
set(KVW_HOOKED client/device_load.cc client/fill_run.cc client/load.cc client/pack_run.cc
               client/page_writer.cc client/pins.cc client/store.cc client/view.cc slots/pool.cc
               warehouse/removal.cc warehouse/reservations.cc warehouse/slabs.cc)
list(TRANSFORM KVW_HOOKED PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
add_library(kvw_hooked OBJECT EXCLUDE_FROM_ALL ${KVW_HOOKED})
target_link_libraries(kvw_hooked PUBLIC kvw_core)
target_compile_definitions(kvw_hooked PUBLIC KVW_SEQUENCE_POINTS)
foreach(name fault_process_test fault_race_test)
  target_link_libraries(${name} PRIVATE kvw_hooked)
endforeach()

# All fuzz targets in one program, each under a name of its own.
file(GLOB KVW_FUZZ CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/*.cc)
list(FILTER KVW_FUZZ EXCLUDE REGEX "/driver\\.cc$")
foreach(source ${KVW_FUZZ})
  get_filename_component(name ${source} NAME_WE)
  add_library(fuzz_${name}_object OBJECT EXCLUDE_FROM_ALL ${source})
  target_compile_definitions(
    fuzz_${name}_object PRIVATE LLVMFuzzerTestOneInput=fuzz_${name} KVW_CHECK_NO_MAIN)
  target_link_libraries(fuzz_${name}_object PUBLIC kvw_core)
  target_link_libraries(fault_input_test PRIVATE fuzz_${name}_object)
endforeach()
target_compile_definitions(
  fault_input_test PRIVATE KVW_FUZZ_CORPUS="${CMAKE_CURRENT_SOURCE_DIR}/../tests/fuzz/corpus")

# The contract model of CUDA's driver, as the library that tests load in the driver's place. With
# -Bsymbolic: a process that has the real one too must not mix them.
file(GLOB KVW_CUDA_MODEL CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/cuda_model/*.cc)
add_library(kvw_cuda_model MODULE EXCLUDE_FROM_ALL ${KVW_CUDA_MODEL})
target_include_directories(kvw_cuda_model PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(kvw_cuda_model PRIVATE kvw_flags Threads::Threads)
target_link_options(kvw_cuda_model PRIVATE -Wl,-Bsymbolic)
set_target_properties(
  kvw_cuda_model PROPERTIES PREFIX "" OUTPUT_NAME "libcuda.so" SUFFIX ".1" LIBRARY_OUTPUT_DIRECTORY
                            ${CMAKE_BINARY_DIR}/cuda_model)
add_dependencies(native_tests kvw_cuda_model)
if(KVW_CUDA_INCLUDE)
  target_include_directories(gpu_headers_test SYSTEM PRIVATE ${KVW_CUDA_INCLUDE})
endif()
set(KVW_GPU_TESTS ${KVW_TESTS})
list(FILTER KVW_GPU_TESTS INCLUDE REGEX "/gpu_[^/]*\\.cc$")
foreach(source ${KVW_GPU_TESTS})
  get_filename_component(name ${source} NAME_WE)
  add_dependencies(${name} kvw_cuda_model)
  target_compile_definitions(${name} PRIVATE KVW_CUDA_MODEL="$<TARGET_FILE:kvw_cuda_model>")
endforeach()
