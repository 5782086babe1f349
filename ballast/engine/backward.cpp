// A backward's way into the window: engine.backward(loss), and a plain loss.backward(), which the engine meets at its
// first gradient. Both are one mechanism; they differ in who starts autograd and in where the loss scale comes in.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/engine/impl.h"
#include "ballast/tiers/device_span.h"

namespace ballast {
namespace {

double rounded(double value, c10::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return static_cast<float>(c10::BFloat16(static_cast<float>(value)));
    case at::kHalf:
      return static_cast<float>(c10::Half(static_cast<float>(value)));
    case at::kFloat:
      return static_cast<float>(value);
    default:
      return value;
  }
}

// What scale_gradients_of() gives to the graph, which may live longer than the engine.
struct GradientScale final : torch::CustomClassHolder {
  explicit GradientScale(std::function<double()> factor) : factor(std::move(factor)) {}
  std::function<double()> factor;  // of the backward that runs now
};

struct ScaleGradients final : torch::autograd::Function<ScaleGradients> {
  using Tensors = torch::autograd::variable_list;
  static Tensors forward(torch::autograd::AutogradContext* context, at::TensorList outputs,
                         c10::intrusive_ptr<GradientScale> scale) {
    context->saved_data["scale"] = c10::IValue::make_capsule(std::move(scale));
    context->set_materialize_grads(false);
    return outputs.vec();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const auto scale = context->saved_data["scale"].toCapsule();
    const double factor = static_cast<GradientScale&>(*scale).factor();
    for (at::Tensor& gradient : gradients)
      if (gradient.defined() && factor != 1) gradient = gradient * factor;
    gradients.emplace_back();  // of the scale
    return gradients;
  }
};

}  // namespace

void Engine::Impl::begin_backward(const BackwardOptions& options, int outermost) {
  check_usable();
  refuse_while_away("engine.backward");
  if (window.broken())
    throw UseError("engine.backward",
                   "an exception left an earlier backward of this window half done (call zero_grad() first)");
  if (running_backward)
    throw UseError("engine.backward",
                   "backward() called inside backward() (use ballast::checkpoint for recomputation)");

  const Window before = window;
  window.begin_backward(options.weight, options.scale_wrt_gas);
  rounds->counts().backwards = window.backwards();
  params->finish_launching();
  reducer->begin_backward(no_sync_guards + coalesce_guards > 0);
  running_backward.reset(new Backward{before, outermost});
  running_backward->timer.reset(new monitor::Breakdown::Timer(progress.time(ProgressLog::kBackward)));
}

void Engine::Impl::end_backward() {
  const std::unique_ptr<Backward> ended = std::move(running_backward);
  ended->timer.reset();
  params->rethrow_failure();
  const at::NoGradGuard no_grad;
  const auto timer = progress.time(ProgressLog::kReduce);
  if (reducer->reduces_at_backward()) final_on_error([&] { return reducer->round(Call::kBackward, announce(true)); });
}

void Engine::Impl::fail_backward() {
  if (running_backward->gradient_arrived) {
    window.mark_broken();
  } else {
    window = running_backward->before;
    rounds->counts().backwards = window.backwards();
  }
  running_backward.reset();
}

void Engine::Impl::take_gradient(int parameter, at::Tensor gradient) {
  if (!running_backward || running_backward->outermost != -1) join_plain_backward(/*scaled=*/false);
  running_backward->gradient_arrived = true;
  const at::NoGradGuard no_grad;
  try {
    reducer->on_gradient(parameter, std::move(gradient));
  } catch (const CommError&) {  // the peers can't be met again
    end_with(std::current_exception());
    throw;
  }
}

void Engine::Impl::join_plain_backward(bool scaled) {
  refuse_in_child();
  const int outermost = BackwardEnds::outermost();
  if (running_backward && running_backward->outermost == outermost) return;
  if (!scaled && scaler.scale() != 1)
    throw UseError(
        "engine.backward", "the gradients of a plain loss.backward() lack the loss scale (", scaler.scale(),
        "; call engine.backward(loss). Where another engine's backward came here, its loss was computed with "
        "this engine's parameters: call requires_grad_(false) on these meanwhile, or detach() what this "
        "module gave to it)");
  begin_backward({}, outermost);
  backward_ends->await(outermost);
}

void Engine::Impl::backward(const at::Tensor& loss, const BackwardOptions& options) {
  check_usable();
  if (!loss.defined() || loss.numel() != 1)
    throw UseError("engine.backward", "the loss is not one number (shape ",
                   loss.defined() ? c10::str(loss.sizes()) : "undefined", "; reduce it, e.g. loss.mean())");
  if (loss.is_complex())
    throw UseError("engine.backward", "the loss is a complex number (", c10::toString(loss.scalar_type()),
                   "; take its real part, or its absolute value)");
  if (!loss.requires_grad())
    throw UseError("engine.backward",
                   "the loss has no graph (it doesn't require grad; was it computed under NoGradGuard or detached?)");
  begin_backward(options, -1);
  try {
    const double root = scaler.scale() * options.weight.value_or(1.0);
    const bool narrow = loss.scalar_type() != at::kFloat && loss.scalar_type() != at::kDouble;
    if (options.weight && !warned_rounded_weight && narrow && rounded(root, loss.scalar_type()) != root) {
      warned_rounded_weight = true;
      log_warning("a weight is rounded to the loss's element type (weight * loss scale ", root, " becomes ",
                  rounded(root, loss.scalar_type()), " in ", c10::toString(loss.scalar_type()),
                  "; compute the loss in float32)");
    }
    const tiers::DeviceSpan work(trace::Lane::kCompute, "backward", {}, world.device());
    torch::autograd::backward({loss}, {at::full_like(loss, root)}, options.retain_graph);
  } catch (const CommError&) {
    fail_backward();
    if (!failure) end_with(std::current_exception());
    params->rethrow_failure();
    throw;
  } catch (...) {
    fail_backward();
    params->rethrow_failure();
    throw;
  }
  end_backward();
}

std::vector<at::Tensor> Engine::scale_gradients_of(const std::vector<at::Tensor>& outputs) {
  Impl& engine = running();
  auto scale = c10::make_intrusive<GradientScale>([impl = &engine, alive = std::weak_ptr<const bool>(engine.alive)] {
    if (alive.expired() || (impl->running_backward && impl->running_backward->outermost == -1)) return 1.0;
    impl->join_plain_backward(/*scaled=*/true);
    return impl->scaler.scale();
  });
  return ScaleGradients::apply(at::TensorList(outputs), std::move(scale));
}

void Engine::backward(const at::Tensor& loss, const BackwardOptions& options) { running().backward(loss, options); }

}  // namespace ballast
