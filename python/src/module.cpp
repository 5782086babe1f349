// The extension module ballast._ballast: the library's classes with the names that it has in C++. What Python programs
// call, with DeepSpeed's names, stands in python/ballast.
#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/base/reworded.h"
#include "ballast/config/config.h"
#include "python/src/bind.h"
#include "python/src/newcomers.h"

namespace py = pybind11;

namespace ballast::python {
namespace {

// The library speaks of its calls by their C++ names; whoever reads this writes Python.
std::string in_python_words(std::string text) {
  static const std::pair<const char*, const char*> kWords[] = {
      {"shutdown()", "destroy()"},
      {"NoGradGuard", "torch.no_grad()"},
      {"engine.gathered(params, writer)", "ballast.zero.GatheredParameters(params, modifier_rank=rank)"},
      {"gathered(params, writer)", "ballast.zero.GatheredParameters(params, modifier_rank=rank)"},
      {"engine.gathered(params)", "ballast.zero.GatheredParameters(params)"},
      {"set_full_grad(name, value)", "ballast.safe_set_full_grad(param, value)"},
      {"LoadOptions::strict", "load_module_strict"},
      {"LoadOptions::load_optimizer", "load_optimizer_states"},
      {"LoadOptions::load_scheduler", "load_lr_scheduler_states"},
      {"LoadOptions::weights_only", "load_module_only"},
      {"SaveOptions::include_window", "include_window"},
      {"at::view_as_real()", "torch.view_as_real()"},
      {"leave it out with EngineOptions::buffers", "register it with persistent=False"},
      {"EngineOptions::materialize", "ballast.zero.Init()"},
      {"Engine::set_lr", "engine.set_lr"},
      {"ballast::checkpoint(fn, inputs...)", "torch.utils.checkpoint"},
      {"ballast::checkpoint", "torch.utils.checkpoint"},
      {"module->to(torch::kFloat32)", "module.float()"},
  };
  return reworded(std::move(text), kWords);
}

// Python's classes, by their C++ counterparts. They live as long as the interpreter.
PyObject *error_class, *config_error, *use_error, *io_error, *memory_error, *comm_error;

// Each is also what a Python programmer would catch.
void bind_errors(py::module_& module) {
  const auto make = [&module](const char* name, const py::object& bases, const char* text) {
    const std::string full = std::string("ballast.") + name;
    PyObject* const made = PyErr_NewExceptionWithDoc(full.c_str(), text, bases.ptr(), nullptr);
    if (made == nullptr) throw py::error_already_set();
    module.attr(name) = py::reinterpret_borrow<py::object>(made);
    return made;
  };
  error_class =
      make("Error", py::make_tuple(py::handle(PyExc_RuntimeError)), "Base of everything that the engine raises.");
  const auto bases = [](PyObject* builtin) { return py::make_tuple(py::handle(error_class), py::handle(builtin)); };
  const py::tuple base = py::make_tuple(py::handle(error_class));
  config_error = make("ConfigError", bases(PyExc_ValueError),
                      "The configuration is wrong: key, value, what is allowed. Nothing was changed.");
  use_error =
      make("UseError", base, "A call in a state or with an argument that doesn't allow it. Nothing was changed.");
  io_error = make("IoError", bases(PyExc_OSError), "A file or disk operation failed: operation, path, reason, remedy.");
  memory_error = make("MemoryError", bases(PyExc_MemoryError), "Memory is missing: bytes wanted and had, by kind.");
  comm_error = make("CommError", base,
                    "Ranks diverged, a peer died or a collective timed out. The engine can't go on; end the process.");
  py::register_exception_translator([](std::exception_ptr error) {
    const auto raise = [](PyObject* type, const std::exception& e) {
      // What a damaged file holds need not be text.
      const std::string words = in_python_words(e.what());
      const auto text = py::reinterpret_steal<py::object>(
          PyUnicode_DecodeUTF8(words.data(), static_cast<Py_ssize_t>(words.size()), "replace"));
      PyErr_SetObject(type, text.ptr());
    };
    try {
      if (error) std::rethrow_exception(error);
    } catch (const ConfigError& e) {
      raise(config_error, e);
    } catch (const UseError& e) {
      raise(use_error, e);
    } catch (const IoError& e) {
      raise(io_error, e);
    } catch (const MemoryError& e) {
      raise(memory_error, e);
    } catch (const CommError& e) {
      raise(comm_error, e);
    } catch (const Error& e) {
      raise(error_class, e);
    } catch (const c10::Error&) {  // LibTorch's: without the C++ backtrace, and as the classes that torch raises
      torch::translate_exception_to_python(error);
    }
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("__version__") = BALLAST_VERSION;
  bind_errors(module);
  set_log_sink([](LogLevel level, const std::string& line) { print_log_line(level, in_python_words(line)); });
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
  module.def(
      "find_newcomer",
      [](py::handle watched, py::handle known) -> py::object {
        const auto found = find_newcomer(watched, known);
        return found ? py::object(py::str(*found)) : py::none();
      },
      "The name of a trainable parameter of the module whose id() isn't among these; None where there is none.",
      py::arg("module"), py::arg("known"));
  bind_world(module);
  bind_engine(module);
}

}  // namespace ballast::python
