#include "ballast/grads/window.h"

#include <cmath>
#include <string>

#include "ballast/base/error.h"

namespace ballast {
namespace {

const char* name_of(Window::Scaling scaling) {
  switch (scaling) {
    case Window::Scaling::kWeighted:
      return "backward with a weight";
    case Window::Scaling::kSum:
      return "backward with scale_wrt_gas = false";
    default:
      return "backward without a weight";
  }
}

}  // namespace

void Window::begin_backward(std::optional<double> weight, bool scale_wrt_gas) {
  if (weight && !(std::isfinite(*weight) && *weight >= 0))
    throw UseError("grads.backward", "the weight is not a finite number >= 0 (weight ", *weight, ")");
  const Scaling scaling = weight ? Scaling::kWeighted : scale_wrt_gas ? Scaling::kMean : Scaling::kSum;
  if (scaling_ != Scaling::kUnset && scaling_ != scaling)
    throw UseError("grads.backward", "one window, two ways to normalise (so far ", so_far(), ", now ", name_of(scaling),
                   "; end the window with step() or zero_grad() first)");
  scaling_ = scaling;
  weight_ += weight.value_or(0);
  ++backwards_;
  ++backwards_since_step_;
}

std::string Window::so_far() const {
  if (backwards_ == 0) return "gradients set by name, which count as backwards without a weight do";
  return std::to_string(backwards_) + " times " + name_of(scaling_);
}

void Window::take_given() { scaling_ = Scaling::kMean; }

bool Window::boundary() const {
  if (!managed_) return true;
  return boundary_.value_or(micro_batches_ + 1 >= accumulation_steps_);
}

void Window::set_boundary(bool is_boundary) {
  if (!managed_)
    throw UseError(
        "grads.set_gradient_accumulation_boundary",
        "every step() ends a caller-owned window (managed_gradient_accumulation = false; leave the call out)");
  boundary_ = is_boundary;
}

void Window::complete_micro_batch(bool any_backward) {
  if (any_backward) ++micro_batches_;
  backwards_since_step_ = 0;
}

bool Window::ended() const {
  if (!managed_) return true;
  return micro_batches_ > 0 && boundary_.value_or(micro_batches_ >= accumulation_steps_);
}

double Window::normaliser(Scaling scaling, int world, double weight_sum) const {
  switch (scaling) {
    case Scaling::kWeighted:
      return weight_sum;
    case Scaling::kSum:
      return world;
    default:
      return static_cast<double>(world) * static_cast<double>(managed_ ? micro_batches_ : accumulation_steps_);
  }
}

void Window::restore(Scaling scaling, double weight, std::int64_t backwards, std::int64_t since_step,
                     std::int64_t micro_batches) {
  scaling_ = scaling;
  weight_ = weight;
  backwards_ = backwards;
  backwards_since_step_ = since_step;
  micro_batches_ = micro_batches;
}

void Window::clear() {
  scaling_ = Scaling::kUnset;
  weight_ = 0;
  backwards_ = backwards_since_step_ = micro_batches_ = 0;
  broken_ = false;
  ++number_;
}

}  // namespace ballast
