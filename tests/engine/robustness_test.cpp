// What callers do that a tidy example doesn't: guards that outlive their engine, steps inside gathered(), backwards
// that break at different places on different ranks, parameters read after the engine failed.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

void in_every_stage(const std::function<void(Trial&)>& body) {
  for (const Cell& cell : cells(kEveryStage, kFp32, kCallerOwned)) run_trial(2, cell, body);
}

TEST(Guards, EndNothingAfterTheirEngine) {
  in_every_stage([](Trial& trial) {
    auto model = lin(4, 1);
    Session& session = trial.start(model);
    {
      auto local = session.engine().no_sync();
      const auto coalesced = session.engine().coalesce_grad_reduction();
      const auto gathered = session.engine().gathered({}, 0);
      session.engine().shutdown();
      EXPECT_NO_THROW(local.end());
    }
    expect_all(model->parameter("p"), 1, 0, "the module's p");
    trial.forget_sessions();
    trial.start(lin(1));
  });
}

// A coalescing guard that ends while a no_sync() lives leaves everything whole: held, by rank and element, 4 bytes.
TEST(Guards, CoalescingInsideNoSyncDoesNotReduce) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin(4096));
    const auto held = [&] { return session.engine().memory().cell(MemoryKind::kGrads, Tier::kDevice).now; };
    constexpr std::int64_t kWhole = 4096 * 4;
    auto outer = session.engine().no_sync();
    auto inner = session.engine().coalesce_grad_reduction();
    session.backward(pull(trial.shared(1)));
    inner.end();
    EXPECT_EQ(held(), kWhole);
    session.backward(pull(trial.shared(2)));
    EXPECT_EQ(held(), kWhole);
    outer.end();
    EXPECT_EQ(held(), kWhole) << "until the next backward or step";
    session.backward(pull(trial.shared(3)));
    if (trial.cell().stage >= 2) {
      EXPECT_EQ(held(), trial.cell().off_device() ? 0 : kWhole / 2);
    }
    EXPECT_NEAR(session.step().grad_norm, 6 * 64, 1e-3);
    session.expect_value("p", -.1 * 6 / 7);

    auto collected = session.engine().coalesce_grad_reduction();
    session.engine().no_sync().end();  // the other way round it is the outer guard that reduces
    session.backward(pull(trial.shared(1)));
    collected.end();
    if (trial.cell().stage >= 2) {
      EXPECT_EQ(held(), trial.cell().off_device() ? 0 : kWhole / 2);
    }
    EXPECT_TRUE(session.step().applied);
  });
}

// What one rank waits for is its own business: what is gathered ahead stays the same on all.
TEST(Synchronize, OnOneRankAloneChangesNothingForTheOthers) {
  for (const Placement placement : kEveryPlacement)
    for (const int first : {0, 1}) {
      run_trial(2, {3, placement, DType::kFloat32, false}, [&](Trial& trial) {
        const auto model = std::make_shared<Zoo>();
        Session& session = trial.start(model, 1, Zoo::leaf_settings());
        for (int step = 0; step < 5; ++step) {
          session.engine().backward(model->loss(sample(step, 0, trial.rank(), trial.world().device())));
          session.step();
          if (trial.rank() == (first + step) % 2) session.engine().synchronize();
          if (step % 2 == first) continue;
          const torch::NoGradGuard no_grad;
          model->backwards_through_blocks(sample(step, 1, 0, trial.world().device()));
        }
      });
    }
}

TEST(Engine, RefusesAModuleWithoutParameters) {
  for (const int stage : {0, 3})
    EXPECT_THROW(Engine(lin(std::vector<Named>{}), Config::from_json({{"zero_optimization", {{"stage", stage}}}}),
                        World::single(test_options())),
                 UseError);
}

TEST(Gathered, PointersStayGoodThroughAStep) {
  if (test_options().device != "cpu") GTEST_SKIP() << "reads device memory by pointer";
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {3}}}));
    session.backward({{"a.p", trial.shared(1)}, {"b.p", trial.shared(1)}});
    auto guard = session.engine().gathered({session.model().parameter("a.p")}, 1);
    const auto* const values = static_cast<const float*>(session.model().parameter("a.p").const_data_ptr());
    EXPECT_TRUE(session.step().applied);
    EXPECT_NEAR(values[4], -.05, 1e-6);
    session.engine().set_full_parameter("a.p", at::full({5}, 2, at::kFloat));
    EXPECT_EQ(values[4], 2);
    guard.end();
    session.expect_value("a.p", 2, 0);
    session.expect_value("b.p", -.05);
  });
}

// The writer's own write makes older graphs refuse; on the others nobody wrote, but the values are new there too.
TEST(Gathered, AGraphFromBeforeAWriteIsAnErrorOnEveryRank) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin({{"p", {4}, 1}}));
    const at::Tensor old = session.model().parameter("p").square().sum();
    {
      const auto guard = session.engine().gathered({}, 0);
      const at::NoGradGuard no_grad;
      if (trial.rank() == 0) session.model().parameter("p").fill_(3);
    }
    EXPECT_THROW(session.engine().backward(old), c10::Error);
    session.engine().backward(session.model().parameter("p").square().sum());
    session.expect_grad("p", 6, 0);
  });
}

/// Passes its input on; its backward throws.
struct Broken : torch::autograd::Function<Broken> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("broken on purpose");
  }
};

// c's unit is under way on both ranks when the exception comes, b's on rank 0 alone.
TEST(Backward, MayBreakAtAnotherPlaceOnEachRank) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {4}}, {"b.p", {4}}, {"c.p", {4}}}));
    at::Tensor loss = session.loss({{"a.p", 100}});
    if (trial.rank() == 0) loss = Broken::apply(loss);
    const at::Tensor b = session.loss({{"b.p", 100}});
    loss = loss + b;
    if (trial.rank() == 1) loss = Broken::apply(loss);
    const at::Tensor c = session.loss({{"c.p", 100}});
    EXPECT_THROW(session.engine().backward(loss + c), std::exception);
    session.engine().zero_grad();
    const Pull pull{{"a.p", trial.shared(1)}, {"b.p", trial.shared(3)}, {"c.p", trial.shared(9)}};
    EXPECT_TRUE(session.window({pull}).applied);
    session.expect_value("a.p", -.05);
    session.expect_value("b.p", -.075);
    session.expect_value("c.p", -.09);
  });
}

/// Passes its input on; its backward ends as a reduction does whose peer is gone.
struct Cut : torch::autograd::Function<Cut> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw CommError("comm.all_to_all", "cut on purpose");
  }
};

// From a hook, when one unit's gradient is in and another's isn't. Also in a plain backward.
TEST(Backward, LetsNobodyEndOrChangeItsWindowMeanwhile) {
  for (const Cell& cell : cells(kEveryStage, kFp32, kCallerOwned))
    for (const bool plain : {false, true})
      run_trial(2, cell, [plain](Trial& trial) {
        Session& session = trial.start(lin({{"a.p", {3}}, {"b.p", {5}}}));
        Engine& engine = session.engine();
        int refused = 0;
        const auto in_hook = [&](const at::Tensor& gradient) {
          const std::function<void()> calls[] = {[&] { engine.step(); },
                                                 [&] { engine.zero_grad(); },
                                                 [&] { engine.shutdown(); },
                                                 [&] { engine.save_checkpoint(trial.folder()); },
                                                 [&] { engine.load_checkpoint(trial.folder()); },
                                                 [&] { engine.offload_states(); },
                                                 [&] { engine.set_full_grad("a.p", at::zeros({3})); },
                                                 [&] { engine.set_full_parameter("a.p", at::zeros({3})); },
                                                 [&] { engine.backward(at::ones({}).requires_grad_()); }};
          for (const auto& call : calls) try {
              call();
              ADD_FAILURE() << "call " << refused << " went through";
            } catch (const UseError& e) {
              ++refused;
            }
          return gradient;
        };
        at::Tensor middle;
        {
          const at::Tensor x = (session.model().parameter("b.p") * trial.shared(2)).sum();
          middle = x * 1;
          middle.register_hook(in_hook);
        }
        const at::Tensor loss = middle + (session.model().parameter("a.p") * trial.shared(1)).sum() * 1;
        plain ? loss.backward() : engine.backward(loss);
        EXPECT_EQ(refused, 9);
        EXPECT_EQ(engine.step().micro_batches, 1);
        session.expect_value("a.p", -.05);
        session.expect_value("b.p", -.1 * 2 / 3);
        EXPECT_TRUE(trial.folder().names().empty());
      });
}

TEST(Backward, TakesNoComplexLoss) {
  run_trial(1, {0, Placement::kDevice, DType::kFloat32, false}, [](Trial& trial) {
    Session& session = trial.start(lin(4));
    const at::Tensor loss = (session.model().parameter("p") * c10::complex<double>(0, 1)).sum();
    EXPECT_THROW(session.engine().backward(loss), UseError);
    session.backward(pull(1));
    session.expect_grad("p", 1);
  });
}

TEST(Failure, OfACollectiveInABackwardIsFinal) {
  in_every_stage([](Trial& trial) {
    Board unused(2);
    auto model = lin({{"a.p", {4}}, {"b.p", {4}}});
    Session session(model, settings(trial.cell()), trial.world(), unused);
    Engine& engine = session.engine();
    const auto expect_cut = [](const char* call, auto&& made) {
      try {
        made();
        ADD_FAILURE() << call << " went on";
      } catch (const CommError& e) {
        EXPECT_STREQ(e.what(), "[comm.all_to_all] cut on purpose") << call;
      }
    };
    const at::Tensor cut = Cut::apply(session.loss({{"a.p", 1}}));
    const at::Tensor loss = cut + session.loss({{"b.p", 1}});  // b's gradient arrives first
    const at::Tensor next = session.loss({{"b.p", 1}});
    expect_cut("backward", [&] { engine.backward(loss); });
    expect_cut("the next backward", [&] { engine.backward(next); });
    expect_cut("step", [&] { engine.step(); });
    expect_cut("zero_grad", [&] { engine.zero_grad(); });
    expect_cut("full_parameter", [&] { engine.full_parameter("a.p"); });
    expect_cut("no_sync", [&] { engine.no_sync().end(); });
    trial.start(lin(1));
  });
}

TEST(Failure, LeavesParametersThatThrowWhereTheirValuesAreGone) {
  for (const Cell& cell : cells({3}, kFp32, kCallerOwned))
    run_trial(2, cell, [](Trial& trial) {
      Board unused(2);
      auto model = lin({{"a.p", {4}, 1}, {"b.p", {4}, 1}});
      {
        Session session(model, settings(trial.cell()), trial.world(), unused);
        const std::string touched = trial.rank() == 0 ? "a.p" : "b.p";
        EXPECT_THROW(
            {
              session.loss({{touched, 1}});
              session.step();
            },
            std::exception);
      }
      for (const char* name : {"a.p", "b.p"}) {
        try {
          (void)model->parameter(name).sum().item<float>();
          ADD_FAILURE() << name << " was read";
        } catch (const std::exception& e) {
          EXPECT_NE(std::string(e.what()).find("the engine ended"), std::string::npos) << e.what();
        }
      }
      trial.start(lin(1));
    });
}

// Otherwise step() reports an update that the module never sees.
TEST(Module, ThatIsNoLongerTheEnginesIsRefused) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {4}}, {"frozen", {3}, 1, false}}));
    session.backward({{"a.p", trial.shared(1)}});
    session.model().parameter("frozen").requires_grad_(true);
    EXPECT_THROW(session.step(), UseError);
    session.model().parameter("frozen").requires_grad_(false);
    EXPECT_TRUE(session.step().applied);  // the refusal changed nothing
    session.expect_value("a.p", -.05);
    session.model().to(at::kDouble);
    session.model().to(at::kFloat);
    EXPECT_THROW(session.step(), UseError);
    trial.forget_sessions();
    trial.start(lin(1));
  });
}

TEST(LearningRate, ThatDiffersBetweenRanksIsAnErrorOnAll) {
  in_every_stage([](Trial& trial) {
    Board unused(2);
    Session session(lin(4), settings(trial.cell()), trial.world(), unused);
    session.engine().set_lr({.25 + trial.rank()});
    session.backward(pull(1));
    for (int call = 0; call < 2; ++call) {
      try {
        session.engine().step();
        ADD_FAILURE() << "ranks stepped with different learning rates";
      } catch (const CommError& e) {
        EXPECT_NE(std::string(e.what()).find("rank 0: [0.25], rank 1: [1.25]"), std::string::npos) << e.what();
      }
    }
    trial.start(lin(1));
  });
}

TEST(LearningRate, MayDifferUntilTheWindowEnds) {
  for (const Cell& cell : cells(kEveryStage, kFp32, kManaged))
    run_trial(2, cell, [](Trial& trial) {
      Session& session = trial.start(lin(4), 2);
      session.engine().set_lr({.25 + trial.rank()});
      session.backward(pull(trial.shared(1)));
      EXPECT_EQ(session.engine().step().reason, StepReason::kMidWindow);
      session.engine().set_lr({.2});
      session.backward(pull(trial.shared(1)));
      EXPECT_TRUE(session.step().applied);
      session.expect_value("p", -.1);
    });
}

TEST(LearningRate, MustBeAFiniteNumber) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin(4));
    for (const double rate : {-1., std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
      EXPECT_THROW(session.engine().set_lr({rate}), UseError);
    session.window({pull(trial.shared(1))});
    session.expect_value("p", -.05);
  });
}

}  // namespace
}  // namespace ballast::testing
