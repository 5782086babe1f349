#include "python/src/newcomers.h"

#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>

namespace ballast::python {
namespace {

namespace py = pybind11;

class Search {
 public:
  explicit Search(py::handle known) : known_(known) {}

  /// The name seen from this module.
  std::optional<std::string> in(py::handle module) {
    if (!seen_.insert(module.ptr()).second) return std::nullopt;
    std::optional<std::string> found;
    each(py::getattr(module, parameters_), [&](py::handle name, py::handle parameter) {
      if (is_new(parameter)) found = py::cast<std::string>(name);
      return !found;
    });
    if (found) return found;
    each(py::getattr(module, modules_), [&](py::handle name, py::handle child) {
      if (!child.is_none()) found = in(child);
      if (found) *found = py::cast<std::string>(name) + "." + *found;
      return !found;
    });
    return found;
  }

 private:
  bool is_new(py::handle parameter) const {
    if (parameter.is_none() || !THPVariable_Check(parameter.ptr())) return false;
    if (!THPVariable_Unpack(parameter.ptr()).requires_grad()) return false;
    const auto id = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(parameter.ptr()));
    const int there = PySet_Contains(known_.ptr(), id.ptr());
    if (there < 0) throw py::error_already_set();
    return there == 0;
  }

  // visit(name, value) until it returns false.
  template <class Visit>
  static void each(const py::object& members, const Visit& visit) {
    if (PyDict_Check(members.ptr())) {
      PyObject *name, *value;
      for (Py_ssize_t at = 0; PyDict_Next(members.ptr(), &at, &name, &value);)
        if (!visit(name, value)) return;
    } else {  // of a scripted module
      for (const py::handle item : members.attr("items")()) {
        const auto pair = py::cast<py::tuple>(item);
        if (!visit(pair[0], pair[1])) return;
      }
    }
  }

  py::handle known_;
  const py::str parameters_ = "_parameters", modules_ = "_modules";
  std::unordered_set<PyObject*> seen_;
};

}  // namespace

std::optional<std::string> find_newcomer(py::handle module, py::handle known) { return Search(known).in(module); }

}  // namespace ballast::python
