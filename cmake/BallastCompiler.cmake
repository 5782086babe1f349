set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)  # an installed program finds what it was linked with outside of the system
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# Line numbers for backtraces; full debug information adds a third to the time of a file that includes torch's headers.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")

# The wheels are release builds, and LibTorch's inline asserts read fields that only its debug build sets.
add_compile_definitions(NDEBUG)
# Designated initialisers name what matters and leave the rest to its default; -Wextra would have them all named.
add_compile_options(-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers)

find_program(BALLAST_MOLD mold)
if(BALLAST_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
find_program(BALLAST_CCACHE ccache)
if(BALLAST_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # pch_defines and time_macros: without them ccache never hits on a file that uses a precompiled header. The base
  # directory lets a second clone hit what the first compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${BALLAST_CCACHE})
endif()

set(BALLAST_SANITIZE "" CACHE STRING "Sanitizer for everything built here: address or thread")
if(BALLAST_SANITIZE)
  add_compile_options(-fsanitize=${BALLAST_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${BALLAST_SANITIZE})
endif()
