// Orders of calls: how forwards, backwards, step() and reads may mix inside a window.

#include "tests/engine/support/cases.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

constexpr double kTol = 1e-6;

void expect_same_state(Session& a, Session& b, bool moments) {
  const auto left = a.masters(), right = b.masters();
  for (const auto& [name, value] : left) EXPECT_TRUE(bit_equal(value, right.at(name))) << name;
  if (!moments) return;
  for (const auto& [name, value] : left)
    for (const char* key : {"exp_avg", "exp_avg_sq"})
      EXPECT_TRUE(bit_equal(a.engine().full_optimizer_state(name, key), b.engine().full_optimizer_state(name, key)))
          << key << " of " << name;
}

// transformers#22143, gpt-neox#308: samples were counted by micro-batch, and a run stopped inside a window lost count.
void counters_inside_a_window(Trial& trial) {
  Session& session = trial.start(lin(4), 2);
  const Pull two = pull(trial.shared(2));
  session.window({two, two});
  session.expect_value("p", -.0666667);
  session.backward(two);
  if (trial.cell().managed) {
    EXPECT_EQ(session.step().reason, StepReason::kMidWindow);
  }
  const Counters counters = session.engine().counters();
  EXPECT_EQ(counters.global_steps, 1);
  EXPECT_EQ(counters.applied_steps, 1);
  EXPECT_EQ(counters.micro_steps, trial.cell().managed ? 3 : 2);  // the caller's are counted when its window ends
  EXPECT_EQ(counters.global_samples, 4);
  session.expect_value("p", -.0666667);
}

// DeepSpeed#3539, #8135: a second backward over one graph was lost, or counted as a micro-batch.
void two_backwards_over_one_graph(Trial& trial) {
  for (const bool drop_first : {false, true}) {
    Session& session = trial.start(lin(4));
    const at::Tensor once = session.loss(pull(trial.shared(1)));
    session.engine().backward(once, {.retain_graph = true});
    if (drop_first) session.engine().zero_grad();
    session.engine().backward(once * 2);
    const StepReport report = session.step();
    EXPECT_NEAR(report.grad_norm, drop_first ? 4 : 6, kTol);
    EXPECT_TRUE(report.applied);
    session.expect_value("p", drop_first ? -.0666667 : -.075);
  }
}

// DeepSpeed#8043, #6557: an evaluation inside a window, in another module order, changed what the window summed.
void evaluation_inside_a_window(Trial& trial) {
  const auto train = [&](bool evaluate) -> Session& {
    auto model = std::make_shared<Zoo>();
    Session& session = trial.start(model, 2, Zoo::leaf_settings());
    for (int step = 0; step < 3; ++step) {
      for (int k = 0; k < 2; ++k) {
        session.engine().backward(model->loss(sample(step, k, trial.rank(), trial.world().device())));
        if (trial.cell().managed || k == 1) session.step();
        if (!evaluate || k == 1) continue;
        const torch::NoGradGuard no_grad;
        for (int i = 0; i < 3; ++i)
          EXPECT_TRUE(
              at::isfinite(model->backwards_through_blocks(sample(step, 5 + i, trial.rank(), trial.world().device())))
                  .all()
                  .item<bool>());
      }
    }
    return session;
  };
  Session& plain = train(false);
  Session& evaluated = train(true);
  expect_same_state(plain, evaluated, true);
}

// Two forwards before their backwards.
void forwards_before_their_backwards(Trial& trial) {
  Session& session = trial.start(lin({{"a.p", {4}}, {"b.p", {4}}}));
  const at::Tensor first = session.loss({{"a.p", trial.shared(1)}, {"b.p", 1}});
  const at::Tensor second = session.loss({{"b.p", trial.shared(2)}, {"a.p", 1}});
  session.engine().backward(first);
  session.engine().backward(second);
  EXPECT_NEAR(session.step().grad_norm, 2 * std::sqrt(13.0), kTol);
  session.expect_value("a.p", -.0666667);
  session.expect_value("b.p", -.075);

  const auto train = [&](bool both_first) -> Session& {
    auto model = std::make_shared<Zoo>();
    Session& zoo = trial.start(model, 1, Zoo::leaf_settings());
    for (int step = 0; step < 3; ++step) {
      const auto loss = [&](int k) { return model->loss(sample(step, k, trial.rank(), trial.world().device())); };
      at::Tensor a = loss(0), b;
      if (both_first) b = loss(1);
      zoo.engine().backward(a);
      zoo.engine().backward(both_first ? b : loss(1));
      zoo.step();
    }
    return zoo;
  };
  Session& in_turn = train(false);
  Session& both_first = train(true);
  expect_same_state(in_turn, both_first, false);
}

// A step() with nothing to apply crashed, applied the last update again, or reported an old norm.
void step_without_backward(Trial& trial) {
  Session& session = trial.start(lin(4));
  const auto nothing_happens = [&](double value, std::int64_t applied) {
    const StepReport report = session.step();
    EXPECT_FALSE(report.applied);
    EXPECT_EQ(report.reason, StepReason::kEmptyWindow);
    EXPECT_EQ(report.grad_norm, 0);
    EXPECT_EQ(report.micro_batches, 0);
    EXPECT_EQ(session.engine().counters().applied_steps, applied);
    EXPECT_EQ(session.engine().counters().global_steps, applied);
    session.expect_value("p", value);
  };
  nothing_happens(0, 0);
  session.window({pull(trial.shared(1))});
  session.expect_value("p", -.05);
  nothing_happens(-.05, 1);
  nothing_happens(-.05, 1);
  session.expect_state("p", "exp_avg", .1);
  session.window({pull(trial.shared(1))});
  session.expect_value("p", -.10);

  session.backward(pull(trial.shared(5)));  // dropped, so that the window is empty again
  session.engine().zero_grad();
  EXPECT_EQ(session.step().reason, StepReason::kEmptyWindow);
  session.expect_value("p", -.10);
}

// A window of K backwards is one window, whoever counts it.
void managed_and_caller_owned_are_one_mechanism(Trial& trial) {
  const auto train = [&](bool managed) -> Session& {
    Cell cell = trial.cell();
    cell.managed = managed;
    auto model = std::make_shared<Zoo>();
    nlohmann::json changes = Zoo::leaf_settings();
    changes["gradient_clipping"] = 0.3;
    Session& session = trial.start(model, settings(cell, 3, changes));
    for (int step = 0; step < 4; ++step)
      for (int k = 0; k < 3; ++k) {
        session.engine().backward(model->loss(sample(step, k, trial.rank(), trial.world().device())));
        if (managed || k == 2) session.engine().step();
      }
    return session;
  };
  Session& managed = train(true);
  Session& caller_owned = train(false);
  expect_same_state(managed, caller_owned, true);
  EXPECT_EQ(managed.engine().counters().applied_steps, 4);
  EXPECT_EQ(caller_owned.engine().counters().applied_steps, 4);
}

}  // namespace

std::vector<Case> call_cases() {
  return {
      {10, "CountersInsideAWindow", counters_inside_a_window, kBothWindows, kEveryDType},
      {11, "TwoBackwardsOverOneGraph", two_backwards_over_one_graph, kBothWindows, kEveryDType},
      {12, "EvaluationInsideAWindow", evaluation_inside_a_window, kBothWindows, kEveryDType},
      {13, "ForwardsBeforeTheirBackwards", forwards_before_their_backwards, kCallerOwned, kEveryDType},
      {14, "StepWithoutBackward", step_without_backward, kBothWindows},
      {41, "StepWithoutBackward", step_without_backward, kBothWindows, kHalves},
      {49, "ManagedAndCallerOwnedAreOneMechanism", managed_and_caller_owned_are_one_mechanism, kManaged, kEveryDType},
  };
}

}  // namespace ballast::testing
