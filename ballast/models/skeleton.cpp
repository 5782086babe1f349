#include "ballast/models/skeleton.h"

#include <torch/torch.h>

namespace ballast::models {

std::shared_ptr<torch::nn::Module> skeleton(const GptOptions& options) {
  auto root = std::make_shared<torch::nn::Module>();
  for (const ParameterShape& shape : parameter_shapes(options)) {
    std::shared_ptr<torch::nn::Module> at = root;
    std::size_t begin = 0;
    for (auto dot = shape.name.find('.'); dot != std::string::npos; dot = shape.name.find('.', begin)) {
      const std::string part = shape.name.substr(begin, dot - begin);
      begin = dot + 1;
      const auto children = at->named_children();
      if (const auto* child = children.find(part))
        at = *child;
      else if (part == "blocks")  // the one list, whose elements are units
        at = at->register_module(part, std::make_shared<torch::nn::ModuleListImpl>());
      else
        at = at->register_module(part, std::make_shared<torch::nn::Module>());
    }
    at->register_parameter(shape.name.substr(begin), at::empty(shape.sizes, at::TensorOptions(at::kMeta)));
  }
  return root;
}

}  // namespace ballast::models
