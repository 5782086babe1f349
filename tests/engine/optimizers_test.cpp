// Every optimizer, with decay, momentum and groups, against torch::optim (Lion: against its paper) on the whole batch.

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "ballast/comm/testing.h"
#include "tests/engine/support/homes.h"
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
  std::vector<const char*> states;  // besides the step count
  nlohmann::json optimizer;
  Reference::MakeOptimizer reference;
};

std::vector<Rule> rules() {
  using namespace torch::optim;
  const auto json = [](const char* type, nlohmann::json params) {
    return nlohmann::json{{"type", type}, {"params", std::move(params)}};
  };
  const std::vector<const char*> both{"exp_avg", "exp_avg_sq"}, momentum{"momentum_buffer"};
  return {
      {"Adam", both,
       json("Adam", {{"lr", .05}, {"betas", {.8, .95}}, {"eps", .1}, {"weight_decay", .1}, {"adam_w_mode", false}}),
       torch_optimizer<Adam>(AdamOptions(.05).betas({.8, .95}).eps(.1).weight_decay(.1))},
      {"AdamW", both, json("AdamW", {{"lr", .05}, {"betas", {.8, .95}}, {"eps", .1}, {"weight_decay", .1}}),
       torch_optimizer<AdamW>(AdamWOptions(.05).betas({.8, .95}).eps(.1).weight_decay(.1))},
      {"Adam with adam_w_mode", both,
       json("Adam", {{"lr", .05}, {"betas", {.8, .95}}, {"eps", .1}, {"weight_decay", .1}}),
       torch_optimizer<AdamW>(AdamWOptions(.05).betas({.8, .95}).eps(.1).weight_decay(.1))},
      {"SGD",
       {},
       json("SGD", {{"lr", .1}, {"weight_decay", .1}}),
       torch_optimizer<SGD>(SGDOptions(.1).weight_decay(.1))},
      {"SGD with momentum", momentum,
       json("SGD", {{"lr", .1}, {"momentum", .9}, {"dampening", .5}, {"weight_decay", .1}}),
       torch_optimizer<SGD>(SGDOptions(.1).momentum(.9).dampening(.5).weight_decay(.1))},
      {"SGD with Nesterov's momentum", momentum, json("SGD", {{"lr", .1}, {"momentum", .9}, {"nesterov", true}}),
       torch_optimizer<SGD>(SGDOptions(.1).momentum(.9).nesterov(true))},
      {"SGD with Nesterov's momentum and decay", momentum,
       json("SGD", {{"lr", .1}, {"momentum", .9}, {"nesterov", true}, {"weight_decay", .1}}),
       torch_optimizer<SGD>(SGDOptions(.1).momentum(.9).nesterov(true).weight_decay(.1))},
      {"Lion",
       {"exp_avg"},
       json("Lion", {{"lr", .01}, {"betas", {.9, .99}}, {"weight_decay", .1}}),
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

// Units of several chunks, whose parameters don't end where chunks do.
const std::vector<Named> kLong{{"a.p", {100}, .5}, {"a.rests", {301}, .25}, {"a.q", {5}, -.5}, {"b.p", {517}, -1}};

// A gradient that is different in every element, step and rank and depends on the weights. "a.rests" rests in every
// other window on all ranks, "a.q" always on rank 1.
at::Tensor loss_of_long(Lin& model, int step, int rank) {
  at::Tensor loss;
  for (const Named& named : kLong) {
    if (named.name == "a.rests" && step % 2 == 1) continue;
    if (named.name == "a.q" && rank == 1) continue;
    const at::Tensor& p = model.parameter(named.name);
    const at::Tensor ramp = at::arange(p.numel(), p.options()).remainder(13) * .125 - .5 + .25 * step + rank;
    const at::Tensor term = weighed_sum(p, ramp) + p.square().sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

using States = std::map<std::string, at::Tensor>;

States states_of(Session& session, const Rule& rule, const std::string& name) {
  States all{{"master", session.engine().full_parameter(name).clone()}};
  for (const char* key : rule.states) all[key] = session.engine().full_optimizer_state(name, key).clone();
  all["step"] = session.engine().full_optimizer_state(name, "step").clone();
  return all;
}

void expect_same_bits(const States& a, const States& b, const std::string& what) {
  for (const auto& [key, value] : a) EXPECT_TRUE(bit_equal(value, b.at(key))) << key << " of " << what;
}

// One backward a window. What rests keeps its value, its moments and its count, whichever chunks it shares with others.
TEST(Optimizers, AreBitEqualWhereverStatesLie) {
  for (const Rule& rule : rules())
    for (const int stage : {0, 1, 2, 3})
      run_trial(kRanks, {stage, Placement::kNvme, DType::kFloat32, false}, [&](Trial& trial) {
        std::map<std::string, States> first;
        for (const Home& home : homes()) {
          SCOPED_TRACE(std::string(rule.name) + ", " + home.name);
          nlohmann::json json = settings({stage, home.placement, DType::kFloat32, false}, 1, home.changes());
          json["optimizer"] = rule.optimizer;
          Session& session = trial.start(lin(kLong), json);
          for (int step = 0; step < kSteps; ++step) {
            const States before = states_of(session, rule, "a.rests");
            session.engine().backward(loss_of_long(session.model(), step, trial.rank()));
            EXPECT_TRUE(session.step().applied);
            if (step % 2 == 1) expect_same_bits(before, states_of(session, rule, "a.rests"), "a.rests, while it rests");
          }
          // A CUDA device's updates are LibTorch's fused kernels, which round otherwise than the host's.
          if (!trial.world().device().is_cpu() && home.on_device()) continue;
          for (const Named& named : kLong) {
            const States states = states_of(session, rule, named.name);
            EXPECT_EQ(states.at("step").item<double>(), named.name == "a.rests" ? (kSteps + 1) / 2 : kSteps);
            expect_same_bits(first.try_emplace(named.name, states).first->second, states, named.name);
          }
        }
      });
}

}  // namespace
}  // namespace ballast::testing
