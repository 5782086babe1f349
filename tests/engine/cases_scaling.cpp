// Non-finite gradients, the loss scale and clipping: what is skipped, what is scaled, and what of it anyone may notice.

#include <limits>

#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

constexpr double kTol = 1e-6;
constexpr double kInf = std::numeric_limits<double>::infinity();

// Everything that a skipped step must leave alone.
struct State {
  at::Tensor p, m, v;
  std::vector<double> lr;
  explicit State(Session& session)
      : p(session.engine().full_parameter("p").clone()),
        m(session.engine().full_optimizer_state("p", "exp_avg").clone()),
        v(session.engine().full_optimizer_state("p", "exp_avg_sq").clone()),
        lr(session.engine().lr()) {}
};

void expect_unchanged(const State& before, Session& session) {
  const State now(session);
  EXPECT_TRUE(bit_equal(now.p, before.p));
  EXPECT_TRUE(bit_equal(now.m, before.m));
  EXPECT_TRUE(bit_equal(now.v, before.v));
  EXPECT_EQ(now.lr, before.lr);
}

// DeepSpeed#8432: an overflow inside a window let the rest of the window through, or was noticed once a micro-batch.
void overflow_drops_the_window_once(Trial& trial) {
  Session& session = trial.start(lin(4), 4);
  const Pull one = pull(trial.shared(1)), bad = pull(trial.rank() == 1 ? kInf : 1);
  for (const double value : {-.05, -.10}) {
    const State before(session);
    const std::int64_t skipped = session.engine().counters().skipped_steps;
    const StepReport report = session.window({one, one, bad, one});
    EXPECT_EQ(report.reason, StepReason::kNonFinite);
    EXPECT_FALSE(report.applied);
    expect_unchanged(before, session);
    EXPECT_EQ(session.engine().counters().skipped_steps, skipped + 1);
    EXPECT_TRUE(session.window({one, one, one, one}).applied);
    session.expect_value("p", value);
  }
}

// DeepSpeed#7171, #8035: without a loss scaler nobody looked for infinities, and clipping made NaNs of them.
void infinity_without_a_loss_scale(Trial& trial) {
  Session& session = trial.start(lin(5), 1, {{"gradient_clipping", 1.0}});
  const double clipped = 1 / std::sqrt(5.0);  // the gradient 1 in 5 elements, clipped to norm 1
  ScalarAdam adam;
  for (int round = 0; round < 2; ++round) {
    const State before(session);
    at::Tensor coefficients = at::ones({5}, at::kFloat);
    if (trial.rank() == 1) coefficients[3] = round == 0 ? kInf : std::numeric_limits<double>::quiet_NaN();
    session.engine().backward(weighed_sum(session.model().parameter("p"), coefficients));
    EXPECT_EQ(session.step().reason, StepReason::kNonFinite);
    expect_unchanged(before, session);
    const StepReport report = session.window({pull(trial.shared(1))});
    EXPECT_NEAR(report.grad_norm, std::sqrt(5.0), kTol);
    EXPECT_NEAR(report.clip_factor, clipped, kTol);
    session.expect_value("p", adam.step(clipped));
  }
}

// Two parameters that lie in shards of different ranks.
std::shared_ptr<Lin> far_apart() { return lin({{"a", {1}}, {"filler", {4096}}, {"b", {1}}}); }
Pull three_and_four(Trial& trial) { return {{"a", trial.shared(3)}, {"filler", 0}, {"b", trial.shared(4)}}; }

// DeepSpeed#5150, #2695, #7839, pytorch#170862: the norm was that of one rank's part, or that of the scaled gradient.
void clipping_by_the_global_norm(Trial& trial) {
  Session& clipped = trial.start(far_apart(), 1, {{"gradient_clipping", 1.0}});
  const StepReport report = clipped.window({three_and_four(trial)});
  EXPECT_NEAR(report.grad_norm, 5, kTol);
  EXPECT_NEAR(report.clip_factor, .2, kTol);
  clipped.expect_value("a", -.1 * .6 / 1.6);
  clipped.expect_value("b", -.1 * .8 / 1.8);

  Session& generous = trial.start(far_apart(), 1, {{"gradient_clipping", 10.0}});
  Session& without = trial.start(far_apart());
  EXPECT_EQ(generous.window({three_and_four(trial)}).clip_factor, 1);
  without.window({three_and_four(trial)});
  for (const auto& [name, value] : without.masters())
    EXPECT_TRUE(bit_equal(generous.masters().at(name), value)) << name;
}

void norm_while_the_scale_grows(Trial& trial) {
  Session& session = trial.start(far_apart(), 1, {{"gradient_clipping", 1.0}, {"fp16", {{"loss_scale_window", 1}}}});
  ScalarAdam a, b;
  bool grew = false;
  for (int step = 0; step < 3; ++step) {
    const double scale = session.engine().loss_scale();
    const StepReport report = session.window({three_and_four(trial)});
    EXPECT_EQ(report.loss_scale, scale);
    EXPECT_NEAR(report.grad_norm, 5, kTol);
    session.expect_value("a", a.step(.6));
    session.expect_value("b", b.step(.8));
    grew = grew || session.engine().loss_scale() > scale;
  }
  EXPECT_TRUE(grew);
}

// DeepSpeed#1599, #3008, #3553: the scale fell at the first overflow, never recovered, or fell once a micro-batch.
void loss_scale_follows_its_rule(Trial& trial) {
  const std::vector<bool> overflows{false, false, false, true, true, false, true, false, false, false, true};
  const std::vector<double> plain{1024, 1024, 2048, 2048, 1024, 1024, 512, 512, 512, 1024, 1024};
  const std::vector<double> consecutive{1024, 1024, 2048, 2048, 1024, 1024, 1024, 1024, 1024, 2048, 2048};
  for (const bool is_consecutive : {false, true}) {
    const nlohmann::json fp16 = {
        {"loss_scale_window", 2}, {"hysteresis", 2}, {"consecutive_hysteresis", is_consecutive}};
    Session& session = trial.start(lin(4), 1, {{"fp16", fp16}});
    EXPECT_EQ(session.engine().loss_scale(), 1024);
    for (std::size_t i = 0; i < overflows.size(); ++i) {
      const StepReport report = session.window({pull(overflows[i] && trial.rank() == 0 ? kInf : 1)});
      EXPECT_EQ(report.reason, overflows[i] ? StepReason::kNonFinite : StepReason::kApplied) << "step " << i + 1;
      EXPECT_EQ(session.engine().loss_scale(), (is_consecutive ? consecutive : plain)[i])
          << "after step " << i + 1 << (is_consecutive ? ", consecutive" : "");
    }
  }
}

// DeepSpeed#4344, Lightning#11188: a skipped step moved the learning rate on.
void skipped_steps_leave_the_schedule(Trial& trial) {
  const Pull good = pull(trial.shared(1)), bad = pull(kInf);
  Session& by_hand = trial.start(lin(4));
  const auto step_by_hand = [&](const Pull& pulls) {
    by_hand.engine().set_lr({.01 * static_cast<double>(by_hand.engine().counters().applied_steps + 1)});
    return by_hand.window({pulls});
  };
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(step_by_hand(bad).applied);
  for (const double value : {-.005, -.015, -.03}) {
    EXPECT_TRUE(step_by_hand(good).applied);
    by_hand.expect_value("p", value);
  }

  const nlohmann::json schedule = {
      {"type", "WarmupLR"},
      {"params",
       {{"warmup_min_lr", .01}, {"warmup_max_lr", .11}, {"warmup_num_steps", 10}, {"warmup_type", "linear"}}}};
  Session& scheduled = trial.start(lin(4), 1, {{"scheduler", schedule}});
  const std::vector<double> first = scheduled.engine().lr();
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(scheduled.window({bad}).applied);
  EXPECT_EQ(scheduled.engine().lr(), first);
  double value = 0;
  for (int i = 0; i < 6; ++i) {
    const std::vector<double> lr = scheduled.engine().lr();
    EXPECT_EQ(scheduled.window({good}).lr, lr);
    scheduled.expect_value("p", value -= lr.at(0) / 2);
  }
  EXPECT_GT(scheduled.engine().lr().at(0), first.at(0));
}

// Masters hold what the compute dtype can't, and nothing steps before the first step().
void masters_in_full_precision(Trial& trial) {
  Session& session = trial.start(lin(4));
  for (const double value : {-.05, -.10, -.15}) {
    session.window({pull(trial.shared(1))});
    session.expect_value("p", value, 1e-7);
  }
  EXPECT_EQ(session.engine().counters().applied_steps, 3);
  session.expect_state("p", "exp_avg", .271);  // 1 - .9^3: three updates, no hidden one
}

}  // namespace

std::vector<Case> scaling_cases() {
  return {
      {15, "OverflowDropsTheWindowOnce", overflow_drops_the_window_once, kBothWindows, kEveryDType},
      {16,
       "InfinityWithoutALossScale",
       infinity_without_a_loss_scale,
       kBothWindows,
       {DType::kFloat32, DType::kBFloat16}},
      {17, "ClippingByTheGlobalNorm", clipping_by_the_global_norm, kBothWindows, kEveryDType},
      {17, "NormWhileTheScaleGrows", norm_while_the_scale_grows, kBothWindows, kFp16},
      {18, "LossScaleFollowsItsRule", loss_scale_follows_its_rule, kBothWindows, kFp16},
      {19, "SkippedStepsLeaveTheSchedule", skipped_steps_leave_the_schedule, kManaged, kFp16},
      {43, "MastersInFullPrecision", masters_in_full_precision, kBothWindows, kEveryDType},
  };
}

}  // namespace ballast::testing
