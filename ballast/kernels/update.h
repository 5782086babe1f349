#pragma once

#include "ballast/kernels/chunks.h"
#include "ballast/kernels/kernels.h"

namespace ballast::kernels {

/// Elements [begin, begin + count) of a view.
inline UpdateView slice(const UpdateView& view, std::int64_t begin, std::int64_t count) {
  UpdateView part = view;
  part.master += begin;
  if (part.first != nullptr) part.first += begin;
  if (part.second != nullptr) part.second += begin;
  part.grad = at(view.grad, view.grad_type, begin);
  if (part.out != nullptr) part.out = at(view.out, view.out_type, begin);
  part.n = count;
  return part;
}

/// From here on a copy is written past the caches (measured: 10-14% faster): it would push out what the pass still
/// reads, and its first reader comes after the whole range. Below, it may well be read from the cache.
inline constexpr std::int64_t kStreamFrom = std::int64_t{1} << 20;

/// One rule's pass over one chunk, as each instruction set compiles it.
template <class Coefficients>
using UpdateChunk = void (*)(const Coefficients& coefficients, const UpdateView& chunk, bool stream_out);

template <class Coefficients>
void update(UpdateChunk<Coefficients> pass, const Coefficients& coefficients, const UpdateView& view,
            int threads) noexcept {
  for_each_chunk(view.n, threads, [&](std::int64_t begin, std::int64_t count) {
    pass(coefficients, slice(view, begin, count), view.n >= kStreamFrom);
  });
}

}  // namespace ballast::kernels
