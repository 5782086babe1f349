// What the gradient of a window is: every contribution of every rank, each counted once and divided once.

#include "ballast/base/error.h"
#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

constexpr double kTol = 1e-6;

// DeepSpeed#6550, #7967: only the first or the last micro-batch arrived, or gradients of old windows stayed.
void every_micro_batch_counts(Trial& trial) {
  Session& session = trial.start(lin(4), 4);
  const double r = trial.rank() + 1;
  for (const double value : {-.0789474, -.1578947, -.2368421}) {
    const StepReport report = session.window({pull(r), pull(2 * r), pull(3 * r), pull(4 * r)});
    EXPECT_EQ(report.reason, StepReason::kApplied);
    EXPECT_NEAR(report.grad_norm, 7.5, kTol);
    EXPECT_EQ(report.micro_batches, 4);
    session.expect_value("p", value);
  }
}

// DeepSpeed#7981, open-instruct#1498: a window whose length the caller alone knows lost its early backwards.
void caller_owned_windows_of_any_length(Trial& trial) {
  const double r = trial.rank() + 1;
  const auto run = [&](Session& session, int backwards, double gradient, double value) {
    std::vector<Pull> pulls;
    for (int k = 0; k < backwards; ++k) pulls.push_back(pull((k + 1) * r));
    const StepReport report = session.window(pulls);
    EXPECT_NEAR(report.grad_norm, 2 * gradient, kTol) << backwards << " backwards";
    EXPECT_EQ(report.micro_batches, backwards);
    session.expect_value("p", value);
  };
  run(trial.start(lin(4)), 4, 15, -.09375);
  Session& session = trial.start(lin(4));
  run(session, 1, 1.5, -.06);
  run(session, 3, 9, -.133087);
  run(session, 2, 4.5, -.2072454);
}

// DeepSpeed#545, #861, #1273: a parameter used on one rank or in one micro-batch only hung or was divided wrongly.
void used_on_one_rank_in_one_micro_batch(Trial& trial) {
  Session& session = trial.start(lin({{"a", {4}}, {"b", {4}}}), 2);
  const StepReport report =
      trial.rank() == 0 ? session.window({{{"a", 1}, {"b", 8}}, {{"a", 1}}}) : session.window({{{"a", 1}}, {{"a", 1}}});
  EXPECT_NEAR(report.grad_norm, 4.472136, kTol);
  session.expect_value("a", -.05);
  session.expect_value("b", -.0666667);
}

// The same with a unit of its own; at stage 3 such units belong to a leaf.
void one_ranks_unit_in_one_micro_batch(Trial& trial) {
  const nlohmann::json leaf = {{"zero_optimization", {{"leaf_module", {{"names", {"experts"}}}}}}};
  Session& session = trial.start(lin({{"trunk.p", {5}}, {"experts.a.p", {4}}, {"experts.b.p", {4}}}), 2, leaf);
  for (const double b : {-.0666667, -.1333333}) {
    const Pull both{{"trunk.p", trial.shared(1)}, {"experts.a.p", 1}, {"experts.b.p", 8}};
    const Pull one{{"trunk.p", trial.shared(1)}, {"experts.a.p", 1}};
    const StepReport report = session.window({trial.rank() == 0 ? both : one, one});
    EXPECT_NEAR(report.grad_norm, 5, kTol);  // sqrt(5 * 1 + 4 * 1 + 4 * 2 * 2)
    session.expect_value("experts.b.p", b);
  }
  session.expect_value("trunk.p", -.10);
  session.expect_value("experts.a.p", -.10);
}

// torch.optim skips a parameter whose gradient is None: value, moments and step count stay.
void unused_in_a_window_is_skipped(Trial& trial) {
  Session& session = trial.start(lin({{"a", {4}}, {"b", {4}}}), 2);
  const Pull both{{"a", trial.shared(1)}, {"b", trial.shared(1)}}, other{{"b", trial.shared(1)}};
  session.window({both, both});
  session.expect_value("a", -.05);
  session.window({other, other});
  session.expect_value("a", -.05);
  session.expect_state("a", "exp_avg", .1);
  session.expect_state("a", "exp_avg_sq", .001);
  session.expect_value("b", -.10);
  session.window({both, both});
  session.expect_value("a", -.10);
  session.expect_value("b", -.15);
}

// DeepSpeed#1800, #2352, #8056: small contributions vanished in a bf16 accumulator that nobody had asked for.
void small_contributions_add_up(Trial& trial) {
  for (const bool asked_for_bf16 : {false, true}) {
    const nlohmann::json dtype = {{"data_types", {{"grad_accum_dtype", asked_for_bf16 ? "bf16" : "fp32"}}}};
    Session& session = trial.start(lin(4), 1, dtype);
    session.backward(pull(1));
    for (int k = 0; k < 256; ++k) session.backward(pull(std::ldexp(1.0, -9)));
    EXPECT_NEAR(session.step().grad_norm, asked_for_bf16 ? 2.0 : 3.0, kTol);
    session.expect_value("p", asked_for_bf16 ? -.05 : -.06);
  }
}

// accelerate#3533, transformers#45305, DeepSpeed#8245: the loss was divided twice, or not at all.
void divided_exactly_once(Trial& trial) {
  const Pull one = pull(trial.shared(1));
  Session& scaled = trial.start(lin(4), 4);
  EXPECT_NEAR(scaled.window({one, one, one, one}).grad_norm, 2, kTol);
  scaled.expect_value("p", -.05);

  Session& unscaled = trial.start(lin(4), 4);
  EXPECT_NEAR(unscaled.window({one, one, one, one}, {.scale_wrt_gas = false}).grad_norm, 8, kTol);
  unscaled.expect_value("p", -.08);

  Session& twice = trial.start(lin(4), 2);  // the model's output plus a part of it called directly
  const Pull through_both{{"p", trial.shared(1)}, {"p", 1}};
  EXPECT_NEAR(twice.window({through_both, through_both}).grad_norm, 4, kTol);
  twice.expect_value("p", -.0666667);
}

// transformers#34191: a mean of means isn't the mean over the tokens.
void token_mean_over_the_window(Trial& trial) {
  const double tokens = trial.rank() == 0 ? 1 : 3, gradient = trial.rank() == 0 ? 1 : 5;
  Session& by_weight = trial.start(lin(4), 2);
  const StepReport report = by_weight.window({pull(gradient), pull(gradient)}, {.weight = tokens});
  EXPECT_NEAR(report.grad_norm, 8, kTol);
  EXPECT_EQ(report.weight, 8);
  by_weight.expect_value("p", -.08);
  if (trial.cell().managed) return;
  Session& by_hand = trial.start(lin(4));
  const Pull share = pull(trial.world().size() * tokens * gradient / 8);
  EXPECT_NEAR(by_hand.window({share, share}).grad_norm, 8, kTol);
  by_hand.expect_value("p", -.08);
}

// DeepSpeed#8184: gradients were lost or counted twice with overlap, and a manual boundary corrupted the window.
void manual_boundary_is_refused(Trial& trial) {
  for (const bool overlap : {true, false}) {
    Session& session = trial.start(lin(4), 1, {{"zero_optimization", {{"overlap_comm", overlap}}}});
    session.backward(pull(trial.rank() == 0 ? 1 : 3));
    EXPECT_TRUE(session.engine().is_gradient_accumulation_boundary());
    EXPECT_THROW(session.engine().set_gradient_accumulation_boundary(false), UseError);
    EXPECT_THROW(session.engine().set_gradient_accumulation_boundary(true), UseError);
    EXPECT_NEAR(session.step().grad_norm, 4, kTol);
    session.expect_value("p", -.0666667);
  }
}

// pytorch#73784, #98494: what was collected under no_sync was lost or arrived unreduced.
void no_sync_keeps_its_contribution(Trial& trial) {
  const double first = 1 + 2 * trial.rank(), second = 2 + 2 * trial.rank();
  const auto check = [](Session& session) {
    EXPECT_NEAR(session.step().grad_norm, 5, kTol);
    session.expect_value("p", -.0714286);
  };
  Session& session = trial.start(lin(4), 2);
  {
    const auto guard = session.engine().no_sync();
    session.backward(pull(first));
    EXPECT_THROW(session.engine().step(), UseError);
  }
  if (trial.cell().managed) {
    EXPECT_EQ(session.step().reason, StepReason::kMidWindow);
  }
  session.backward(pull(second));
  check(session);

  Session& collected = trial.start(lin(4), 2);
  {
    const auto guard = collected.engine().coalesce_grad_reduction();
    collected.backward(pull(first - 1));
    collected.backward(pull(1));
  }
  if (trial.cell().managed) collected.step();
  collected.backward(pull(second));
  check(collected);
}

// transformers#22082, DeepSpeed#7439: an epoch that ends inside a window lost its last micro-batch or mixed it up.
void epoch_ends_inside_a_window(Trial& trial) {
  Session& session = trial.start(lin(4), 2);
  const auto mean = [&](double c) { return pull(trial.shared(c)); };
  EXPECT_NEAR(session.window({mean(1), mean(2)}).grad_norm, 3, kTol);
  session.expect_value("p", -.06);
  EXPECT_NEAR(session.window({mean(3), mean(4)}).grad_norm, 7, kTol);
  session.expect_value("p", -.1291199);
  EXPECT_NEAR(session.window({mean(5), mean(6)}).grad_norm, 11, kTol);
  session.expect_value("p", -.2039690);

  for (const bool after_its_last_backward : {false, true}) {
    Session& closing = trial.start(lin(4), 2);
    closing.backward(mean(5));
    if (after_its_last_backward) {
      EXPECT_EQ(closing.step().reason, StepReason::kMidWindow);
    }
    closing.engine().set_gradient_accumulation_boundary(true);
    const StepReport report = closing.step();
    EXPECT_NEAR(report.grad_norm, 10, kTol);
    EXPECT_EQ(report.micro_batches, 1);
    closing.expect_value("p", -.1 * 5 / 6);
  }
}

// Alternating parts of a model, each in a micro-batch of its own: a peer lost one part's gradient or gave it the
// other's.
void parts_in_different_micro_batches(Trial& trial) {
  for (const char* unit : {"", ".p"}) {  // in one unit, in two
    const std::string a = std::string("a") + unit, b = std::string("b") + unit;
    Session& session = trial.start(lin({{a, {4}}, {b, {4}}}), 2);
    const StepReport report = session.window({{{a, trial.shared(2)}}, {{b, trial.shared(4)}}});
    EXPECT_NEAR(report.grad_norm, 2 * std::sqrt(5.0), kTol);
    session.expect_value(a, -.05);
    session.expect_value(b, -.0666667);
  }
}

// The caller's own scaling holds for every kind of scalar loss.
void unscaled_for_every_kind_of_loss(Trial& trial) {
  const double c = trial.shared(1);
  const std::vector<std::function<at::Tensor(Session&)>> losses = {
      [&](Session& session) { return session.loss(pull(c)); },
      [&](Session& session) { return session.loss(pull(c)).reshape({1}); },
      [&](Session& session) { return session.loss(pull(c)).to(at::kFloat); },
      [&](Session& session) { return session.loss(pull(c)) * 1.0; },
      [&](Session& session) {
        return (session.model().parameter("p") * c).unbind()[0] +
               (session.model().parameter("p") * c).slice(0, 1).sum();
      },
  };
  for (const auto& loss : losses) {
    Session& session = trial.start(lin(4), 2);
    StepReport report;
    for (int k = 0; k < 2; ++k) {
      session.engine().backward(loss(session), {.scale_wrt_gas = false});
      if (trial.cell().managed || k == 1) report = session.step();
    }
    EXPECT_NEAR(report.grad_norm, 4, kTol);
    session.expect_value("p", -.0666667);
  }
}

// Heads that take turns: a part that rests keeps its value, moments and step count.
void alternating_heads(Trial& trial) {
  Session& session = trial.start(lin({{"trunk.p", {7}}, {"a.p", {3}}, {"b.p", {5}}}), 2);
  const auto turn = [&](const char* head, double c, double trunk, double a, double b) {
    const Pull uses{{"trunk.p", trial.shared(1)}, {head, trial.shared(c)}};
    session.window({uses, uses});
    session.expect_value("trunk.p", trunk);
    session.expect_value("a.p", a);
    session.expect_value("b.p", b);
  };
  turn("a.p", 1, -.05, -.05, 0);
  turn("b.p", 3, -.10, -.05, -.075);
  turn("a.p", 1, -.15, -.10, -.075);
}

// Ranks that ran different numbers of backwards hung, or paired one rank's backward with another's.
void unequal_backwards(Trial& trial) {
  Session& session = trial.start(lin(4));
  if (trial.rank() == 0) {
    session.backward(pull(3), {.weight = 1});
  } else {
    for (const double c : {1, 2, 6}) session.backward(pull(c), {.weight = 1});
  }
  const StepReport report = session.step();
  EXPECT_NEAR(report.grad_norm, 6, kTol);
  EXPECT_EQ(report.weight, 4);
  EXPECT_EQ(report.micro_batches, 3);
  session.expect_value("p", -.075);
}

}  // namespace

std::vector<Case> window_cases() {
  return {
      {1, "EveryMicroBatchCounts", every_micro_batch_counts, kBothWindows, kEveryDType},
      {2, "CallerOwnedWindowsOfAnyLength", caller_owned_windows_of_any_length, kCallerOwned, kEveryDType},
      {3, "UsedOnOneRankInOneMicroBatch", used_on_one_rank_in_one_micro_batch, kBothWindows, kEveryDType},
      {3, "OneRanksUnitInOneMicroBatch", one_ranks_unit_in_one_micro_batch},
      {3, "UnusedInAWindowIsSkipped", unused_in_a_window_is_skipped, kBothWindows, kEveryDType},
      {4, "SmallContributionsAddUp", small_contributions_add_up, kCallerOwned, {DType::kBFloat16}},
      {5, "DividedExactlyOnce", divided_exactly_once, kBothWindows, kEveryDType},
      {6, "TokenMeanOverTheWindow", token_mean_over_the_window, kBothWindows, kEveryDType},
      {7, "ManualBoundaryIsRefused", manual_boundary_is_refused, kCallerOwned, kEveryDType},
      {8, "NoSyncKeepsItsContribution", no_sync_keeps_its_contribution, kBothWindows, kEveryDType},
      {9, "EpochEndsInsideAWindow", epoch_ends_inside_a_window, kManaged, kEveryDType},
      {40, "PartsInDifferentMicroBatches", parts_in_different_micro_batches, kBothWindows, kEveryDType},
      {44, "UnscaledForEveryKindOfLoss", unscaled_for_every_kind_of_loss, kBothWindows, kEveryDType},
      {48, "AlternatingHeads", alternating_heads, kBothWindows, kEveryDType},
      {50, "UnequalBackwards", unequal_backwards, kCallerOwned, kFp32, {0, 1, 2}},
  };
}

}  // namespace ballast::testing
