#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace torch::nn {
class Module;
}

namespace ballast::python {

/// A module of LibTorch's with the same names, holding the same parameters, buffers and children as one of PyTorch's,
/// for the engine to walk; a ModuleList or Sequential becomes a ModuleList. A child that stands in several places stays
/// one.
std::shared_ptr<torch::nn::Module> mirror(pybind11::handle module);

}  // namespace ballast::python
