#include "ballast/comm/world.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "python/src/bind.h"
#include "python/src/call.h"

namespace py = pybind11;

namespace ballast::python {
namespace {

WorldOptions options(const std::string& device, double timeout, const std::string& backend) {
  return {.device = device,
          .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1000)),
          .backend = backend};
}

}  // namespace

void bind_world(py::module_& module) {
  const py::arg_v device("device", "auto"), timeout("timeout", 600.0), backend("backend", "auto");
  py::class_<World>(module, "World", "This process among its peers: rank, size, device.")
      .def_static(
          "from_env",
          [](const std::string& device, double timeout, const std::string& backend) {
            return without_lock([&] { return World::from_env(options(device, timeout, backend)); });
          },
          "From torchrun's, mpirun's or srun's variables; one rank where none are set. Collective.", device, timeout,
          backend)
      .def_static(
          "from_process_group",
          // As a pointer: PyTorch's versions hold the group by different smart pointers.
          [](c10d::ProcessGroup* group, const std::string& device, double timeout, const std::string& backend) {
            const auto shared = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(group);
            return without_lock([&] { return World::from_process_group(shared, options(device, timeout, backend)); });
          },
          "Ranks and rendezvous of a process group of torch.distributed's. Collective.", py::arg("group"), device,
          timeout, backend)
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("device", [](const World& world) { return world.device().str(); });
}

}  // namespace ballast::python
