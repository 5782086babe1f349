# pip's build names the Python that it builds for.
if(SKBUILD AND NOT BALLAST_PYTHON)
  set(BALLAST_PYTHON ${Python_EXECUTABLE} CACHE FILEPATH "Python whose PyTorch supplies LibTorch")
endif()

# LibTorch is the one inside the installed PyTorch wheel: ask the active Python for it unless the caller names it.
if(NOT Torch_DIR OR BALLAST_PYTHON)
  find_program(BALLAST_PYTHON NAMES python3 python DOC "Python whose PyTorch supplies LibTorch" REQUIRED)
  execute_process(
    COMMAND ${BALLAST_PYTHON} ${PROJECT_SOURCE_DIR}/tools/find_torch.py
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE why_not ERROR_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE torch_missing)
  if(torch_missing AND SKBUILD)
    message(FATAL_ERROR "${why_not}. The module is built against the PyTorch of your environment, which pip hides from "
                        "builds unless told otherwise: pip install --no-build-isolation .")
  endif()
  if(torch_missing)
    message(FATAL_ERROR "${why_not}: run './dev build', which prepares one, or pass -DBALLAST_PYTHON=/path/to/python3 "
                        "of an environment that has PyTorch 2.11 to 2.14")
  endif()
  string(REPLACE "\n" ";" found "${found}")
  list(GET found 2 torch_prefix)
  list(GET found 3 BALLAST_PYTHON_SUFFIX)
  list(GET found 4 BALLAST_PYTHON_INCLUDE)
  set(Torch_DIR ${torch_prefix}/Torch CACHE PATH "LibTorch's CMake package" FORCE)
endif()
include(BallastLibTorch)
ballast_find_libtorch()
if(Torch_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "LibTorch ${Torch_VERSION} in ${Torch_DIR} is too old: pass -DTorch_DIR of 2.11 to 2.14")
endif()
# Torch's package names folders where MKL would be below an empty root; they would end up in every run path.
if(TARGET caffe2::mkl)
  set(mkl_folders "")
  get_target_property(named caffe2::mkl INTERFACE_LINK_DIRECTORIES)
  foreach(folder IN LISTS named)
    if(IS_DIRECTORY "${folder}")
      list(APPEND mkl_folders ${folder})
    endif()
  endforeach()
  set_property(TARGET caffe2::mkl PROPERTY INTERFACE_LINK_DIRECTORIES ${mkl_folders})
endif()
separate_arguments(TORCH_CXX_FLAGS)

find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)

# c10d's Gloo backend lives in the wheel, its transport headers in the distribution.
find_path(BALLAST_GLOO_INCLUDE gloo/transport/device.h)
if(NOT BALLAST_GLOO_INCLUDE)
  message(FATAL_ERROR "gloo's headers are missing: install libgloo-dev (Debian, Ubuntu)")
endif()

find_path(BALLAST_HWY_INCLUDE hwy/highway.h)
find_library(BALLAST_HWY_LIBRARY hwy)
if(NOT BALLAST_HWY_INCLUDE OR NOT BALLAST_HWY_LIBRARY)
  message(FATAL_ERROR "Google Highway is missing: install libhwy-dev (Debian, Ubuntu)")
endif()

find_path(BALLAST_XXHASH_INCLUDE xxhash.h)
if(NOT BALLAST_XXHASH_INCLUDE)
  message(FATAL_ERROR "xxHash is missing: install libxxhash-dev (Debian, Ubuntu)")
endif()

option(BALLAST_URING "Read and write swap files with io_uring where the system permits it; OFF: with threads alone" ON)
if(BALLAST_URING)
  find_path(BALLAST_URING_INCLUDE liburing.h)
  find_library(BALLAST_URING_LIBRARY uring)
  if(NOT BALLAST_URING_INCLUDE OR NOT BALLAST_URING_LIBRARY)
    message(FATAL_ERROR "liburing is missing: install liburing-dev (Debian, Ubuntu) or pass -DBALLAST_URING=OFF")
  endif()
endif()

option(BALLAST_REQUIRE_CUDA "Fail unless PyTorch is a CUDA build and there is a CUDA toolkit" OFF)
if(BALLAST_REQUIRE_CUDA AND NOT BALLAST_LIBTORCH_CUDA)
  message(FATAL_ERROR "This can't be built for CUDA: either PyTorch ${Torch_VERSION} in ${Torch_DIR} is built without it "
                      "(pass -DBALLAST_PYTHON=/path/to/python3 of an environment that has a CUDA build), or CMake finds no "
                      "CUDA toolkit with nvcc and NVRTC (install one, or name it by -DCUDAToolkit_ROOT). Or leave "
                      "BALLAST_REQUIRE_CUDA (preset cuda) off")
endif()

if(BALLAST_CLI)
  find_path(BALLAST_CLI11_INCLUDE CLI/CLI.hpp)
  if(NOT BALLAST_CLI11_INCLUDE)
    message(FATAL_ERROR "CLI11 is missing: install libcli11-dev (Debian, Ubuntu) or pass -DBALLAST_CLI=OFF")
  endif()
endif()
if(BALLAST_TESTS)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND)
    if(NOT EXISTS /usr/src/googletest/CMakeLists.txt)
      message(FATAL_ERROR "GoogleTest is missing: install libgtest-dev (Debian, Ubuntu) or pass -DBALLAST_TESTS=OFF")
    endif()
    set(INSTALL_GTEST OFF)
    add_subdirectory(/usr/src/googletest ${CMAKE_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
    add_library(GTest::gtest ALIAS gtest)
    add_library(GTest::gtest_main ALIAS gtest_main)
  endif()
endif()

# The module is for the Python whose PyTorch this is.
if(BALLAST_PYTHON AND PROJECT_IS_TOP_LEVEL)
  set(has_python ON)
endif()
option(BALLAST_PYTHON_MODULE "Build the Python module" ${has_python})
if(BALLAST_PYTHON_MODULE AND NOT EXISTS "${BALLAST_PYTHON_INCLUDE}/Python.h")
  message(FATAL_ERROR "${BALLAST_PYTHON} has no C headers: install python3-dev (Debian, Ubuntu) or pass "
                      "-DBALLAST_PYTHON_MODULE=OFF")
endif()

# Python has a C++ runtime already, PyTorch's. A module that brings its own crashes with the first number that it writes to
# a stream, since each runtime takes the other's functions.
if(BALLAST_PYTHON_MODULE)
  file(WRITE ${CMAKE_BINARY_DIR}/runtime/main.cpp "#include <iostream>\nint main() { std::cout << 1L; }\n")
  try_compile(BALLAST_RUNTIME_BUILT ${CMAKE_BINARY_DIR}/runtime ${CMAKE_BINARY_DIR}/runtime/main.cpp
              COPY_FILE ${CMAKE_BINARY_DIR}/runtime/program OUTPUT_VARIABLE why_not)
  if(NOT BALLAST_RUNTIME_BUILT)
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} can't build a program that writes a number: ${why_not}")
  endif()
  file(STRINGS ${CMAKE_BINARY_DIR}/runtime/program shared_runtime REGEX "^libstdc\\+\\+\\.so")
  if(NOT shared_runtime)
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} links its C++ runtime into what it builds, or one that isn't libstdc++; a "
                        "module beside PyTorch needs the shared one. Choose another compiler (CXX=g++ in the environment), "
                        "or pass -DBALLAST_PYTHON_MODULE=OFF")
  endif()
endif()
