// Orders of use: sharded parameters fault in wherever a model touches them, and ranks that diverge learn of it.

#include <torch/nn/modules/linear.h>

#include <chrono>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/engine/activation_checkpoint.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

constexpr double kTol = 1e-6;

// Two layers that a step uses in an order of its own.
struct TwoLayers : torch::nn::Module {
  torch::nn::Linear a{3, 3}, b{3, 3};
  TwoLayers() {
    register_module("a", a);
    register_module("b", b);
    const torch::NoGradGuard no_grad;
    for (auto& layer : {a, b})
      for (at::Tensor& p : layer->parameters())
        p.copy_(at::arange(p.numel(), at::kFloat).reshape(p.sizes()) * 0.1 - 0.3);
  }
  at::Tensor loss(const std::string& order, double input) {
    at::Tensor h = at::full({2, 3}, input, a->weight.options());
    for (char layer : order) h = at::tanh((layer == 'A' ? a : b)->forward(h));
    return h.to(at::kFloat).square().sum();
  }
};

// DeepSpeed#1227, #3599: a layer used several times, or in another order than in the first step, was read ungathered.
void layers_in_any_order(Trial& trial) {
  auto power = std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(1, 1).bias(false));
  torch::nn::init::constant_(power->weight, 2);
  Session& session = trial.start(power);
  const at::Tensor one = at::ones({1, 1}, power->weight.options());
  const at::Tensor y = power->forward(power->forward(power->forward(one)));
  EXPECT_EQ(y.item<double>(), 8);
  session.engine().backward(y.sum());
  session.expect_grad("weight", 12);
  EXPECT_NEAR(session.step().grad_norm, 12, kTol);

  const auto train = [&](int stage, std::int64_t prefetch, std::int64_t max_live) -> Session& {
    Cell cell = trial.cell();
    cell.stage = stage;
    auto model = std::make_shared<TwoLayers>();
    const nlohmann::json zero = {{"stage3_prefetch_bucket_size", prefetch}, {"stage3_max_live_parameters", max_live}};
    Session& trained = trial.start(model, settings(cell, 1, {{"zero_optimization", zero}}));
    for (int round = 0; round < 2; ++round)
      for (const char* order : {"AB", "BA", "A", "ABB", "ABB"}) {
        trained.engine().backward(model->loss(order, .5 + .25 * trial.rank()));
        EXPECT_TRUE(trained.step().applied);
      }
    return trained;
  };
  const auto expected = train(0, 0, 0).masters();
  for (const std::int64_t prefetch : {0, 1'000'000})
    for (const std::int64_t max_live : {0, 1'000'000})
      for (const auto& [name, value] : train(trial.cell().stage, prefetch, max_live).masters())
        EXPECT_TRUE(bit_equal(value, expected.at(name)))
            << name << ", prefetch " << prefetch << ", max live " << max_live;
}

// DeepSpeed#5606, #7965: overlapped reductions read gradients that were still being written.
void overlap_changes_nothing(Trial& trial) {
  constexpr int kLayers = 8;
  constexpr std::int64_t kElements = 1'000'003;
  std::vector<Named> layers;
  for (int i = 0; i < kLayers; ++i) layers.push_back({"layer" + std::to_string(i) + ".p", {kElements}});
  const at::Tensor ramp = at::arange(kElements, at::kFloat).remainder(7) + trial.rank();  // integers, other by rank
  const Placement placement = trial.cell().placement;
  // On NVMe every step moves 50 MB a rank each way.
  const int steps = placement == Placement::kDevice ? 50 : trial.cell().on_disk() ? 5 : 25;
  const auto train = [&](bool overlap, std::int64_t bucket) {
    const nlohmann::json zero = {{"overlap_comm", overlap},
                                 {"reduce_bucket_size", bucket},
                                 {"allgather_bucket_size", bucket},
                                 {"sub_group_size", 200'000}};
    Board unused(trial.world().size());
    Session session(lin(layers), settings(trial.cell(), 1, {{"zero_optimization", zero}}), trial.world(), unused);
    for (int step = 0; step < steps; ++step) {
      at::Tensor loss;
      for (int i = 0; i < kLayers; ++i) {
        const std::string& name = layers[static_cast<std::size_t>(i)].name;
        const at::Tensor term = weighed_sum(session.model().parameter(name), ramp) * (i + 1.0);
        loss = loss.defined() ? loss + term : term;
      }
      if (step % 10 == trial.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // out of step
      session.engine().backward(loss);
      session.step();
    }
    return session.masters();
  };
  constexpr std::int64_t kAll = 500'000'000, kFew = 1'500'000;
  using Masters = std::map<std::string, at::Tensor>;
  const auto expect_same = [&](const Masters& a, const Masters& b, const char* what) {
    for (const auto& [name, value] : a) EXPECT_TRUE(bit_equal(value, b.at(name))) << name << ", " << what;
  };
  const Masters first = train(true, kAll);
  expect_same(first, train(false, kFew), "without overlap, small buckets");
  if (placement == Placement::kDevice) expect_same(first, train(true, kFew), "small buckets");
  ScalarAdam adam;
  double value = 0;
  for (int step = 0; step < steps; ++step) value = adam.step(3.5);  // element 3 of layer 0: (3 + 4) / 2
  EXPECT_NEAR(first.at("layer0.p")[3].item<double>(), value, 1e-5);
  trial.start(lin(1));  // for the driver to compare
}

// A frozen layer in bf16 with a trained adapter in fp32 beside it, both recomputed in backward.
struct Adapted : torch::nn::Module {
  torch::nn::Linear base{6, 6}, adapter{6, 6};
  Adapted() {
    register_module("base", base);
    register_module("adapter", adapter);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.copy_(at::arange(p.numel(), at::kFloat).reshape(p.sizes()) * 0.02 - 0.3);
    base->to(at::kBFloat16);
    for (at::Tensor& p : base->parameters()) p.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(base(x.to(at::kBFloat16)).to(at::kFloat) + adapter(x)); }
};

// DeepSpeed#8148, #7462: recomputation at stage 3 read parameters that had left, or cast frozen ones.
void recomputed_with_a_frozen_base(Trial& trial) {
  struct Net : torch::nn::Module {
    std::shared_ptr<Adapted> first = register_module("first", std::make_shared<Adapted>());
    std::shared_ptr<Adapted> second = register_module("second", std::make_shared<Adapted>());
  };
  const auto train = [&](int stage, bool recompute) {
    Cell cell = trial.cell();
    cell.stage = stage;
    auto net = std::make_shared<Net>();
    Session& session =
        trial.start(net, settings(cell, 1, {{"zero_optimization", {{"stage3_max_live_parameters", 0}}}}));
    std::vector<at::Tensor> seen;
    for (int step = 0; step < 3; ++step) {
      at::Tensor x = at::full({2, 6}, .1 * (step + 1) + trial.rank(), at::TensorOptions(trial.world().device()));
      for (const auto& block : {net->first, net->second})
        x = recompute ? checkpoint([&block = *block](const at::Tensor& in) { return block.forward(in); }, x)
                      : block->forward(x);
      session.engine().backward(x.square().sum());
      for (const char* name : {"first.adapter.weight", "second.adapter.bias"})
        seen.push_back(session.engine().full_grad(name).clone());
      session.step();
    }
    for (const auto& item : net->named_parameters()) {
      const bool frozen = item.key().find("base") != std::string::npos;
      EXPECT_EQ(item.value().scalar_type(), frozen ? at::kBFloat16 : at::kFloat) << item.key();
      EXPECT_EQ(item.value().requires_grad(), !frozen) << item.key();
    }
    return seen;
  };
  const std::vector<at::Tensor> expected = train(0, false), seen = train(trial.cell().stage, true);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(bit_equal(seen[i], expected[i])) << "gradient " << i;
}

// DeepSpeed#7998, #8262: ranks that used different experts gathered different layers and hung.
void experts_in_a_leaf(Trial& trial) {
  Session& session = trial.start(lin({{"trunk.p", {5}}, {"moe.e0.p", {4}}, {"moe.e1.p", {4}}, {"moe.e2.p", {4}}}), 1,
                                 {{"zero_optimization", {{"leaf_module", {{"name_suffixes", {"moe"}}}}}}});
  ScalarAdam e0, e1, e2;
  for (int step = 0; step < 3; ++step) {
    // Two experts on rank 0, another one on rank 1, and in the last step nobody's expert 1.
    Pull uses{{"trunk.p", trial.shared(1)}};
    if (trial.rank() == 0) uses.insert(uses.end(), {{"moe.e0.p", 2}, {"moe.e2.p", 6}});
    if (trial.rank() == 1) uses.push_back(step < 2 ? Pull::value_type{"moe.e1.p", 4} : Pull::value_type{"moe.e0.p", 0});
    session.window({uses});
    session.expect_value("moe.e0.p", e0.step(1));
    session.expect_value("moe.e1.p", step < 2 ? e1.step(2) : -.1333333);
    session.expect_value("moe.e2.p", e2.step(3));
  }
  session.expect_value("trunk.p", -.15);
}

// A unit that is resident may be used more often on one rank than on another.
void unequal_counts_of_a_resident_unit(Trial& trial) {
  for (const bool persistent : {false, true}) {
    const nlohmann::json zero = {{"stage3_param_persistence_threshold", persistent ? 1000 : 0}};
    Session& session = trial.start(lin({{"a.p", {4}}, {"b.p", {4}}}), 1, {{"zero_optimization", zero}});
    for (const double value : {-.075, -.15, -.225}) {
      at::Tensor loss = session.loss({{"a.p", 1}});
      if (trial.rank() == 0) loss = loss + session.loss({{"a.p", 2}}) + session.loss({{"a.p", 2}});
      loss = loss + session.loss({{"b.p", trial.shared(3)}});
      session.engine().backward(loss);
      session.step();
      session.expect_value("a.p", value);
      session.expect_value("b.p", value);
    }
  }
}

// Every rank must end with an error that holds both texts, and without waiting for the timeout.
void expect_divergence(const std::function<void()>& calls, const std::vector<std::string>& texts) {
  try {
    calls();
    ADD_FAILURE() << "ranks diverged and nobody noticed";
  } catch (const CommError& e) {
    for (const std::string& text : texts)
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << "no '" << text << "' in: " << e.what();
  }
}

// An operator on a parameter that couldn't be gathered throws too; the engine's next call tells the cause.
void ignoring_torch_errors(const std::function<void()>& calls) {
  try {
    calls();
  } catch (const c10::Error&) {
  }
}

void divergence_names_both_units(Trial& trial) {
  Board unused(trial.world().size());
  Session session(lin({{"left.p", {4}}, {"right.p", {4}}}), settings(trial.cell()), trial.world(), unused);
  expect_divergence(
      [&] {
        at::Tensor loss;
        ignoring_torch_errors([&] { loss = session.loss({{trial.rank() == 0 ? "left.p" : "right.p", 1}}); });
        ignoring_torch_errors(
            [&] { session.engine().backward(loss.defined() ? loss : at::ones({}, at::kFloat).requires_grad_()); });
        session.engine().step();
      },
      {"left", "right"});
  trial.start(lin(1));  // the world survives the engine
}

// Managed and caller-owned: at stage 3 every backward is everybody's.
void unequal_backwards_are_refused(Trial& trial) {
  Board unused(trial.world().size());
  Session session(lin(4), settings(trial.cell()), trial.world(), unused);
  expect_divergence(
      [&] {
        const int backwards = trial.rank() == 0 ? 1 : 3;
        for (int k = 0; k < backwards; ++k)
          ignoring_torch_errors([&] { session.backward(pull(k + 1), {.weight = 1}); });
        session.engine().step();
      },
      {"after 1 backwards", "backward() number 2"});
  trial.start(lin(1));  // the world survives the engine
}

}  // namespace

std::vector<Case> order_cases() {
  return {
      {31, "OverlapChangesNothing", overlap_changes_nothing, kCallerOwned, kFp32, {2, 3}},
      {32, "LayersInAnyOrder", layers_in_any_order, kManaged},
      {33, "RecomputedWithAFrozenBase", recomputed_with_a_frozen_base, kManaged},
      {34, "ExpertsInALeaf", experts_in_a_leaf, kBothWindows, kEveryDType},
      {34, "UnequalCountsOfAResidentUnit", unequal_counts_of_a_resident_unit, kManaged},
      {34, "DivergenceNamesBothUnits", divergence_names_both_units, kManaged, kFp32, {3}},
      {50, "UnequalBackwardsAreRefused", unequal_backwards_are_refused, kCallerOwned, kFp32, {3}},
  };
}

}  // namespace ballast::testing
