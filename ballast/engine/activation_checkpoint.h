#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace ballast {
namespace detail {
using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> checkpoint(TensorFunction fn, std::vector<at::Tensor> inputs);
}  // namespace detail

/// Activation checkpointing (Chen et al., 2016, arXiv:1604.06174): returns fn(inputs...), and keeps for backward only
/// the inputs instead of what fn computes on the way; backward calls fn once more.
///   x = ballast::checkpoint(block, x);
///
/// fn: takes the tensors and returns a tensor or a vector of tensors. It may use parameters and other captures, whose
/// gradients accumulate as usual; a copy of fn lives in the graph, so captures by reference must outlive backward.
/// inputs: tensors; undefined ones and ones that don't require grad are passed on as they are.
/// Gradients have the same bits as without checkpointing provided that fn computes the same again: the random numbers
/// of the CPU's default generator and of those of the inputs' CUDA devices, the autocast state and the grad mode are
/// those of the first call, and what surrounds backward finds its own again. Works nested, under several backwards over
/// one graph, and at every stage. Under NoGradGuard it is a plain call. With no input that requires grad, fn first runs
/// with its activations kept until it returns, to find out whether a result requires grad.
/// Throws UseError: fn changes an input in place (from this call); fn returns other shapes in backward, backward with
/// create_graph, and torch::autograd::grad() or backward(inputs) (from backward).
template <class Fn, class... Inputs>
requires(std::convertible_to<const Inputs&, at::Tensor>&&...) && std::invocable<Fn&, const Inputs&...> auto checkpoint(
                                                                     Fn fn, const Inputs&... inputs) {
  using Result = std::remove_cvref_t<std::invoke_result_t<Fn&, const Inputs&...>>;
  constexpr bool kOneTensor = std::is_convertible_v<Result, at::Tensor>;
  static_assert(kOneTensor || std::is_convertible_v<Result, std::vector<at::Tensor>>,
                "fn returns a Tensor or a vector of Tensors");
  auto call = [shared = std::make_shared<Fn>(std::move(fn))](const std::vector<at::Tensor>& x) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      if constexpr (kOneTensor)
        return std::vector<at::Tensor>{(*shared)(x[I]...)};
      else
        return std::vector<at::Tensor>((*shared)(x[I]...));
    }
    (std::index_sequence_for<Inputs...>());
  };
  std::vector<at::Tensor> results = detail::checkpoint(std::move(call), {at::Tensor(inputs)...});
  if constexpr (kOneTensor)
    return std::move(results[0]);
  else
    return results;
}

}  // namespace ballast
