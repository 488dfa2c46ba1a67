# What the core needs from the system: threads and xxhash.h always, liburing if it is there.
include(CheckCXXSourceCompiles)
find_package(Threads REQUIRED)
add_library(kvw_dependencies INTERFACE)
target_link_libraries(kvw_dependencies INTERFACE Threads::Threads)

# Header only (XXH_INLINE_ALL): its code is compiled with the flags of the file that includes it.
find_path(KVW_XXHASH_INCLUDE xxhash.h)
if(NOT KVW_XXHASH_INCLUDE)
  message(FATAL_ERROR "xxhash.h was not found. It is in the system package libxxhash-dev "
                      "(Debian, Ubuntu) or xxhash-devel (Fedora): install it, or run `make setup`.")
endif()
target_include_directories(kvw_dependencies SYSTEM INTERFACE ${KVW_XXHASH_INCLUDE})

# The static library is preferred: the module then loads where liburing is not installed. Not every
# distribution compiles it position-independent, so linking it into a shared object is tried first.
function(kvw_try_liburing library result)
  set(CMAKE_REQUIRED_INCLUDES ${KVW_URING_INCLUDE})
  set(CMAKE_REQUIRED_LIBRARIES ${library})
  set(CMAKE_REQUIRED_FLAGS "-fPIC -shared")
  check_cxx_source_compiles("
    #include <liburing.h>
    int entry(io_uring* ring) { return io_uring_queue_init(8, ring, 0) + io_uring_submit(ring); }"
    ${result})
endfunction()

find_path(KVW_URING_INCLUDE liburing.h)
find_library(KVW_URING_STATIC liburing.a)
find_library(KVW_URING_SHARED uring)
if(KVW_URING_INCLUDE AND KVW_URING_STATIC)
  kvw_try_liburing(${KVW_URING_STATIC} KVW_URING_STATIC_WORKS)
endif()
if(KVW_URING_INCLUDE AND KVW_URING_SHARED AND NOT KVW_URING_STATIC_WORKS)
  kvw_try_liburing(${KVW_URING_SHARED} KVW_URING_SHARED_WORKS)
endif()

if(KVW_URING_STATIC_WORKS)
  set(KVW_URING_LIBRARY ${KVW_URING_STATIC})
elseif(KVW_URING_SHARED_WORKS)
  set(KVW_URING_LIBRARY ${KVW_URING_SHARED})
endif()
if(KVW_URING_LIBRARY)
  message(STATUS "NVMe I/O: io_uring (${KVW_URING_LIBRARY}) and the pread pool")
  target_include_directories(kvw_dependencies SYSTEM INTERFACE ${KVW_URING_INCLUDE})
  target_link_libraries(kvw_dependencies INTERFACE ${KVW_URING_LIBRARY})
  target_compile_definitions(kvw_dependencies INTERFACE KVW_HAVE_LIBURING=1)
else()
  message(STATUS "NVMe I/O: the pread pool only (no liburing with its headers was found)")
endif()
