// Every optimizer, with decay, momentum and groups, against torch::optim (Lion: against its paper) on the whole batch.

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "ballast/comm/testing.h"
#include "tests/engine/support/reference.h"
#include "tests/engine/support/trial.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

/// Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2, which LibTorch lacks.
class PlainLion : public torch::optim::Optimizer {
 public:
  struct Options : torch::optim::OptimizerCloneableOptions<Options> {};
  PlainLion(std::vector<at::Tensor> weights, double lr, double beta1, double beta2, double decay)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(weights))}, std::make_unique<Options>()),
        lr_(lr),
        beta1_(beta1),
        beta2_(beta2),
        decay_(decay) {}

  at::Tensor step(LossClosure) override {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& weight : param_groups_[0].params()) {
      const at::Tensor& gradient = weight.grad();
      if (!gradient.defined()) continue;
      at::Tensor& momentum = momenta_[weight.unsafeGetTensorImpl()];
      if (!momentum.defined()) momentum = at::zeros_like(weight);
      const at::Tensor direction = (momentum * beta1_ + gradient * (1 - beta1_)).sign();
      weight.copy_(weight - lr_ * (direction + decay_ * weight));
      momentum = momentum * beta2_ + gradient * (1 - beta2_);
    }
    return {};
  }

 private:
  double lr_, beta1_, beta2_, decay_;
  std::map<c10::TensorImpl*, at::Tensor> momenta_;
};

template <class Optimizer, class Options>
Reference::MakeOptimizer torch_optimizer(Options options) {
  return [=](std::vector<at::Tensor> weights) { return std::make_unique<Optimizer>(std::move(weights), options); };
}

struct Rule {
  const char* name;
  nlohmann::json optimizer;
  Reference::MakeOptimizer reference;
};

std::vector<Rule> rules() {
  using namespace torch::optim;
  const auto json = [](const char* type, nlohmann::json params) {
    return nlohmann::json{{"type", type}, {"params", std::move(params)}};
  };
  return {
      {"Adam",
       json("Adam", {{"lr", .05}, {"betas", {.8, .95}}, {"eps", .1}, {"weight_decay", .1}, {"adam_w_mode", false}}),
       torch_optimizer<Adam>(AdamOptions(.05).betas({.8, .95}).eps(.1).weight_decay(.1))},
      {"AdamW", json("AdamW", {{"lr", .05}, {"betas", {.8, .95}}, {"eps", .1}, {"weight_decay", .1}}),
       torch_optimizer<AdamW>(AdamWOptions(.05).betas({.8, .95}).eps(.1).weight_decay(.1))},
      {"Adam with adam_w_mode", json("Adam", {{"lr", .05}, {"betas", {.8, .95}}, {"eps", .1}, {"weight_decay", .1}}),
       torch_optimizer<AdamW>(AdamWOptions(.05).betas({.8, .95}).eps(.1).weight_decay(.1))},
      {"SGD", json("SGD", {{"lr", .1}, {"weight_decay", .1}}), torch_optimizer<SGD>(SGDOptions(.1).weight_decay(.1))},
      {"SGD with momentum", json("SGD", {{"lr", .1}, {"momentum", .9}, {"dampening", .5}, {"weight_decay", .1}}),
       torch_optimizer<SGD>(SGDOptions(.1).momentum(.9).dampening(.5).weight_decay(.1))},
      {"SGD with Nesterov's momentum", json("SGD", {{"lr", .1}, {"momentum", .9}, {"nesterov", true}}),
       torch_optimizer<SGD>(SGDOptions(.1).momentum(.9).nesterov(true))},
      {"Lion", json("Lion", {{"lr", .01}, {"betas", {.9, .99}}, {"weight_decay", .1}}),
       [](std::vector<at::Tensor> weights) {
         return std::make_unique<PlainLion>(std::move(weights), .01, .9, .99, .1);
       }},
  };
}

constexpr int kRanks = 2, kSteps = 5, kBackwards = 2;

std::map<std::string, at::Tensor> plain(const Rule& rule) {
  auto model = std::make_shared<Zoo>();
  Reference reference(model, at::kFloat, rule.reference);
  for (int step = 0; step < kSteps; ++step) {
    for (int k = 0; k < kBackwards; ++k)
      for (int rank = 0; rank < kRanks; ++rank) reference.backward(model->loss(sample(step, k, rank, at::kCPU)));
    reference.step(kBackwards * kRanks);
  }
  return reference.masters();
}

TEST(Optimizers, GiveWhatTorchGives) {
  for (const Rule& rule : rules()) {
    const auto want = plain(rule);
    for (const Cell& cell : cells({0, 1, 2, 3}, {DType::kFloat32}, {true}))
      run_trial(kRanks, cell, [&](Trial& trial) {
        SCOPED_TRACE(rule.name);
        nlohmann::json changes = Zoo::leaf_settings();
        nlohmann::json json = settings(trial.cell(), kBackwards, changes);
        json["optimizer"] = rule.optimizer;  // in place of Adam's parameters, not merged with them
        auto model = std::make_shared<Zoo>();
        Session& session = trial.start(model, json);
        for (int step = 0; step < kSteps; ++step)
          for (int k = 0; k < kBackwards; ++k) {
            session.engine().backward(model->loss(sample(step, k, trial.rank(), trial.world().device())));
            session.step();
          }
        for (const auto& [name, value] : session.masters()) {
          const double off = value.numel() == 0 ? 0 : (value.cpu() - want.at(name)).abs().max().item<double>();
          EXPECT_LE(off, 2e-6) << name;
        }
      });
  }
}

}  // namespace
}  // namespace ballast::testing
