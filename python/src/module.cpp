// The extension module ballast._ballast: the library's classes with the names that it has in C++. What Python programs
// call, with DeepSpeed's names, stands in python/ballast.
#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "ballast/config/config.h"
#include "python/src/bind.h"

namespace py = pybind11;

namespace ballast::python {
namespace {

// Each is also what a Python programmer would catch. A translator that is registered later is asked earlier, so the
// base comes first.
void bind_errors(py::module_& module) {
  const auto add = [](auto& type, const char* text) { type.attr("__doc__") = text; };
  auto base = py::register_exception<Error>(module, "Error", PyExc_RuntimeError);
  add(base, "Base of everything that the engine raises.");
  const auto as = [&base](PyObject* builtin) { return py::make_tuple(base, py::handle(builtin)); };
  auto config = py::register_exception<ConfigError>(module, "ConfigError", as(PyExc_ValueError));
  add(config, "The configuration is wrong: key, value, what is allowed. Nothing was changed.");
  auto use = py::register_exception<UseError>(module, "UseError", base);
  add(use, "A call in a state or with an argument that doesn't allow it. Nothing was changed.");
  auto io = py::register_exception<IoError>(module, "IoError", as(PyExc_OSError));
  add(io, "A file or disk operation failed: operation, path, reason, remedy.");
  auto memory = py::register_exception<MemoryError>(module, "MemoryError", as(PyExc_MemoryError));
  add(memory, "Memory is missing: bytes wanted and had, by kind.");
  auto comm = py::register_exception<CommError>(module, "CommError", base);
  add(comm, "Ranks diverged, a peer died or a collective timed out. The engine can't go on; end the process.");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("__version__") = BALLAST_VERSION;
  bind_errors(module);
  // A translator of our own for LibTorch's errors: without the C++ backtrace, and as the classes that torch raises.
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(error);
    }
  });
  module.def(
      "effective_config", [](const std::string& text) { return Config::from_string(text).to_json().dump(); },
      "The configuration with all defaults, as JSON. Raises ConfigError.", py::arg("json"));
  module.def(
      "config_from_file", [](const std::string& path) { return Config::from_file(path).to_json().dump(); },
      "Reads and checks a configuration file; the effective configuration as JSON.", py::arg("path"));
  module.def(
      "move_to_meta",
      [](const at::Tensor& tensor) {
        const at::Tensor described =
            at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
        tensor.unsafeGetTensorImpl()->shallow_copy_from(described.getIntrusivePtr());
      },
      "The tensor keeps its identity, shape and dtype, and gives up its values. For leaves that no graph knows.",
      py::arg("tensor"));
  bind_world(module);
  bind_engine(module);
}

}  // namespace ballast::python
