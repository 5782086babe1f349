#include "tests/engine/support/zoo.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace ballast::testing {

namespace {

constexpr std::int64_t kVocabulary = 11, kWidth = 5, kHidden = 7;

struct Head : torch::nn::Module {
  explicit Head(const at::Tensor& table) { register_parameter("weight", table); }
};
struct Experts : torch::nn::Module {
  explicit Experts(const torch::nn::ModuleList& list) { register_module("list", list); }
};

}  // namespace

Sample sample(int step, int micro_batch, int rank, c10::Device device) {
  at::Generator generator =
      at::detail::createCPUGenerator(static_cast<std::uint64_t>(step * 10007 + micro_batch * 101 + rank + 1));
  Sample made;
  made.tokens = at::randint(kVocabulary, {2, 3}, generator, at::kLong).to(device);
  made.target = at::rand({2, 3, kVocabulary}, generator, at::kFloat).to(device);
  made.expert = rank == 0 && step % 2 == 1 ? 1 : 0;
  made.aux = step % 3 != 1;
  return made;
}

Zoo::Zoo(std::int64_t seed) {
  embedding_ = register_module("embedding", torch::nn::Embedding(kVocabulary, kWidth));
  for (int i = 0; i < 3; ++i) {
    up_->push_back(torch::nn::Linear(kWidth, kHidden));
    down_->push_back(torch::nn::Linear(kHidden, kWidth));
  }
  register_module("up", up_);
  register_module("down", down_);
  frozen_ = register_module("frozen", torch::nn::Linear(kWidth, kWidth));
  for (int i = 0; i < 2; ++i) experts_->push_back(torch::nn::Linear(kWidth, kWidth));
  register_module("experts", std::make_shared<Experts>(experts_));
  aux_ = register_module("aux", torch::nn::Linear(kWidth, kWidth));
  unused_ = register_module("unused", torch::nn::Linear(3, 2));
  register_module("head", std::make_shared<Head>(embedding_->weight));
  gain_ = register_parameter("gain", at::ones({}));
  nothing_ = register_parameter("nothing", at::zeros({0, 4}));
  for (at::Tensor& parameter : frozen_->parameters()) parameter.set_requires_grad(false);

  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  for (const auto& item : named_parameters())
    if (item.key() != "gain") item.value().copy_(at::rand(item.value().sizes(), generator, at::kFloat) - 0.5);
}

at::Tensor Zoo::block(std::size_t i, const at::Tensor& h) {
  return h + down_[i]->as<torch::nn::Linear>()->forward(at::tanh(up_[i]->as<torch::nn::Linear>()->forward(h)));
}

at::Tensor Zoo::loss(const Sample& sample) {
  at::Tensor h = embedding_->forward(sample.tokens);
  for (std::size_t i = 0; i < up_->size(); ++i) h = block(i, h);
  h = h + frozen_->forward(h);
  h = h + experts_[static_cast<std::size_t>(sample.expert)]->as<torch::nn::Linear>()->forward(h);
  if (sample.aux) h = h + aux_->forward(h);
  const at::Tensor out = at::linear(h, embedding_->weight) * gain_ + nothing_.sum();
  return (out.to(at::kFloat) - sample.target).square().mean();
}

at::Tensor Zoo::backwards_through_blocks(const Sample& sample) {
  at::Tensor h = embedding_->forward(sample.tokens);
  for (std::size_t i = up_->size(); i-- > 0;) h = block(i, h);
  return h;
}

nlohmann::json Zoo::leaf_settings() { return {{"zero_optimization", {{"leaf_module", {{"names", {"experts"}}}}}}}; }

}  // namespace ballast::testing
