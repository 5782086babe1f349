// In-place writes to the module's parameters outside of gathered(params, writer): kept where the parameter is the only
// copy, refused where the next values would come from another one (a shard, fp32 masters).

#include "ballast/base/error.h"
#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

void in_every_cell(const std::function<void(Trial&)>& body) {
  for (const Cell& cell : cells(kEveryStage, kEveryDType, kCallerOwned)) run_trial(2, cell, body);
}

bool would_be_lost(const Cell& cell) { return cell.stage == 3 || cell.off_device() || cell.dtype != DType::kFloat32; }

void where_it_would_be_lost(const std::function<void(Trial&)>& body) {
  for (const Cell& cell : cells(kEveryStage, kEveryDType, kCallerOwned))
    if (would_be_lost(cell)) run_trial(2, cell, body);
}

void write(const at::Tensor& parameter, double value) {
  const torch::NoGradGuard no_grad;
  parameter.fill_(value);
}

template <class Call>
void expect_refusal(const std::string& name, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "a write to " << name << " that would be lost was accepted";
  } catch (const UseError& e) {
    EXPECT_NE(std::string(e.what()).find("(parameter " + name + ","), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("gathered(params, writer)"), std::string::npos) << e.what();
  }
}

TEST(LostWrites, StepRefusesAWriteThatItWouldUndo) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {3}}}));
    session.window({{{"a.p", trial.shared(1)}, {"b.p", trial.shared(1)}}});
    session.backward({{"a.p", trial.shared(1)}});
    write(session.model().parameter("b.p"), 2);
    if (would_be_lost(trial.cell())) {
      for (int twice = 0; twice < 2; ++twice) expect_refusal("b.p", [&] { session.engine().step(); });
      session.engine().gathered({session.model().parameter("b.p")}, 0).end();  // takes it over
    }
    EXPECT_TRUE(session.step().applied);
    session.expect_value("b.p", 2, 0);
    session.expect_value("a.p", -.1, 1e-3);
    session.window({{{"b.p", trial.shared(1)}}});
    EXPECT_LT(session.engine().full_parameter("b.p").max().item<double>(), 2);
  });
}

// Nothing of the engine's own doing counts as somebody's write.
TEST(LostWrites, TheEnginesOwnWritesAreNone) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {3}}, {"frozen", {2}, 1, false}}));
    for (int step = 0; step < 3; ++step) {
      session.window({{{"a.p", trial.shared(1)}}, {{"a.p", trial.shared(1)}, {"b.p", trial.shared(1)}}});
      session.engine().set_full_parameter("a.p", at::full({5}, 2., at::kFloat));
      session.engine().set_full_parameter("frozen", at::full({2}, 3. + step, at::kFloat));
      session.engine().gathered({}, 1).end();
      (void)session.model().parameter("a.p").detach().clone();
      session.engine().gathered().end();
    }
    session.expect_value("frozen", 5, 0);
    session.expect_value("a.p", 2, 0);
  });
}

// Operators on p.data() don't count in p's version; what faults parameters in sees them. Reading is no write.
TEST(LostWrites, WritesPastTheVersionCounterAreSeenWhereParametersAreSharded) {
  for (const Cell& cell : cells({3}, kEveryDType, kCallerOwned))
    run_trial(2, cell, [](Trial& trial) {
      Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {3}}, {"b.q", {2}}, {"frozen", {2}, 1, false}}));
      const auto data = [&](const char* name) { return session.model().parameter(name).data(); };
      session.backward({{"a.p", trial.shared(1)}});
      EXPECT_EQ(data("b.q").sum().item<double>(), 0);
      data("b.q").unsqueeze_(0).squeeze_(0);  // of the view, not of what it shows
      EXPECT_TRUE(session.step().applied);
      for (const char* name : {"a.p", "b.q", "frozen"}) {
        data(name).fill_(2);
        expect_refusal(name, [&] { session.engine().step(); });
        session.engine().gathered({session.model().parameter(name)}, 1).end();
        session.expect_value(name, 2, 0);
      }
      at::add_out(*std::make_unique<at::Tensor>(data("b.p")), data("b.p"), data("b.p"), 1);
      expect_refusal("b.p", [&] { session.engine().step(); });
      session.engine().gathered({session.model().parameter("b.p")}, 1).end();
      EXPECT_EQ(session.step().reason, StepReason::kEmptyWindow);
    });
}

TEST(LostWrites, SetFullParameterRefusesToHideOne) {
  where_it_would_be_lost([](Trial& trial) {
    for (const char* name : {"a", "far"}) {  // itself, and another of its unit
      Session& session = trial.start(lin({{"a", {5}}, {"far", {4099}}}));
      if (trial.rank() == 1 || trial.cell().stage == 3) write(session.model().parameter(name), 2);
      expect_refusal(name, [&] { session.engine().set_full_parameter("a", at::full({5}, 3., at::kFloat)); });
      session.engine().gathered({session.model().parameter(name)}, 1).end();
      session.engine().set_full_parameter("a", at::full({5}, 3., at::kFloat));
      session.expect_value("a", 3, 0);
      session.expect_value("far", std::string(name) == "far" ? 2 : 0, 0);
    }
  });
}

TEST(LostWrites, GatheredTakesOverWhatItNamesAndRefusesTheRest) {
  where_it_would_be_lost([](Trial& trial) {
    Session& session = trial.start(lin({{"b.p", {4099}}, {"b.q", {3}}, {"c.p", {2}, 1, false}}));
    auto guard = session.engine().gathered({session.model().parameter("b.p")}, 1);
    if (trial.rank() == 1) {
      write(session.model().parameter("b.p"), 4);
      write(session.model().parameter("b.q"), 2);
    }
    expect_refusal("b.q", [&] { guard.end(); });  // on both ranks
    session.expect_value("b.p", 4, 0);
    session.expect_value("b.q", 0, 0);
    session.engine().gathered({session.model().parameter("b.q")}, 1).end();
    session.expect_value("b.q", 2, 0);
    session.window({{{"b.p", trial.shared(1)}, {"b.q", trial.shared(1)}}});
    session.expect_value("b.p", 3.95);
    session.expect_value("b.q", 1.95);
  });
}

// Half of the states lie on the device, where fp32 parameters are their own masters.
TEST(LostWrites, OfTwoUnitsOnlyThatIsWatchedWhoseMastersAreElsewhere) {
  for (const Placement placement : {Placement::kHost, Placement::kNvme, Placement::kAllNvme})
    for (const int stage : {0, 1, 2})
      run_trial(2, {stage, placement, DType::kFloat32, false}, [](Trial& trial) {
        const nlohmann::json half = {{"zero_optimization", {{"offload_optimizer", {{"ratio", .5}}}}}};
        Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {5}}}), 1, half);
        session.window({{{"a.p", trial.shared(1)}, {"b.p", trial.shared(1)}}});
        write(session.model().parameter("a.p"), 2);
        session.window({{{"a.p", trial.shared(1)}, {"b.p", trial.shared(1)}}});
        session.expect_value("a.p", 1.95);
        session.expect_value("b.p", -.1);
        write(session.model().parameter("b.p"), 2);
        expect_refusal("b.p", [&] { session.engine().step(); });
        session.engine().gathered({session.model().parameter("b.p")}, 0).end();
        session.expect_value("b.p", 2, 0);
      });
}

TEST(LostWrites, SettingAFrozenParameterMakesOlderGraphsRefuse) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"p", {2}}, {"frozen", {2}, 1, false}}));
    const auto product = [&] { return (session.model().parameter("p") * session.model().parameter("frozen")).sum(); };
    const at::Tensor old = product();
    session.engine().set_full_parameter("frozen", at::full({2}, 3., at::kFloat));
    EXPECT_THROW(session.engine().backward(old), c10::Error);
    session.engine().backward(product());
    session.expect_grad("p", 3, 0);
  });
}

}  // namespace
}  // namespace ballast::testing
