#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch::nn {
class Module;
}

namespace ballast {

/// A module's parameters belong to one engine at a time: a second one would move their data away from under the first,
/// and both would take every gradient. While a claim lives no other can be made on any of its parameters.
class ModuleClaim {
 public:
  ModuleClaim() = default;  // of nothing
  /// UseError if another claim has one of them; then nothing is claimed.
  explicit ModuleClaim(const torch::nn::Module& module);
  ~ModuleClaim();
  ModuleClaim(ModuleClaim&&) noexcept = default;  // the vector leaves: an empty one claims nothing
  ModuleClaim& operator=(ModuleClaim from) noexcept {
    parameters_.swap(from.parameters_);
    return *this;
  }

 private:
  std::vector<at::Tensor> parameters_;  // held, so that no new tensor gets a claimed one's address
};

}  // namespace ballast
