#!/usr/bin/env bash
# A CUDA build of PyTorch, which pip installs by default, on a machine without a CUDA toolkit: the project configures for
# the CPU, says so, and a program that links LibTorch runs; the cuda preset's demand is refused with the remedy. A stand-in
# where PyTorch is a CPU build: the same libraries beside a libtorch_cuda.so that nothing opens.
# usage: no_toolkit_test.sh SOURCE TORCH_PREFIX WORK
set -euo pipefail
readonly SOURCE=$1 TORCH=$2 WORK=$3

die() {
  cat "$WORK/output" >&2
  printf 'no_toolkit_test: %s\n' "$*" >&2
  exit 1
}

rm -rf "$WORK"
mkdir -p "$WORK"
libtorch=$TORCH
if [[ ! -e $TORCH/lib/libtorch_cuda.so ]]; then
  libtorch=$WORK/torch
  mkdir -p "$libtorch/lib"
  for part in include share; do ln -s "$TORCH/$part" "$libtorch/$part"; done
  for library in "$TORCH"/lib/*; do ln -s "$library" "$libtorch/lib/"; done
  touch "$libtorch/lib/libtorch_cuda.so"
fi

configure() {
  cmake -G Ninja -S "$1" -B "$WORK/$2" -DTorch_DIR="$libtorch/share/cmake/Torch" \
    -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON "${@:3}" > "$WORK/output" 2>&1
}

# Another program, as small as one that needs the flags and the libraries can be.
mkdir "$WORK/program"
cat > "$WORK/program/CMakeLists.txt" << END
cmake_minimum_required(VERSION 3.22)
project(program LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
include($SOURCE/cmake/BallastLibTorch.cmake)
ballast_find_libtorch()
message(STATUS "CUDA \${BALLAST_LIBTORCH_CUDA}, version \${Torch_VERSION}")
add_executable(program main.cpp)
target_link_libraries(program \${TORCH_LIBRARIES})
END
cat > "$WORK/program/main.cpp" << 'END'
#include <ATen/ops/arange.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
int main() {
  c10::make_intrusive<c10d::HashStore>();
  return at::arange(5).sum().item<int>() == 10 ? 0 : 1;
}
END
configure "$WORK/program" built || die "a program didn't configure"
grep -q 'no CUDA toolkit with nvcc and NVRTC: CPU only' "$WORK/output" || die "it isn't said that there is no CUDA toolkit"
grep -q 'CUDA OFF, version 2\.' "$WORK/output" || die "no version, or CUDA where there is no toolkit"
cmake --build "$WORK/built" > "$WORK/output" 2>&1 || die "a program didn't build"
"$WORK/built/program" || die "a program didn't run"

configure "$SOURCE" whole -DBALLAST_TESTS=OFF || die "the project didn't configure"
! configure "$SOURCE" whole -DBALLAST_TESTS=OFF -DBALLAST_REQUIRE_CUDA=ON || die "BALLAST_REQUIRE_CUDA was taken"
tr -s '\n ' ' ' < "$WORK/output" | grep -q 'CMake finds no CUDA toolkit with nvcc' || die "the remedy isn't said"
