#pragma once

#include <pybind11/pybind11.h>

namespace ballast::python {

void bind_world(pybind11::module_& module);
void bind_engine(pybind11::module_& module);

}  // namespace ballast::python
