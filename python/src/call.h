#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace ballast::python {

/// Runs a part of the engine without the interpreter's lock: it may wait for peers, disks and autograd's threads, which
/// may want the lock themselves. What Python code raised below it (a hook, an autograd.Function) comes out as it was.
template <class F>
auto without_lock(F&& part) -> decltype(part()) {
  try {
    const pybind11::gil_scoped_release released;
    return std::forward<F>(part)();
  } catch (python_error& error) {
    if (!PyErr_Occurred()) error.restore();
    if (PyErr_Occurred()) throw pybind11::error_already_set();
    throw std::runtime_error(error.what());
  }
}

}  // namespace ballast::python
