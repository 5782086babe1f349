#include "ballast/engine/module_walk.h"

#include <ATen/ATen.h>
#include <fnmatch.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <optional>
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

// Whether two tensors of one storage show the same elements in the same places.
bool same_view(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.storage_offset() != b.storage_offset() || a.sizes() != b.sizes())
    return false;
  for (std::int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

// Elements of its storage from the first that the tensor shows to behind the last.
Range extent(const at::Tensor& tensor) {
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {tensor.storage_offset(), last + 1};
}

// Whether two tensors of one storage, neither of them empty, show a common element.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.element_size() != b.element_size()) return true;  // nobody parts one storage between types
  const Range common = intersect(extent(a), extent(b));
  if (common.empty()) return false;
  if (a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense()) return true;
  // Interleaved views (columns of one matrix) may still be apart: count.
  at::Tensor shown = at::zeros({std::max(extent(a).end, extent(b).end)}, at::kBool);
  shown.as_strided(a.sizes(), a.strides(), a.storage_offset()).fill_(true);
  return shown.as_strided(b.sizes(), b.strides(), b.storage_offset()).any().item<bool>();
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
    if (!is_sharded_type(tensor.scalar_type())) {
      if (!tensor.requires_grad()) return walked_.buffers.push_back(tensor);
      throw UseError("engine.walk", "a parameter of this type can't be trained (", name, ", ",
                     c10::toString(tensor.scalar_type()), "; convert the module: module->to(torch::kFloat32))");
    }
    if (const auto tied = tied_by_memory(tensor, name)) {
      index_.emplace(tensor.unsafeGetTensorImpl(), *tied);
      walked_.parameters[*tied].names.push_back(name);
      walked_.tensors[*tied].push_back(tensor);
      return;
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
    walked_.tensors.push_back({tensor});
  }

  // The parameter that the tensor is a second view of, if there is one. Giving both memory of their own would untie
  // them without a word; views that only overlap can't be kept together in a unit's flat buffer.
  std::optional<std::size_t> tied_by_memory(const at::Tensor& tensor, const std::string& name) {
    if (tensor.numel() == 0 || !tensor.has_storage()) return std::nullopt;
    std::vector<std::size_t>& others = by_storage_[tensor.storage().unsafeGetStorageImpl()];
    for (const std::size_t p : others) {
      const at::Tensor& other = walked_.tensors[p].front();
      const std::string& other_name = walked_.parameters[p].name();
      if (same_view(tensor, other)) {
        if (tensor.requires_grad() == other.requires_grad()) return p;
        throw UseError("engine.walk", "two parameters are the same memory and only one of them is trainable (",
                       other_name, " and ", name, "; give both the same requires_grad, or one of them a clone())");
      }
      if (overlap(tensor, other))
        throw UseError("engine.walk", "two parameters share a part of their memory (", other_name, " and ", name,
                       "; register one tensor of the same shape under both names, or give one of them a clone())");
    }
    others.push_back(walked_.parameters.size());
    return std::nullopt;
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
  std::unordered_map<c10::StorageImpl*, std::vector<std::size_t>> by_storage_;  // parameters that are views of it
};

}  // namespace

bool is_sharded_type(c10::ScalarType type) { return type == at::kFloat || type == at::kHalf || type == at::kBFloat16; }

WalkedModule walk(const torch::nn::Module& module, const Config& config) {
  Walk walk(config);
  walk.visit(module, "", nullptr, false);
  return walk.finish();
}

}  // namespace ballast
