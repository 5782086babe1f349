#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "ballast/comm/world.h"
#include "ballast/grads/step_report.h"

namespace ballast::testing {

/// What the ranks of one trial saw, to be compared when all have ended: everything that is posted must be equal on all
/// ranks bit for bit. Each rank writes its own column, from its thread or its process.
class Board {
 public:
  explicit Board(int ranks) : columns_(static_cast<std::size_t>(ranks)) {}
  void post(int rank, std::string label, const at::Tensor& value);
  void post(int rank, std::string label, const StepReport& report);
  /// Every rank, after its last post: where ranks are processes, tells the others what it posted. Collective.
  void close(const World& world);
  /// Fails the running test for every entry in which a rank differs from rank 0, and if a rank that ran posted nothing.
  void expect_equal() const;

 private:
  using Entry = std::pair<std::string, std::string>;  // label, bytes or their hash
  std::vector<std::vector<Entry>> columns_;
  std::atomic<bool> closed_ = false;
};

std::string bytes_of(const at::Tensor& value);
std::string text_of(const StepReport& report);  // every field, doubles in full precision
/// Same dtype, shape and bits.
bool bit_equal(const at::Tensor& a, const at::Tensor& b);

}  // namespace ballast::testing
