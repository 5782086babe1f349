// Shapes, groups, ties and the life of an engine: what must keep its form or move together.

#include <ATen/CPUGeneratorImpl.h>
#include <malloc.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

constexpr double kTol = 1e-6;

// pytorch#176076, verl#7834: a tied table lost one of its two gradients, or its names drifted apart.
void tied_table_used_twice(Trial& trial) {
  auto model = lin({{"first.table", {10, 3}}});
  model->tie("first.table", "second.table");
  Session& session = trial.start(model);
  const auto share_storage = [&] {
    EXPECT_EQ(model->parameter("first.table").storage().unsafeGetStorageImpl(),
              model->parameter("second.table").storage().unsafeGetStorageImpl());
  };
  share_storage();
  for (const double value : {-.075, -.15, -.225}) {
    const StepReport report = session.window({{{"first.table", trial.shared(1)}, {"second.table", 2}}});
    EXPECT_NEAR(report.grad_norm, 16.431677, 1e-5);
    session.expect_value("first.table", value);
    session.expect_value("second.table", value);
    share_storage();
  }
}

// DeepSpeed#8280, #8297, pytorch#144045: empty, zero-dimensional and tiny parameters crashed or changed their shapes.
void every_shape(Trial& trial) {
  for (const char* unit : {"", ".p"}) {
    const EveryShape shapes(trial, unit);
    auto model = lin(shapes.parameters);
    Session& session = trial.start(model);
    for (const double value : {-.05, -.10, -.15}) {
      EXPECT_NEAR(session.window({shapes.all}).grad_norm, EveryShape::kNorm, kTol);
      for (const Named& named : shapes.parameters) {
        EXPECT_EQ(model->parameter(named.name).sizes(), at::IntArrayRef(named.shape));
        EXPECT_EQ(session.engine().full_parameter(named.name).sizes(), at::IntArrayRef(named.shape));
        session.expect_value(named.name, value);
      }
    }
  }
}

// DeepSpeed#7050, #7906: interleaved groups got each other's learning rate and decay.
void interleaved_groups(Trial& trial) {
  const nlohmann::json optimizer = {{"type", "AdamW"},
                                    {"params",
                                     {{"lr", .1},
                                      {"eps", 1.0},
                                      {"weight_decay", 0.0},
                                      {"groups", {{{"patterns", {"b", "d"}}, {"lr", .01}, {"weight_decay", .5}}}}}}};
  Session& session =
      trial.start(lin({{"a", {3}, 1}, {"b", {5}, 1}, {"c", {7}, 1}, {"d", {2}, 1}}), 1, {{"optimizer", optimizer}});
  const auto check = [&](double plain, double decayed) {
    Pull all;
    for (const char* name : {"a", "b", "c", "d"}) all.emplace_back(name, trial.shared(1));
    session.window({all});
    for (const char* name : {"a", "c"}) session.expect_value(name, plain);
    for (const char* name : {"b", "d"}) session.expect_value(name, decayed);
  };
  check(.95, .99);
  check(.90, .98005);
}

// DeepSpeed#7982, #1823: equal parameters in different groups and parts of the optimizer took different steps.
void equal_parameters_step_equally(Trial& trial) {
  std::vector<Named> parameters;
  for (int i = 0; i < 5; ++i) parameters.push_back({"unit" + std::to_string(i) + ".p", {131}});
  nlohmann::json optimizer = {{"type", "Adam"}, {"params", {{"lr", .1}, {"eps", 1.0}}}};
  for (const char* pattern : {"unit1.*", "unit[24].*"})
    optimizer["params"]["groups"].push_back({{"patterns", {pattern}}, {"lr", .1}});
  Session& session = trial.start(lin(parameters), 1, {{"optimizer", optimizer}});
  Pull all;
  for (const Named& named : parameters) all.emplace_back(named.name, trial.shared(1));
  for (const double value : {-.05, -.10, -.15}) {
    EXPECT_EQ(session.window({all}).lr.size(), 3U);
    for (const Named& named : parameters) {
      session.expect_value(named.name, value);
      EXPECT_TRUE(bit_equal(session.engine().full_parameter(named.name), session.engine().full_parameter("unit0.p")));
    }
  }
}

// DeepSpeed#762, #1322, #4141: weights written from outside were overwritten by the old masters in the next step.
void written_weights_reach_the_masters(Trial& trial) {
  Session& session = trial.start(lin(4, .9));
  session.engine().set_full_parameter("p", at::full({4}, 5.0, at::kFloat));
  session.window({pull(trial.shared(1))});
  session.expect_value("p", 4.95);
  EXPECT_NEAR(session.model().parameter("p").detach().to(at::kFloat).max().item<double>(), 4.95, .02);
}

// DeepSpeed#3090, #2413, #3407: frozen weights changed or lost their shapes, tied names differed.
void frozen_and_tied(Trial& trial) {
  std::vector<Named> parameters;
  for (int i = 0; i < 6; ++i)
    parameters.push_back(
        {"unit" + std::to_string(i / 2) + ".p" + std::to_string(i), {2 * i + 1, 3}, .25 * i, i % 2 == 0});
  auto model = lin(parameters);
  model->tie("unit0.p0", "last.tied");
  Session& session = trial.start(model);
  const auto copies = [&] {
    std::vector<at::Tensor> all;
    for (const Named& named : parameters) all.push_back(model->parameter(named.name).detach().clone());
    return all;
  };
  const std::vector<at::Tensor> before = copies();
  ScalarAdam adam;
  for (int step = 0; step < 3; ++step) {
    at::Tensor loss = session.loss({{"last.tied", trial.shared(1)}});
    for (std::size_t i = 0; i < parameters.size(); ++i)
      loss = loss + session.loss({{parameters[i].name, trial.shared(2)}});
    session.engine().backward(loss);
    EXPECT_TRUE(session.step().applied);
    session.expect_value("unit0.p0", adam.step(3));
    session.expect_value("last.tied", session.engine().full_parameter("unit0.p0").flatten()[0].item<double>(), 0);
  }
  const std::vector<at::Tensor> after = copies();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(bit_equal(before[i], after[i]), !parameters[i].trainable) << parameters[i].name;
    EXPECT_EQ(session.engine().full_parameter(parameters[i].name).sizes(), at::IntArrayRef(parameters[i].shape));
    EXPECT_EQ(model->parameter(parameters[i].name).requires_grad(), parameters[i].trainable);
  }
}

std::size_t hooks_on(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  return torch::autograd::impl::hooks(parameter).size() + accumulator->pre_hooks().size() +
         accumulator->tensor_pre_hooks().size() + accumulator->post_hooks().size();
}

// For parameters of many elements.
const nlohmann::json kLargeChunks = {{"zero_optimization", {{"sub_group_size", 20'000}}}};

// DeepSpeed#4858, #896, #5674: a destroyed engine left hooks and memory behind, and the next one counted twice.
void an_engine_leaves_nothing_behind(Trial& trial) {
  auto model = lin(100'000);
  const std::size_t hooks = hooks_on(model->parameter("p"));
  Board unused(trial.world().size());
  for (int life = 0; life < 3; ++life) {
    Session session(model, settings(trial.cell(), 1, kLargeChunks), trial.world(), unused);
    session.window({pull(trial.shared(0))});
  }
  EXPECT_EQ(hooks_on(model->parameter("p")), hooks);
  EXPECT_EQ(model->parameter("p").sizes(), at::IntArrayRef({100'000}));
  expect_all(model->parameter("p"), 0, 0, "the module's own parameter after its engines");
  EXPECT_TRUE(model->parameter("p").is_leaf());
  Session& session = trial.start(model, 1, kLargeChunks);
  session.backward(pull(trial.shared(1)));
  session.expect_grad("p", 1, 0);
  session.step();
  session.expect_value("p", -.05);
}

// Bytes in use in the heap and in the mappings that malloc made.
double heap_bytes() {
  const struct mallinfo2 info = ::mallinfo2();
  return static_cast<double>(info.uordblks + info.hblkhd);
}

void engines_do_not_leak(Trial& trial) {
  auto model = lin(1'000'000);
  Board unused(1);
  double after_first = 0;
  for (int life = 0; life < 4; ++life) {
    {
      Session session(model, settings(trial.cell(), 1, kLargeChunks), trial.world(), unused);
      session.window({pull(1)});
    }
    if (life == 0) after_first = heap_bytes();
  }
  EXPECT_NEAR(heap_bytes(), after_first, .01 * after_first);
  trial.start(model, 1, kLargeChunks);
}

}  // namespace

std::vector<Case> state_cases() {
  return {
      {20, "TiedTableUsedTwice", tied_table_used_twice, kBothWindows, kEveryDType, kEveryStage, 4},
      {21, "EveryShapeOnOneRank", every_shape, kManaged, kEveryDType, kEveryStage, 1},
      {21, "EveryShapeOnFourRanks", every_shape, kManaged, kEveryDType, kEveryStage, 4},
      {24, "InterleavedGroups", interleaved_groups, kManaged, kEveryDType},
      {25, "EqualParametersStepEqually", equal_parameters_step_equally, kManaged, kEveryDType},
      {27, "WrittenWeightsReachTheMasters", written_weights_reach_the_masters, kManaged, kEveryDType},
      {28, "FrozenAndTied", frozen_and_tied, kManaged, kEveryDType, kEveryStage, 3},
      {30, "AnEngineLeavesNothingBehind", an_engine_leaves_nothing_behind, kBothWindows},
      {30, "EnginesDoNotLeak", engines_do_not_leak, kManaged, kFp32, kEveryStage, 1},
  };
}

}  // namespace ballast::testing
