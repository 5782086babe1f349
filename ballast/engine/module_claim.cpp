#include "ballast/engine/module_claim.h"

#include <torch/nn/module.h>

#include <mutex>
#include <unordered_set>

#include "ballast/base/error.h"

namespace ballast {
namespace {

std::mutex mutex;  // guards the set: engines of several ranks may live on threads of one process
std::unordered_set<const c10::TensorImpl*> claimed;

}  // namespace

ModuleClaim::ModuleClaim(const torch::nn::Module& module) {
  std::lock_guard lock(mutex);
  const auto named = module.named_parameters();
  for (const auto& item : named)
    if (item.value().defined() && claimed.contains(item.value().unsafeGetTensorImpl()))
      throw UseError("engine.Engine", "another engine trains a parameter of this module (", item.key(),
                     "; end that engine with shutdown() first)");
  for (const auto& item : named)
    if (item.value().defined() && claimed.insert(item.value().unsafeGetTensorImpl()).second)
      parameters_.push_back(item.value());
}

ModuleClaim::~ModuleClaim() {
  std::lock_guard lock(mutex);
  for (const at::Tensor& parameter : parameters_) claimed.erase(parameter.unsafeGetTensorImpl());
}

}  // namespace ballast
