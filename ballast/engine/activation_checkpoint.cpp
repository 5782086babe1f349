#include "ballast/engine/activation_checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "ballast/base/error.h"

namespace ballast {
namespace {

using Tensors = std::vector<at::Tensor>;

/// The default generators of the CPU and of the inputs' CUDA devices, at one moment.
class RandomState {
 public:
  explicit RandomState(const std::vector<c10::Device>& devices) {
    for (const c10::Device device : devices) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      std::lock_guard lock(generator.mutex());
      states_.emplace_back(device, generator.get_state());
    }
  }

  void restore() const {
    for (const auto& [device, state] : states_) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

  bool operator==(const RandomState& other) const {
    return std::equal(states_.begin(), states_.end(), other.states_.begin(), other.states_.end(),
                      [](const auto& a, const auto& b) { return a.first == b.first && at::equal(a.second, b.second); });
  }

 private:
  std::vector<std::pair<c10::Device, at::Tensor>> states_;  // states are small byte tensors on the CPU
};

/// Sets the generators to `then`; they continue from where they were when this dies.
class RandomReplay {
 public:
  RandomReplay(const RandomState& then, const std::vector<c10::Device>& devices) : now_(devices) { then.restore(); }
  ~RandomReplay() { now_.restore(); }
  RandomReplay(const RandomReplay&) = delete;
  RandomReplay& operator=(const RandomReplay&) = delete;

 private:
  const RandomState now_;
};

/// Autocast keeps its casts of the weights until the outermost autocast region ends. One made without grad mode must
/// not serve a later use of the weight with grad mode, nor must one that recomputation makes outlive it.
class AutocastCacheOff {
 public:
  AutocastCacheOff() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastCacheOff() { at::autocast::set_autocast_cache_enabled(before_); }
  AutocastCacheOff(const AutocastCacheOff&) = delete;
  AutocastCacheOff& operator=(const AutocastCacheOff&) = delete;

 private:
  const bool before_;
};

/// One checkpointed call, as its node in the graph keeps it.
struct Segment : torch::CustomClassHolder {
  detail::TensorFunction fn;
  std::vector<bool> given;          // which inputs are defined; those are the node's saved variables, in order
  std::vector<bool> requires_grad;  // by input
  std::vector<c10::Device> devices;
  std::optional<RandomState> random;  // before the first call, if that drew numbers
  at::ThreadLocalState thread_state;  // autocast and grad mode of the first call
  std::vector<std::size_t> returned;  // indices of the results that the node returns: those that require grad
  Tensors first_results;              // [returned] until the node has taken them over
  std::vector<std::vector<std::int64_t>> shapes;  // [returned]

  /// fn's results on these inputs, as in the first call, with a graph.
  Tensors recompute(const Tensors& inputs) {
    const at::ThreadLocalStateGuard as_then(thread_state);
    const at::AutoGradMode with_graph(true);
    const AutocastCacheOff no_cache;
    std::optional<RandomReplay> replay;
    if (random) replay.emplace(*random, devices);
    return fn(inputs);
  }
};

constexpr const char* kOperation = "engine.checkpoint";

std::string text_of(const at::Tensor& tensor) { return tensor.defined() ? c10::str(tensor.sizes()) : "undefined"; }

class CheckpointNode : public torch::autograd::Function<CheckpointNode> {
 public:
  static Tensors forward(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Segment>& segment,
                         const Tensors& inputs, at::TensorList) {
    context->set_materialize_grads(false);
    Tensors given;
    std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(given), [](const auto& x) { return x.defined(); });
    context->save_for_backward(std::move(given));
    context->saved_data["segment"] = c10::IValue::make_capsule(segment);
    return std::exchange(segment->first_results, {});
  }

  /// Returns a gradient for each of apply()'s arguments: none for the first two, then for the list's tensors.
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw UseError(kOperation,
                     "a checkpointed part needs a plain backward() (it was reached by torch::autograd::grad() or "
                     "backward() with inputs; run it without checkpoint, or call backward())");
    }
    if (at::GradMode::is_enabled()) {
      throw UseError(kOperation,
                     "no second derivatives through a checkpointed part (backward with create_graph; run it without "
                     "checkpoint)");
    }
    const auto holder = context->saved_data.at("segment").toCapsule();
    Segment& segment = static_cast<Segment&>(*holder);

    Tensors inputs = detached_inputs(segment, context->get_saved_variables());
    Tensors roots, root_gradients;
    {
      const Tensors results = segment.recompute(inputs);
      for (std::size_t i = 0; i < segment.returned.size(); ++i) {
        const std::size_t index = segment.returned[i];
        const at::Tensor result = index < results.size() ? results[index] : at::Tensor();
        if (!result.defined() || result.sizes() != segment.shapes[i] || !result.requires_grad()) {
          throw UseError(kOperation, "the function gave something else when called again in backward (result ", index,
                         ": ", text_of(result), " where it was ", c10::str(at::IntArrayRef(segment.shapes[i])),
                         result.defined() && !result.requires_grad() ? ", without a graph" : "",
                         "; it must compute the same each time)");
        }
        if (!gradients[i].defined()) continue;
        roots.push_back(result);
        root_gradients.push_back(gradients[i]);
      }
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);

    Tensors input_gradients(2);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (segment.requires_grad[i]) input_gradients.push_back(inputs[i].grad());
    }
    if (input_gradients.size() == 2) input_gradients.emplace_back();  // of the stand-in
    return input_gradients;
  }

 private:
  static Tensors detached_inputs(const Segment& segment, const Tensors& saved) {
    Tensors inputs(segment.given.size());
    std::size_t next = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (segment.given[i]) inputs[i] = saved[next++].detach();
      if (segment.requires_grad[i]) inputs[i].requires_grad_();
    }
    return inputs;
  }
};

/// Versions of the inputs' memory: an in-place write of fn would make the second call see other values.
std::vector<std::int64_t> versions(const Tensors& inputs) {
  std::vector<std::int64_t> versions;
  for (const at::Tensor& input : inputs) {
    versions.push_back(input.defined() && !input.is_inference() ? input._version() : 0);
  }
  return versions;
}

}  // namespace

Tensors detail::checkpoint(TensorFunction fn, Tensors inputs) {
  if (!at::GradMode::is_enabled()) return fn(inputs);

  auto segment = c10::make_intrusive<Segment>();
  Tensors differentiable;
  segment->devices.push_back(c10::kCPU);
  for (const at::Tensor& input : inputs) {
    segment->given.push_back(input.defined());
    segment->requires_grad.push_back(input.defined() && input.requires_grad());
    if (segment->requires_grad.back()) differentiable.push_back(input);
    if (!input.defined() || !input.is_cuda()) continue;
    if (std::find(segment->devices.begin(), segment->devices.end(), input.device()) == segment->devices.end()) {
      segment->devices.push_back(input.device());
    }
  }

  const bool graph_asked = differentiable.empty();  // does anything in fn require grad? Only its graph can tell
  const RandomState before(segment->devices);
  const std::vector<std::int64_t> versions_before = versions(inputs);
  Tensors results;
  {
    const at::AutoGradMode keep_activations(graph_asked);
    const AutocastCacheOff no_cache;
    results = fn(inputs);
  }
  if (versions(inputs) != versions_before) {
    throw UseError(kOperation,
                   "the function changed one of its inputs in place (call it on a copy, or without "
                   "checkpoint)");
  }
  if (!(RandomState(segment->devices) == before)) segment->random = before;

  for (std::size_t i = 0; i < results.size(); ++i) {
    at::Tensor& result = results[i];
    const bool has_gradient =
        result.defined() && (at::isFloatingType(result.scalar_type()) || at::isComplexType(result.scalar_type()));
    if (!has_gradient || (graph_asked && !result.requires_grad())) continue;
    segment->returned.push_back(i);
    segment->shapes.push_back(result.sizes().vec());
    segment->first_results.push_back(graph_asked ? result.detach() : result);
  }
  if (segment->returned.empty()) return results;

  // Without an input that requires grad a stand-in makes the node part of the graph.
  if (graph_asked) differentiable.push_back(at::empty({0}).requires_grad_());
  segment->fn = std::move(fn);
  const Tensors outputs = CheckpointNode::apply(segment, inputs, at::TensorList(differentiable));
  for (std::size_t i = 0; i < outputs.size(); ++i) results[segment->returned[i]] = outputs[i];
  return results;
}

}  // namespace ballast
