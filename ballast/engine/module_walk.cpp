#include "ballast/engine/module_walk.h"

#include <fnmatch.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <unordered_map>

#include "ballast/base/edit_distance.h"
#include "ballast/base/error.h"

namespace ballast {
namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

bool ends_with_part(const std::string& name, const std::string& suffix) {
  return name == suffix ||
         (name.size() > suffix.size() && name.ends_with(suffix) && name[name.size() - suffix.size() - 1] == '.');
}

class Walk {
 public:
  explicit Walk(const Config& config) : config_(config), name_used_(config.zero.leaf_module.names.size(), false) {}

  // unit: the unit that the module stands in, null outside of any.
  void visit(const torch::nn::Module& module, const std::string& name, const std::string* unit, bool leaf) {
    for (const auto& item : module.named_parameters(/*recurse=*/false))
      add(item.value(), join(name, item.key()), unit ? *unit : name, leaf);
    for (const auto& item : module.named_buffers(/*recurse=*/false))
      if (item.value().defined()) walked_.buffers.push_back(item.value());

    const bool children_are_units = dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
                                    dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr;
    for (const auto& item : module.named_children()) {
      const std::string child = join(name, item.key());
      modules_.push_back(child);
      if (!leaf && declared_leaf(child)) {
        visit(*item.value(), child, &child, true);
      } else if (unit == nullptr && children_are_units) {
        visit(*item.value(), child, &child, leaf);
      } else {
        visit(*item.value(), child, unit, leaf);
      }
    }
  }

  WalkedModule finish() {
    const auto& names = config_.zero.leaf_module.names;
    for (std::size_t i = 0; i < names.size(); ++i)
      if (!name_used_[i])
        throw ConfigError("engine.walk", "no module of this name (zero_optimization.leaf_module.names = ", names[i],
                          "; nearest: ", nearest(names[i], modules_), ")");
    assign_groups();
    return std::move(walked_);
  }

 private:
  bool declared_leaf(const std::string& name) {
    const LeafModuleConfig& leaf = config_.zero.leaf_module;
    const auto exact = std::find(leaf.names.begin(), leaf.names.end(), name);
    if (exact != leaf.names.end()) name_used_[static_cast<std::size_t>(exact - leaf.names.begin())] = true;
    return exact != leaf.names.end() ||
           std::any_of(leaf.name_suffixes.begin(), leaf.name_suffixes.end(),
                       [&](const std::string& suffix) { return ends_with_part(name, suffix); });
  }

  void add(const at::Tensor& tensor, const std::string& name, const std::string& unit, bool leaf) {
    if (!tensor.defined()) return;
    if (const auto tied = index_.find(tensor.unsafeGetTensorImpl()); tied != index_.end()) {
      walked_.parameters[tied->second].names.push_back(name);
      return;
    }
    const bool half = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
    if (!half && tensor.scalar_type() != at::kFloat) {
      if (!tensor.requires_grad()) return;
      throw UseError("engine.walk", "a parameter of this type can't be trained (", name, ", ",
                     c10::toString(tensor.scalar_type()), "; convert the module: module->to(torch::kFloat32))");
    }
    index_.emplace(tensor.unsafeGetTensorImpl(), walked_.parameters.size());
    ParameterInfo info;
    info.names = {name};
    info.shape = tensor.sizes().vec();
    info.numel = tensor.numel();
    info.dtype = tensor.scalar_type();
    info.compute_dtype = config_.bf16 ? at::kBFloat16 : config_.fp16.enabled ? at::kHalf : tensor.scalar_type();
    info.trainable = tensor.requires_grad();
    info.unit = unit;
    info.leaf = leaf;
    walked_.parameters.push_back(std::move(info));
    walked_.tensors.push_back(tensor);
  }

  void assign_groups() {
    const auto& groups = config_.optimizer.groups;
    std::vector<bool> matched(groups.size(), false);
    for (ParameterInfo& info : walked_.parameters)
      for (std::size_t g = 0; g < groups.size() && info.group == 0; ++g)
        for (const std::string& pattern : groups[g].patterns)
          if (std::any_of(info.names.begin(), info.names.end(),
                          [&](const std::string& name) { return fnmatch(pattern.c_str(), name.c_str(), 0) == 0; })) {
            info.group = static_cast<int>(g) + 1;
            matched[g] = true;
          }
    for (std::size_t g = 0; g < groups.size(); ++g)
      if (!matched[g])
        throw ConfigError("engine.walk", "no parameter belongs to a group (optimizer.params.groups[", g,
                          "], first pattern ", groups[g].patterns.empty() ? "none" : groups[g].patterns.front(), ")");
  }

  const Config& config_;
  WalkedModule walked_;
  std::vector<std::string> modules_;
  std::vector<bool> name_used_;
  std::unordered_map<c10::TensorImpl*, std::size_t> index_;
};

}  // namespace

WalkedModule walk(const torch::nn::Module& module, const Config& config) {
  Walk walk(config);
  walk.visit(module, "", nullptr, false);
  return walk.finish();
}

}  // namespace ballast
