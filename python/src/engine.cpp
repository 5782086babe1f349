#include "ballast/engine/engine.h"

#include <pybind11/stl.h>
#include <torch/nn/module.h>

#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "python/src/bind.h"
#include "python/src/call.h"
#include "python/src/mirror.h"

namespace py = pybind11;

namespace ballast::python {
namespace {

using Names = std::vector<std::string>;

// Kept by an engine, whose end doesn't hold the interpreter's lock.
std::shared_ptr<py::object> keep(const py::object& object) {
  return {new py::object(object), [](const py::object* kept) {
            const py::gil_scoped_acquire lock;
            delete kept;
          }};
}

// Called by threads that don't hold the interpreter's lock. materialize: a callable that gives tensors for names;
// buffers: one that gives names and tensors.
EngineOptions engine_options(const py::object& materialize, const py::object& buffers) {
  EngineOptions options;
  options.buffers = [buffers = keep(buffers)] {
    const py::gil_scoped_acquire lock;
    return py::cast<std::vector<std::pair<std::string, at::Tensor>>>((*buffers)());
  };
  if (materialize.is_none()) return options;
  options.materialize = [materialize](const Names& names) {
    const py::gil_scoped_acquire lock;
    try {
      return py::cast<std::vector<at::Tensor>>(materialize(names));
    } catch (const py::error_already_set& error) {  // it must reach the other ranks, as one of the library's
      throw UseError("engine.materialize", py::cast<std::string>(py::str(error.value())));
    }
  };
  return options;
}

// An engine that Python's garbage collection ends, whenever that is on each rank, must wait for nobody.
struct Abandon {
  void operator()(Engine* engine) const {
    const py::gil_scoped_release released;  // its threads may want the lock before they end
    engine->abandon();
    delete engine;
  }
};
using HeldEngine = std::unique_ptr<Engine, Abandon>;

HeldEngine make_engine(const py::object& module, const std::string& config, const World& world,
                       const py::object& materialize, const py::object& buffers) {
  const auto mirrored = mirror(module);
  const EngineOptions options = engine_options(materialize, buffers);
  return without_lock([&] { return HeldEngine(new Engine(mirrored, Config::from_string(config), world, options)); });
}

StateKind state_kind(const std::string& name) {
  if (name == "parameters") return StateKind::kParameters;
  if (name == "gradients") return StateKind::kGradients;
  if (name == "optimizer") return StateKind::kOptimizer;
  throw UseError("engine.offload_states", "no such kind of states (", name, "; want parameters, gradients, optimizer)");
}

// bytes now and at most, by "kind/tier" and by tier
py::dict memory(const Engine& engine) {
  py::dict result;
  const auto put = [&](const std::string& name, const Ledger::Cell& cell) {
    result[py::str(name)] = py::make_tuple(cell.now, cell.peak);
  };
  for (std::size_t tier = 0; tier < kTierNames.size(); ++tier) {
    put(kTierNames[tier], engine.memory().total(static_cast<Tier>(tier)));
    for (std::size_t kind = 0; kind < kMemoryKindNames.size(); ++kind)
      put(std::string(kMemoryKindNames[kind]) + "/" + kTierNames[tier],
          engine.memory().cell(static_cast<MemoryKind>(kind), static_cast<Tier>(tier)));
  }
  return result;
}

py::dict load(Engine& engine, const std::string& folder, const std::string& tag, const LoadOptions& options) {
  const LoadReport report = without_lock([&] { return engine.load_checkpoint(folder, tag, options); });
  py::dict result;
  result["tag"] = report.tag;
  result["client_state"] = report.client_state;
  result["missing"] = report.missing;
  result["unexpected"] = report.unexpected;
  result["misshaped"] = report.misshaped;
  result["window"] = report.window;
  return result;
}

void bind_report(py::module_& module) {
  py::class_<StepReport>(module, "StepReport", "What a step() did; equal on all ranks.")
      .def_readonly("applied", &StepReport::applied, "The parameters were updated.")
      .def_property_readonly(
          "reason", [](const StepReport& report) { return to_string(report.reason); },
          "'applied', 'mid-window' (the engine counts, and it isn't full), 'empty window', 'non-finite gradient'.")
      .def_readonly("grad_norm", &StepReport::grad_norm, "2-norm of the normalised gradient, before clipping.")
      .def_readonly("clip_factor", &StepReport::clip_factor, "What clipping multiplied the gradient by; 1: nothing.")
      .def_readonly("loss_scale", &StepReport::loss_scale, "The scale that this window's backwards used.")
      .def_readonly("micro_batches", &StepReport::micro_batches, "That the window held: most of any rank.")
      .def_readonly("weight", &StepReport::weight, "Sum of the weights of all ranks; 0 where none were given.")
      .def_readonly("lr", &StepReport::lr, "Learning rates that this step used, one a parameter group.")
      .def(py::pickle(
          [](const StepReport& r) {
            return py::make_tuple(r.applied, static_cast<int>(r.reason), r.grad_norm, r.clip_factor, r.loss_scale,
                                  r.micro_batches, r.weight, r.lr);
          },
          [](const py::tuple& t) {
            return StepReport{.applied = t[0].cast<bool>(),
                              .reason = static_cast<StepReason>(t[1].cast<int>()),
                              .grad_norm = t[2].cast<double>(),
                              .clip_factor = t[3].cast<double>(),
                              .loss_scale = t[4].cast<double>(),
                              .micro_batches = t[5].cast<std::int64_t>(),
                              .weight = t[6].cast<double>(),
                              .lr = t[7].cast<std::vector<double>>()};
          }))
      .def("__repr__", [](const StepReport& report) {
        std::ostringstream text;
        text << "StepReport(" << to_string(report.reason) << ", grad_norm=" << report.grad_norm
             << ", micro_batches=" << report.micro_batches << ")";
        return text.str();
      });
  py::class_<Counters>(module, "Counters")
      .def_readonly("global_steps", &Counters::global_steps)
      .def_readonly("applied_steps", &Counters::applied_steps)
      .def_readonly("skipped_steps", &Counters::skipped_steps)
      .def_readonly("micro_steps", &Counters::micro_steps)
      .def_readonly("global_samples", &Counters::global_samples);
}

// As a context manager: left by an exception it ends all the same, and the exception goes on.
void bind_guard(py::module_& module) {
  py::class_<ScopeGuard>(module, "Guard", "Ends something of the engine when it is left.")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](ScopeGuard& guard, const py::args&) { without_lock([&] { guard.end(); }); })
      .def("end", [](ScopeGuard& guard) { without_lock([&] { guard.end(); }); });
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_report(module);
  bind_guard(module);
  const py::arg name("name"), value("value"), key("key");
  py::class_<Engine, HeldEngine>(module, "Engine", "ballast::Engine; ballast.Engine is what programs use.")
      .def(py::init(&make_engine), py::arg("module"), py::arg("config"), py::arg("world"), py::arg("materialize"),
           py::arg("buffers"))
      .def(
          "backward",
          [](Engine& engine, const at::Tensor& loss, std::optional<double> weight, bool scale_wrt_gas,
             bool retain_graph) {
            without_lock([&] {
              engine.backward(loss, {.weight = weight, .scale_wrt_gas = scale_wrt_gas, .retain_graph = retain_graph});
            });
          },
          py::arg("loss"), py::arg("weight") = py::none(), py::arg("scale_wrt_gas") = true,
          py::arg("retain_graph") = false)
      .def("scale_gradients_of", &Engine::scale_gradients_of, py::call_guard<py::gil_scoped_release>())
      .def("step", [](Engine& engine) { return without_lock([&] { return engine.step(); }); })
      .def("zero_grad", [](Engine& engine) { without_lock([&] { engine.zero_grad(); }); })
      .def("is_gradient_accumulation_boundary", &Engine::is_gradient_accumulation_boundary)
      .def("set_gradient_accumulation_boundary", &Engine::set_gradient_accumulation_boundary)
      .def("no_sync", &Engine::no_sync)
      .def("coalesce_grad_reduction", &Engine::coalesce_grad_reduction)
      .def("gathered",
           [](Engine& engine, const std::vector<at::Tensor>& parameters, std::optional<int> writer) {
             return without_lock([&] { return engine.gathered(parameters, writer); });
           })
      .def("synchronize", [](Engine& engine) { without_lock([&] { engine.synchronize(); }); })
      .def("offload_states",
           [](Engine& engine, const Names& names) {
             std::vector<StateKind> kinds;
             for (const std::string& one : names) kinds.push_back(state_kind(one));
             without_lock([&] { engine.offload_states(kinds); });
           })
      .def("reload_states", [](Engine& engine) { without_lock([&] { engine.reload_states(); }); })
      .def(
          "full_grad",
          [](Engine& engine, const std::string& name) -> std::optional<at::Tensor> {
            at::Tensor found = without_lock([&] { return engine.full_grad(name); });
            return found.defined() ? std::optional(std::move(found)) : std::nullopt;
          },
          name)
      .def(
          "set_full_grad",
          [](Engine& engine, const std::string& name, const at::Tensor& value) {
            without_lock([&] { engine.set_full_grad(name, value); });
          },
          name, value)
      .def(
          "full_parameter",
          [](Engine& engine, const std::string& name) {
            return without_lock([&] { return engine.full_parameter(name); });
          },
          name)
      .def(
          "set_full_parameter",
          [](Engine& engine, const std::string& name, const at::Tensor& value) {
            without_lock([&] { engine.set_full_parameter(name, value); });
          },
          name, value)
      .def(
          "full_optimizer_state",
          [](Engine& engine, const std::string& name, const std::string& key) {
            return without_lock([&] { return engine.full_optimizer_state(name, key); });
          },
          name, key)
      .def(
          "set_full_optimizer_state",
          [](Engine& engine, const std::string& name, const std::string& key, const at::Tensor& value) {
            without_lock([&] { engine.set_full_optimizer_state(name, key, value); });
          },
          name, key, value)
      .def(
          "save_checkpoint",
          [](Engine& engine, const std::string& folder, const std::string& tag, const std::string& client_state,
             bool include_window, bool asynchronous, int keep_last, const std::string& refusal) {
            without_lock([&] {
              engine.save_checkpoint(folder, tag,
                                     {.include_window = include_window,
                                      .asynchronous = asynchronous,
                                      .keep_last = keep_last,
                                      .client_state = client_state,
                                      .refusal = refusal});
            });
          },
          py::arg("folder"), py::arg("tag") = "", py::arg("client_state") = "", py::arg("include_window") = false,
          py::arg("asynchronous") = false, py::arg("keep_last") = 0, py::arg("refusal") = "")
      .def(
          "load_checkpoint",
          [](Engine& engine, const std::string& folder, const std::string& tag, bool weights_only, bool load_optimizer,
             bool load_scheduler, bool strict) {
            return load(engine, folder, tag,
                        {.weights_only = weights_only,
                         .load_optimizer = load_optimizer,
                         .load_scheduler = load_scheduler,
                         .strict = strict});
          },
          py::arg("folder"), py::arg("tag") = "", py::arg("weights_only") = false, py::arg("load_optimizer") = true,
          py::arg("load_scheduler") = true, py::arg("strict") = true)
      .def("counters", &Engine::counters)
      .def("loss_scale", &Engine::loss_scale)
      .def("lr", &Engine::lr)
      .def("group_of", &Engine::group_of, name)
      .def("batch_shape",
           [](const Engine& engine) {
             const BatchShape shape = resolve_batch(engine.config(), engine.world().size());
             return py::make_tuple(shape.train_batch, shape.micro_batch, shape.accumulation_steps);
           })
      .def("set_lr", &Engine::set_lr)
      .def("memory", &memory)
      .def("config", [](const Engine& engine) { return engine.config().to_json().dump(); })
      .def("shutdown", [](Engine& engine) { without_lock([&] { engine.shutdown(); }); })
      .def("abandon", [](Engine& engine) { without_lock([&] { engine.abandon(); }); });
}

}  // namespace ballast::python
