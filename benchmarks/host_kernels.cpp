// The host's SIMD passes against PyTorch's operators for the same work and against a plain loop over the same streams:
// same arrays, same threads, taking turns. Prints the median ratio of the turns beside the least that is wanted.
//
//   bench_host_kernels [threads = all] [millions of elements = 16] [turns = 15]

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "ballast/kernels/chunks.h"
#include "ballast/kernels/kernels.h"

namespace {

using namespace ballast::kernels;

struct State {
  std::int64_t n;
  int threads;
  at::Tensor master, first, second, grad16, grad32, out, acc;

  State(std::int64_t n, int threads) : n(n), threads(threads) {
    master = at::randn({n}).mul_(.02);
    first = at::zeros({n});
    second = at::zeros({n});
    grad32 = at::randn({n}).mul_(1e-3);
    grad16 = grad32.to(at::kBFloat16);
    out = master.to(at::kBFloat16);
    acc = at::zeros({n});
  }
  UpdateView view(const at::Tensor& grad, bool copy) const {
    return {master.data_ptr<float>(),
            first.data_ptr<float>(),
            second.data_ptr<float>(),
            grad.data_ptr(),
            grad.scalar_type() == at::kFloat ? Scalar::kFloat32 : Scalar::kBFloat16,
            copy ? out.data_ptr() : nullptr,
            Scalar::kBFloat16,
            n};
  }
};

constexpr AdamStep kStep{1e-4, .9, .95, 1e-8, .1, true, 100, 1};

void fused_adamw(State& s, const at::Tensor& grad) {
  static const at::Tensor count = at::full({}, static_cast<double>(kStep.step), at::kFloat);
  at::_fused_adamw_({s.master}, {grad}, {s.first}, {s.second}, {}, {count}, kStep.lr, kStep.beta1, kStep.beta2,
                    kStep.weight_decay, kStep.eps, false, false);
}

void cast_fused_adamw_cast(State& s) {
  s.grad32.copy_(s.grad16);
  fused_adamw(s, s.grad32);
  s.out.copy_(s.master);
}

// Reads and writes what the bf16 AdamW pass does, and computes next to nothing: the speed of memory.
#if defined(__x86_64__)
__attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#endif
void touch(float* w, float* m, float* v, const std::uint16_t* g, std::uint16_t* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float x = static_cast<float>(g[i] & 1);
    w[i] = w[i] + x;
    m[i] = m[i] + x;
    v[i] = v[i] + x;
    out[i] = g[i];
  }
}

void touch_streams(State& s) {
  const auto* g = static_cast<const std::uint16_t*>(s.grad16.data_ptr());
  auto* out = static_cast<std::uint16_t*>(s.out.data_ptr());
  float *w = s.master.data_ptr<float>(), *m = s.first.data_ptr<float>(), *v = s.second.data_ptr<float>();
  for_each_chunk(s.n, s.threads, [&](std::int64_t begin, std::int64_t count) {
    touch(w + begin, m + begin, v + begin, g + begin, out + begin, count);
  });
}

struct Comparison {
  const char* name;
  const char* against;
  double bytes;  // an element, of our pass
  double bar;    // the other's time over ours, at least
  std::function<void(State&)> ours, theirs;
};

double seconds(const std::function<void(State&)>& work, State& state) {
  const auto start = std::chrono::steady_clock::now();
  work(state);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void adamw_bf16(State& s) { adam_update(kStep, s.view(s.grad16, true), s.threads); }
void adamw_fp32(State& s) { adam_update(kStep, s.view(s.grad32, false), s.threads); }
void accumulate_bf16(State& s) {
  accumulate(s.acc.data_ptr(), Scalar::kFloat32, s.grad16.data_ptr(), Scalar::kBFloat16, s.n, s.threads);
}

const Comparison kComparisons[] = {
    {"AdamW, bf16 gradient and copy", "casts + _fused_adamw_", 28, 1.7, adamw_bf16, cast_fused_adamw_cast},
    {"AdamW, fp32", "_fused_adamw_", 28, 1.0, adamw_fp32, [](State& s) { fused_adamw(s, s.grad32); }},
    {"fp32 += bf16", "Tensor::add_", 10, 8, accumulate_bf16, [](State& s) { s.acc.add_(s.grad16); }},
    {"AdamW, bf16 gradient and copy", "plain loop, same streams", 28, .95, adamw_bf16, touch_streams},
};

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : at::get_num_threads();
  const std::int64_t n = (argc > 2 ? std::atoll(argv[2]) : 16) * 1'000'000;
  const int turns = argc > 3 ? std::atoi(argv[3]) : 15;
  if (threads < 1 || n < 1 || turns < 1) {
    std::fprintf(stderr, "usage: %s [threads] [millions of elements] [turns], all at least 1\n", argv[0]);
    return 2;
  }
  at::set_num_threads(threads);
  State state(n, threads);
  std::printf("%s, %d thread(s), %lld elements, median of %d turns\n", instruction_set(), threads,
              static_cast<long long>(n), turns);
  for (const Comparison& comparison : kComparisons) {
    std::vector<double> ours, theirs, ratios;
    for (int turn = -2; turn < turns; ++turn) {
      const bool first = turn % 2 == 0;  // who goes first alternates too
      double a = first ? seconds(comparison.ours, state) : 0;
      const double b = seconds(comparison.theirs, state);
      if (!first) a = seconds(comparison.ours, state);
      if (turn < 0) continue;
      ours.push_back(a), theirs.push_back(b), ratios.push_back(b / a);
    }
    const double time = median(ours);
    std::printf("%-30s %7.2f ms %6.1f GB/s   %-25s %7.2f ms   ratio %5.2f   wanted %.2f\n", comparison.name, 1e3 * time,
                comparison.bytes * static_cast<double>(n) / time * 1e-9, comparison.against, 1e3 * median(theirs),
                median(ratios), comparison.bar);
  }
  return 0;
}
