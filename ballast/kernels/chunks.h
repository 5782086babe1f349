#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ballast/base/math.h"
#include "ballast/kernels/kernels.h"

namespace ballast::kernels {

/// Every range is cut at multiples of this many elements, counted from its start, whatever the thread count: what a
/// pass computes for a chunk can't depend on who else runs.
inline constexpr std::int64_t kChunk = kSquaresChunk;

constexpr std::int64_t element_bytes(Scalar type) { return type == Scalar::kFloat32 ? 4 : 2; }

/// The address of element i.
inline const void* at(const void* array, Scalar type, std::int64_t i) {
  return static_cast<const std::byte*>(array) + i * element_bytes(type);
}
inline void* at(void* array, Scalar type, std::int64_t i) {
  return static_cast<std::byte*>(array) + i * element_bytes(type);
}

using ChunkBody = void (*)(const void* context, std::int64_t index);

/// Calls body(context, i) once for each i in [0, chunks), on at most `threads` threads of the OpenMP runtime, each in
/// ascending order. Inside, the floating-point environment is the default one (round to nearest even, denormals kept);
/// the caller's own is back afterwards. Threads inherit flush-to-zero from whoever started them.
void run_chunks(std::int64_t chunks, int threads, ChunkBody body, const void* context) noexcept;

/// body(begin, count) for the chunks of [0, n): begin a multiple of kChunk, count <= kChunk.
template <class Body>
void for_each_chunk(std::int64_t n, int threads, const Body& body) noexcept {
  struct Context {
    const Body& body;
    std::int64_t n;
  };
  const Context context{body, n};
  const ChunkBody run = [](const void* opaque, std::int64_t index) {
    const auto& [body, n] = *static_cast<const Context*>(opaque);
    const std::int64_t begin = index * kChunk;
    body(begin, std::min(n - begin, kChunk));
  };
  run_chunks(ceil_div(n, kChunk), threads, run, &context);
}

}  // namespace ballast::kernels
