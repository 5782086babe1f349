#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "tests/kernels/arrays.h"

namespace ballast::kernels::testing {
namespace {

at::Tensor tensor(const std::vector<float>& values) {
  return at::from_blob(const_cast<float*>(values.data()), {static_cast<std::int64_t>(values.size())}, at::kFloat)
      .clone();
}

float* floats(const at::Tensor& tensor) { return tensor.data_ptr<float>(); }

// torch's kernel fuses multiplications and additions where the CPU can, and forms its constants in fp32: last bits
// differ. Five steps, gradients that change.
TEST(AgainstTorch, AdamIsWithinAFewUlpOfTheFusedKernel) {
  const std::int64_t n = 100'003;
  for (const bool decoupled : {true, false}) {
    std::vector<float> start(n);
    for (std::int64_t i = 0; i < n; ++i) start[i] = 1 + .5f * std::sin(static_cast<float>(i));
    at::Tensor w = tensor(start), m = at::zeros_like(w), v = at::zeros_like(w);
    at::Tensor torch_w = w.clone(), torch_m = m.clone(), torch_v = v.clone();
    for (int step = 1; step <= 5; ++step) {
      std::vector<float> values(n);
      for (std::int64_t i = 0; i < n; ++i) values[i] = .1f + .05f * std::cos(static_cast<float>(i * step));
      const at::Tensor grad = tensor(values);
      const at::Tensor count = at::full({}, step, at::kFloat);
      at::TensorList weights(torch_w), grads(grad), firsts(torch_m), seconds(torch_v), counts(count);
      if (decoupled) {
        at::_fused_adamw_(weights, grads, firsts, seconds, {}, counts, 1e-2, .9, .999, .1, 1e-8, false, false);
      } else {
        at::_fused_adam_(weights, grads, firsts, seconds, {}, counts, 1e-2, .9, .999, .1, 1e-8, false, false);
      }
      const UpdateView view{floats(w),        floats(m), floats(v),        floats(grad),
                            Scalar::kFloat32, nullptr,   Scalar::kFloat32, n};
      adam_update({1e-2, .9, .999, 1e-8, .1, decoupled, step, 1}, view, 2);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      ASSERT_LE(ulps(floats(m)[i], floats(torch_m)[i]), 8) << i;
      ASSERT_LE(ulps(floats(v)[i], floats(torch_v)[i]), 8) << i;
      ASSERT_LE(ulps(floats(w)[i], floats(torch_w)[i]), 8) << i;
    }
  }
}

TEST(AgainstTorch, ConversionsGiveTorchsBits) {
  const std::int64_t n = 50'021;
  std::vector<float> values(n);
  for (std::int64_t i = 0; i < n; ++i) values[i] = sample(i, 21);
  for (const auto& [ours, theirs] :
       {std::pair{Scalar::kBFloat16, at::kBFloat16}, std::pair{Scalar::kFloat16, at::kHalf}}) {
    const at::Tensor want = tensor(values).to(theirs);
    at::Tensor got = at::empty_like(want);
    convert(got.data_ptr(), ours, values.data(), Scalar::kFloat32, n, 2);
    EXPECT_TRUE(at::equal(got, want)) << name(ours);
  }
}

TEST(AgainstTorch, OneOpenMpRuntimeIsLoaded) {
  std::vector<float> values(200'000, 1);
  EXPECT_EQ(sum_squares(values.data(), Scalar::kFloat32, 200'000, 2), 200'000);
  (void)at::ones({200'000}).add_(1);
  std::ifstream maps("/proc/self/maps");
  if (!maps) GTEST_SKIP() << "no /proc/self/maps here";
  std::set<std::string> runtimes;
  for (std::string line; std::getline(maps, line);) {
    const std::size_t path = line.find('/');
    if (path == std::string::npos) continue;
    for (const char* runtime : {"/libgomp", "/libomp", "/libiomp"}) {
      if (line.find(runtime, path) != std::string::npos) runtimes.insert(line.substr(path));
    }
  }
  EXPECT_EQ(runtimes.size(), 1u) << *runtimes.begin() << " and " << *runtimes.rbegin();
}

}  // namespace
}  // namespace ballast::kernels::testing
