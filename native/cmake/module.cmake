# The Python module kvwarehouse.core._native, from bindings/.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_DIR
  RESULT_VARIABLE KVW_NANOBIND_STATUS)
if(NOT KVW_NANOBIND_STATUS EQUAL 0)
  message(FATAL_ERROR "nanobind is not installed for ${Python_EXECUTABLE}: "
                      "run `make setup`, or install the build requirements of pyproject.toml")
endif()
find_package(nanobind CONFIG REQUIRED)

if(DEFINED SKBUILD_PROJECT_VERSION_FULL)
  set(KVW_VERSION ${SKBUILD_PROJECT_VERSION_FULL})
else()
  file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/../pyproject.toml KVW_VERSION REGEX "^version = ")
  string(REGEX REPLACE "^version = \"(.*)\"$" "\\1" KVW_VERSION "${KVW_VERSION}")
endif()

file(GLOB KVW_BINDINGS CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/bindings/*.cc)
if(KVW_BINDINGS)
  nanobind_add_module(_native NB_STATIC NOMINSIZE NOSTRIP ${KVW_BINDINGS})
  target_link_libraries(_native PRIVATE kvw_core)
  target_compile_definitions(_native PRIVATE KVW_VERSION="${KVW_VERSION}")
  install(TARGETS _native LIBRARY DESTINATION kvwarehouse/core)
else()
  message(WARNING "native/bindings has no .cc files: the Python module is not built")
endif()
