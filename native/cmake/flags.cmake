# How the core is compiled. No -march=native: what needs newer instructions says so in its file
# name and is chosen at run time.
add_library(kvw_flags INTERFACE)
# Assertions stay in release builds: a broken invariant must stop before it becomes wrong bytes.
target_compile_options(kvw_flags INTERFACE -O3 -g1 -UNDEBUG -Wall -Wextra -Werror=return-type)

if(KVW_SANITIZE STREQUAL "address")
  # vptr asks through a pipe whether memory can be read: tests that leave no descriptors end by it.
  set(KVW_SANITIZE_FLAGS
    -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined)
elseif(KVW_SANITIZE STREQUAL "thread")
  set(KVW_SANITIZE_FLAGS -fsanitize=thread)
elseif(NOT KVW_SANITIZE STREQUAL "")
  message(FATAL_ERROR "KVW_SANITIZE is \"${KVW_SANITIZE}\"; use address, thread, or nothing")
endif()
if(KVW_SANITIZE_FLAGS)
  target_compile_options(kvw_flags INTERFACE ${KVW_SANITIZE_FLAGS} -O1 -fno-omit-frame-pointer)
  target_link_options(kvw_flags INTERFACE ${KVW_SANITIZE_FLAGS})
endif()

# The frames that gcc makes to see use after return lie at multiples of 32, and registers of AVX-512
# are kept at multiples of 64: a fault, seen with gcc 12 (its bug 110027).
if(KVW_SANITIZE STREQUAL "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(KVW_WIDE_FRAMES --param=asan-use-after-return=0)
endif()

# Files are named after the instructions they need: copy_avx2.cc. They are compiled with them where
# the processor family has them and left out elsewhere. Such a file includes no header with inline
# functions that others use too: the linker keeps one copy, and it could be the one with the newer
# instructions.
function(kvw_apply_instruction_sets sources)
  set(kept ${${sources}})
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(FILTER kept EXCLUDE REGEX "_neon\\.cc$")
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    list(FILTER kept EXCLUDE REGEX "_avx(2|512)\\.cc$")
  else()
    list(FILTER kept EXCLUDE REGEX "_(avx2|avx512|neon)\\.cc$")
  endif()
  foreach(source ${kept})
    if(source MATCHES "_avx2\\.cc$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-mavx2")
    elseif(source MATCHES "_avx512\\.cc$")
      set_source_files_properties(
        ${source} PROPERTIES COMPILE_OPTIONS
        "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;${KVW_WIDE_FRAMES}")
    endif()
  endforeach()
  set(${sources} ${kept} PARENT_SCOPE)
endfunction()
