#include "python/src/mirror.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <string>
#include <unordered_map>

namespace ballast::python {
namespace {

namespace py = pybind11;

struct Plain final : torch::nn::Module {
  using torch::nn::Module::Module;
};

class Mirror {
 public:
  std::shared_ptr<torch::nn::Module> of(py::handle module) {
    std::shared_ptr<torch::nn::Module>& made = made_[module.ptr()];
    if (made) return made;
    const bool is_list = py::isinstance(module, lists_);
    made = is_list ? std::shared_ptr<torch::nn::Module>(std::make_shared<torch::nn::ModuleListImpl>())
                   : std::make_shared<Plain>();
    const std::shared_ptr<torch::nn::Module> result = made;  // the map may move below
    for (const auto& [name, value] : entries(module, "_parameters")) {
      const auto parameter = py::cast<at::Tensor>(value);
      result->register_parameter(name, parameter, parameter.requires_grad());
    }
    for (const auto& [name, value] : entries(module, "_buffers"))
      result->register_buffer(name, py::cast<at::Tensor>(value));
    for (const auto& [name, value] : entries(module, "_modules")) result->register_module(name, of(value));
    return result;
  }

 private:
  static std::vector<std::pair<std::string, py::object>> entries(py::handle module, const char* member) {
    std::vector<std::pair<std::string, py::object>> result;
    const py::object members = module.attr(member);
    for (const py::handle item : members.attr("items")()) {
      const auto pair = py::cast<py::tuple>(item);
      if (!pair[1].is_none()) result.emplace_back(py::cast<std::string>(pair[0]), pair[1]);
    }
    return result;
  }

  std::unordered_map<PyObject*, std::shared_ptr<torch::nn::Module>> made_;
  const py::module_ nn_ = py::module_::import("torch.nn");
  const py::tuple lists_ = py::make_tuple(nn_.attr("ModuleList"), nn_.attr("Sequential"));
};

}  // namespace

std::shared_ptr<torch::nn::Module> mirror(py::handle module) { return Mirror().of(module); }

}  // namespace ballast::python
