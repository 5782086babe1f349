// Optimizer states that a program sets by name before or between steps, as one does that takes a run over from another
// engine: the next updates are those of torch.optim with the same state.

#include "ballast/base/error.h"
#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

void in_every_cell(const std::function<void(Trial&)>& body, const std::vector<DType>& dtypes = kFp32) {
  for (const Cell& cell : cells(kEveryStage, dtypes, kCallerOwned)) run_trial(2, cell, body);
}

nlohmann::json sgd(const Cell& cell, const nlohmann::json& params) {
  nlohmann::json json = settings(cell);
  json["optimizer"] = {{"type", "SGD"}, {"params", params}};
  return json;
}

at::Tensor fives(double value) { return at::full({5}, value, at::kFloat); }

TEST(OptimizerState, AMomentumBufferSetBeforeTheFirstStepIsUsed) {
  in_every_cell(
      [](Trial& trial) {
        Session& session = trial.start(lin({{"set", {5}}, {"fresh", {5}}, {"late.p", {5}}}),
                                       sgd(trial.cell(), {{"lr", .5}, {"momentum", .5}, {"dampening", .25}}));
        session.engine().set_full_optimizer_state("set", "momentum_buffer", fives(8));
        const double mean = trial.shared(4);
        session.window({{{"set", mean}, {"fresh", mean}}});
        session.expect_state("set", "momentum_buffer", 7);    // .5 * 8 + .75 * 4
        session.expect_state("fresh", "momentum_buffer", 4);  // the gradient itself
        session.expect_value("set", -3.5);
        session.expect_value("fresh", -2);
        session.engine().set_full_optimizer_state("late.p", "momentum_buffer", fives(0));
        session.window({{{"set", mean}, {"fresh", mean}, {"late.p", mean}}});
        session.expect_state("set", "momentum_buffer", 6.5);   // .5 * 7 + .75 * 4
        session.expect_state("fresh", "momentum_buffer", 5);   // .5 * 4 + .75 * 4
        session.expect_state("late.p", "momentum_buffer", 3);  // a buffer of zeros is a buffer
        session.expect_value("late.p", -1.5);
      },
      kEveryDType);
}

TEST(OptimizerState, ANesterovBufferSetBeforeTheFirstStepIsUsed) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin(5), sgd(trial.cell(), {{"lr", .5}, {"momentum", .5}, {"nesterov", true}}));
    session.engine().set_full_optimizer_state("p", "momentum_buffer", fives(8));
    session.window({pull(trial.shared(4))});
    session.expect_state("p", "momentum_buffer", 8);  // .5 * 8 + 4
    session.expect_value("p", -4);                    // .5 * (4 + .5 * 8)
  });
}

TEST(OptimizerState, AStepCountWithoutABufferStillStartsTheBuffer) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin(5), sgd(trial.cell(), {{"lr", .5}, {"momentum", .5}, {"dampening", .25}}));
    session.engine().set_full_optimizer_state("p", "step", at::full({}, 7., at::kFloat));
    session.window({pull(trial.shared(4))});
    session.expect_state("p", "momentum_buffer", 4);
    session.expect_state("p", "step", 8, 0);
  });
}

TEST(OptimizerState, StepCountsAreReadByParameter) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {3, 2}}, {"frozen", {2}, 1, false}}));
    session.expect_state("a.p", "step", 0, 0);
    for (int step = 0; step < 3; ++step) {
      Pull used{{"a.p", trial.shared(1)}};
      if (step == 1) used.push_back({"b.p", trial.shared(1)});
      session.window({used});
    }
    session.expect_state("a.p", "step", 3, 0);
    session.expect_state("b.p", "step", 1, 0);
    const at::Tensor count = session.engine().full_optimizer_state("b.p", "step");
    EXPECT_EQ(count.dim(), 0);
    EXPECT_EQ(count.scalar_type(), at::kFloat);
    EXPECT_EQ(count.device(), trial.world().device());
    EXPECT_THROW(session.engine().full_optimizer_state("frozen", "step"), UseError);
  });
}

// Bias corrections follow the count: at the tenth step m and v have other divisors than at the first.
TEST(OptimizerState, ASetStepCountSetsAdamsBiasCorrections) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"a", {5}}, {"b", {5}}}));
    session.engine().set_full_optimizer_state("a", "exp_avg", fives(.5));
    session.engine().set_full_optimizer_state("a", "exp_avg_sq", fives(.25));
    session.engine().set_full_optimizer_state("a", "step", at::full({1}, 9., at::kDouble));
    session.window({{{"a", trial.shared(1)}, {"b", trial.shared(1)}}});
    const double m = .9 * .5 + .1, v = .999 * .25 + .001;
    const double mean = m / (1 - std::pow(.9, 10)), root = std::sqrt(v / (1 - std::pow(.999, 10)));
    session.expect_value("a", -.1 * mean / (root + 1));
    session.expect_value("b", -.05);  // its own count: the first step
    session.expect_state("a", "step", 10, 0);
    session.expect_state("b", "step", 1, 0);
  });
}

TEST(OptimizerState, OnlyACountIsTakenForAStep) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"p", {5}}, {"frozen", {2}, 1, false}}));
    Engine& engine = session.engine();
    const auto one = [](double value) { return at::full({}, value, at::kDouble); };
    for (const double value : {-1., .5, 1e300, std::numeric_limits<double>::quiet_NaN()})
      EXPECT_THROW(engine.set_full_optimizer_state("p", "step", one(value)), UseError) << value;
    EXPECT_THROW(engine.set_full_optimizer_state("p", "step", fives(1)), UseError);
    EXPECT_THROW(engine.set_full_optimizer_state("p", "step", at::Tensor()), UseError);
    EXPECT_THROW(engine.set_full_optimizer_state("frozen", "step", one(1)), UseError);
    session.window({pull(trial.shared(1))});
    session.expect_value("p", -.05);
  });
}

}  // namespace
}  // namespace ballast::testing
