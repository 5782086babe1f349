// Full gradients, parameters and optimizer states by name, and gathered(): read and written between calls, in every
// stage, placement and dtype.

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

template <class Storage>
constexpr bool kCanDisarm = requires(Storage& s) {
  s.clear_data_ptr_access_error_msg_();
};

void in_every_cell(const std::function<void(Trial&)>& body, const std::vector<DType>& dtypes = kEveryDType) {
  for (const Cell& cell : cells(kEveryStage, dtypes, kCallerOwned)) run_trial(2, cell, body);
}

// Values that no dtype but fp32 holds.
at::Tensor thirds(at::IntArrayRef shape, double start) {
  std::int64_t numel = 1;
  for (std::int64_t size : shape) numel *= size;
  return ((at::arange(numel, at::kFloat) + start) / 3).reshape(shape);
}

TEST(Access, ParametersAreTheMastersAndReachTheModule) {
  in_every_cell([](Trial& trial) {
    Session& session =
        trial.start(lin({{"a", {3, 5}}, {"far", {4099}}, {"b", {}}, {"none", {0}}, {"frozen", {7}, 1, false}}));
    for (const char* name : {"a", "far", "b", "none", "frozen"}) {
      const at::Tensor value = thirds(session.model().parameter(name).sizes(), 1);
      session.engine().set_full_parameter(name, value);
      const at::Tensor compute = session.model().parameter(name).detach().clone().cpu();
      EXPECT_TRUE(bit_equal(compute, value.to(compute.scalar_type()))) << name;
      const at::Tensor read = session.engine().full_parameter(name).cpu();
      EXPECT_TRUE(bit_equal(read, std::string(name) == "frozen" ? compute.to(at::kFloat) : value)) << name;
    }
    session.window({{{"a", trial.shared(1)}}});
    EXPECT_TRUE(at::allclose(session.engine().full_parameter("a").cpu(), thirds({3, 5}, 1) - .05, 0, 1e-6));
    EXPECT_TRUE(bit_equal(session.engine().full_parameter("far").cpu(), thirds({4099}, 1)));
  });
}

TEST(Access, WhatIsReadIsACopy) {
  in_every_cell(
      [](Trial& trial) {
        Session& session = trial.start(lin(4));
        session.backward(pull(2));
        session.engine().full_grad("p").zero_();
        session.expect_grad("p", 2);
        session.step();
        session.engine().full_parameter("p").zero_();
        session.engine().full_optimizer_state("p", "exp_avg").zero_();
        session.expect_value("p", -.0666667);
        session.expect_state("p", "exp_avg", .2);
      },
      kFp32);
}

TEST(Access, OptimizerStatesAreReadAndWritten) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"a", {5}}, {"far", {4099}}}));
    const at::Tensor m = thirds({4099}, 0), v = thirds({4099}, 1);
    session.engine().set_full_optimizer_state("far", "exp_avg", m);
    session.engine().set_full_optimizer_state("far", "exp_avg_sq", v);
    EXPECT_TRUE(bit_equal(session.engine().full_optimizer_state("far", "exp_avg").cpu(), m));
    EXPECT_TRUE(bit_equal(session.engine().full_optimizer_state("far", "exp_avg_sq").cpu(), v));
    session.expect_state("a", "exp_avg", 0, 0);
    session.window({{{"a", trial.shared(1)}, {"far", trial.shared(2)}}});
    // The first step of Adam from moments m and v.
    const at::Tensor mean = (m.to(at::kDouble) * .9 + .2) / .1;
    const at::Tensor root = ((v.to(at::kDouble) * .999 + .004) / .001).sqrt();
    const at::Tensor want = -.1 * mean / (root + 1);
    const at::Tensor got = session.engine().full_parameter("far").cpu().to(at::kDouble);
    EXPECT_LE((got - want).abs().max().item<double>(), 1e-5);
    session.expect_value("a", -.05);
  });
}

TEST(Access, GradientsAreWhatTheWindowHasSoFar) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {3}}, {"b.q", {2}}}));
    EXPECT_FALSE(session.engine().full_grad("a.p").defined());
    session.backward({{"a.p", trial.shared(1)}, {"b.p", trial.shared(3)}});
    session.expect_grad("a.p", 1, 0);
    session.expect_grad("b.p", 3, 0);
    EXPECT_FALSE(session.engine().full_grad("b.q").defined()) << "its unit has a gradient, it has none";
    {
      const auto guard = session.engine().no_sync();
      session.backward({{"a.p", trial.shared(4)}});
      session.expect_grad("a.p", 5, 0);  // one part landed or not, by stage, and one held
    }
    session.backward({{"a.p", trial.shared(2)}});
    session.expect_grad("a.p", 7, 0);
    EXPECT_NEAR(session.step().grad_norm, std::sqrt(5 * 49. + 3 * 9.), 1e-5);
    EXPECT_FALSE(session.engine().full_grad("a.p").defined());
  });
}

TEST(Access, GradientsByWeightAreDividedByTheWeightsSoFar) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin(4));
    const double weight = 1 + trial.rank();
    session.backward(pull(3 * trial.rank()), {.weight = weight});  // (1 * 0 + 2 * 3) / 3
    session.expect_grad("p", 2);
    session.backward(pull(9), {.weight = weight});  // (6 + 3 * 9) / 6
    session.expect_grad("p", 5.5);
    EXPECT_NEAR(session.step().grad_norm, 11, 1e-5);
  });
}

TEST(Access, WrittenGradientsReplaceAndAreAddedTo) {
  in_every_cell([](Trial& trial) {
    for (const bool held : {false, true}) {
      Session& session = trial.start(lin({{"a", {5}}, {"far", {4099}}, {"b", {3}}}));
      {
        std::optional<ScopeGuard> guard;
        if (held) guard.emplace(session.engine().no_sync());
        session.backward({{"a", trial.shared(1)}, {"far", trial.shared(7)}});
      }
      session.engine().set_full_grad("far", at::full({4099}, 3., at::kFloat));
      session.engine().set_full_grad("b", at::full({3}, 2., at::kFloat));  // nobody had one
      session.expect_grad("far", 3);
      session.expect_grad("b", 2);
      session.expect_grad("a", 1);
      session.backward({{"far", trial.shared(2)}});
      session.expect_grad("far", 5);
      EXPECT_TRUE(session.step().applied);
      session.expect_value("a", -.05);
      session.expect_value("far", -.1 * 5 / 6);
      session.expect_value("b", -.0666667);
    }
  });
}

TEST(Access, AWindowOfWrittenGradientsAlone) {
  in_every_cell(
      [](Trial& trial) {
        Session& session = trial.start(lin(4));
        session.engine().set_full_grad("p", at::full({4}, 3., at::kFloat));
        EXPECT_TRUE(session.step().applied);
        session.expect_value("p", -.075);
        session.engine().set_full_grad("p", at::full({4}, 3., at::kFloat));
        session.engine().zero_grad();
        EXPECT_EQ(session.step().reason, StepReason::kEmptyWindow);
      },
      kFp32);
}

TEST(Access, EveryNameOfATiedParameterWorks) {
  in_every_cell(
      [](Trial& trial) {
        auto model = lin({{"first.table", {3, 2}}});
        model->tie("first.table", "second.table");
        Session& session = trial.start(model);
        session.engine().set_full_parameter("second.table", thirds({3, 2}, 1));
        EXPECT_TRUE(bit_equal(session.engine().full_parameter("first.table").cpu(), thirds({3, 2}, 1)));
        session.backward({{"second.table", trial.shared(1)}});
        session.expect_grad("first.table", 1);
        session.expect_grad("second.table", 1);
      },
      kFp32);
}

TEST(Access, WrongUseChangesNothing) {
  in_every_cell(
      [](Trial& trial) {
        Session& session = trial.start(lin({{"weight", {4}}, {"frozen", {4}, 1, false}}));
        Engine& engine = session.engine();
        session.backward({{"weight", trial.shared(1)}});
        const at::Tensor four = at::ones({4}, at::kFloat), five = at::ones({5}, at::kFloat);
        EXPECT_THROW(engine.full_parameter("wieght"), UseError);
        EXPECT_THROW(engine.full_grad("wieght"), UseError);
        EXPECT_THROW(engine.full_grad("frozen"), UseError);
        EXPECT_THROW(engine.set_full_grad("frozen", four), UseError);
        EXPECT_THROW(engine.full_optimizer_state("frozen", "exp_avg"), UseError);
        EXPECT_THROW(engine.full_optimizer_state("weight", "momentum_buffer"), UseError);
        EXPECT_THROW(engine.set_full_optimizer_state("weight", "momentum_buffer", four), UseError);
        EXPECT_THROW(engine.set_full_optimizer_state("weight", "", four), UseError);
        EXPECT_THROW(engine.set_full_parameter("weight", five), UseError);
        EXPECT_THROW(engine.set_full_parameter("weight", at::Tensor()), UseError);
        EXPECT_THROW(engine.set_full_grad("weight", five), UseError);
        EXPECT_THROW(engine.set_full_optimizer_state("weight", "exp_avg", five), UseError);
        EXPECT_THROW(engine.gathered({four}), UseError);
        EXPECT_THROW(engine.gathered({}, 2), UseError);
        EXPECT_THROW(engine.gathered({}, -1), UseError);
        session.expect_grad("weight", 1);
        EXPECT_TRUE(session.step().applied);
        session.expect_value("weight", -.05);
      },
      kFp32);
}

// What lies where the tensor's pointer says, on the CPU. No operator sees the tensor itself.
std::vector<float> floats(const at::Tensor& tensor) {
  const at::Tensor there =
      at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.options().requires_grad(false));
  const at::Tensor here = there.flatten().cpu();
  return {here.const_data_ptr<float>(), here.const_data_ptr<float>() + here.numel()};
}

TEST(Gathered, ValuesAreReadableByPointer) {
  in_every_cell(
      [](Trial& trial) {
        Session& session = trial.start(lin({{"a.p", {5}, 1}, {"b.p", {3}, 2}}));
        {
          const auto guard = session.engine().gathered({session.model().parameter("b.p")});
          EXPECT_EQ(floats(session.model().parameter("b.p"))[2], 2);
        }
        session.window({{{"a.p", trial.shared(1)}, {"b.p", trial.shared(1)}}});
        const auto guard = session.engine().gathered();
        EXPECT_NEAR(floats(session.model().parameter("a.p"))[4], .95, 1e-6);
        EXPECT_NEAR(floats(session.model().parameter("b.p"))[0], 1.95, 1e-6);
      },
      kFp32);
}

TEST(Gathered, TheWritersValuesBecomeEverybodys) {
  in_every_cell([](Trial& trial) {
    for (const int writer : {0, 1}) {
      Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {4099}}, {"b.q", {3}}, {"c.p", {2}, 1, false}}));
      session.window({{{"a.p", trial.shared(1)}, {"b.p", trial.shared(1)}, {"b.q", trial.shared(1)}}});
      {
        const torch::NoGradGuard no_grad;
        const auto guard =
            session.engine().gathered({session.model().parameter("b.p"), session.model().parameter("c.p")}, writer);
        session.model().parameter("b.p").fill_(trial.rank() + 4);  // exact in every dtype
        session.model().parameter("c.p").fill_(trial.rank() + 6);
      }
      const double written = writer + 4;
      session.expect_value("b.p", written, 0);
      session.expect_value("c.p", writer + 6, 0);
      expect_all(session.model().parameter("b.p").detach().clone(), written, 0, "the module's b.p");
      session.expect_value("a.p", -.05);
      session.expect_value("b.q", -.05);  // the same unit, not named
      session.expect_state("b.p", "exp_avg", .1);
      session.window({{{"b.p", trial.shared(1)}}});
      session.expect_value("b.p", written - .05);
    }
  });
}

// The order in which a rank names them is its own, as that of a set is.
TEST(Gathered, ParametersAreTheSameInAnyOrder) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin({{"a", {5}}, {"b", {5}}, {"c", {5}}}));
    std::vector<at::Tensor> list{session.model().parameter("a"), session.model().parameter("c"),
                                 session.model().parameter("b")};
    if (trial.rank() == 1) std::reverse(list.begin(), list.end());
    list.push_back(list.front());
    {
      const auto guard = session.engine().gathered(list, 0);
      const at::NoGradGuard no_grad;
      if (trial.rank() == 0)
        for (const auto& [name, value] : {std::pair("a", 1), {"b", 2}, {"c", 3}})
          session.model().parameter(name).fill_(value);
    }
    for (const auto& [name, value] : {std::pair("a", 1), {"b", 2}, {"c", 3}}) {
      session.expect_value(name, value, 0);
      expect_all(session.model().parameter(name).detach().clone(), value, 0, name);
    }
  });
}

TEST(Access, RanksThatAskForDifferentThingsAreToldSo) {
  for (const Cell& cell : cells(kEveryStage, kFp32, kCallerOwned))
    run_trial(2, cell, [](Trial& trial) {
      Session& session = trial.start(lin({{"unit.a", {5}}, {"unit.b", {5}, 2}}));  // of one unit
      Engine& engine = session.engine();
      const bool first = trial.rank() == 0;
      const std::string mine = first ? "unit.a" : "unit.b";
      EXPECT_THROW(engine.full_parameter(mine), UseError);
      EXPECT_THROW(engine.set_full_parameter(mine, at::zeros({5})), UseError);
      EXPECT_THROW(engine.full_optimizer_state("unit.a", first ? "exp_avg" : "exp_avg_sq"), UseError);
      EXPECT_THROW(first ? engine.full_grad("unit.a") : engine.full_parameter("unit.a"), UseError);
      EXPECT_THROW(engine.gathered({session.model().parameter(mine)}), UseError);
      EXPECT_THROW(engine.gathered({session.model().parameter("unit.a")}, trial.rank()), UseError);
      session.expect_value("unit.a", 0);
      session.expect_value("unit.b", 2);
      session.window({{{"unit.a", trial.shared(1)}}});
      session.expect_value("unit.a", -.05);
    });
}

TEST(Access, AGivenGradientCountsAsABackwardWithoutAWeight) {
  in_every_cell([](Trial& trial) {
    Session& session = trial.start(lin(4));
    session.engine().set_full_grad("p", at::full({4}, 2, at::kFloat));
    try {
      session.backward(pull(0), {.weight = 2});
      ADD_FAILURE() << "a weight behind it would divide what was given";
    } catch (const UseError& e) {
      EXPECT_NE(std::string(e.what()).find("gradients set by name"), std::string::npos) << e.what();
    }
    session.expect_grad("p", 2);
    session.backward(pull(trial.shared(1)));
    session.expect_grad("p", 3);
    EXPECT_TRUE(session.engine().step().applied);
    session.backward(pull(trial.shared(1)), {.weight = 2});  // the next window is another
    session.expect_grad("p", 1);
    session.engine().zero_grad();
  });
}

// A rank without a backward takes the others' word for how the window is normalised.
TEST(Access, AGivenGradientJoinsAnotherRanksWeights) {
  for (const Cell& cell : cells({0, 1, 2}, kFp32, kCallerOwned))
    run_trial(2, cell, [](Trial& trial) {
      Session& session = trial.start(lin(4));
      if (trial.rank() == 0) session.backward(pull(3), {.weight = 2});
      session.engine().set_full_grad("p", at::full({4}, 2, at::kFloat));
      session.expect_grad("p", 2);
      session.backward(pull(5), {.weight = 1});
      session.expect_grad("p", (2 * 2 + 5 + 5) / 4.);
      EXPECT_TRUE(session.engine().step().applied);
    });
}

TEST(Gathered, EndSaysWhatTheGuardWould) {
  in_every_cell(
      [](Trial& trial) {
        Session& session = trial.start(lin(4));
        auto guard = session.engine().gathered({}, 0);
        {
          const torch::NoGradGuard no_grad;
          session.model().parameter("p").fill_(2);
        }
        guard.end();
        guard.end();  // once is enough
        session.expect_value("p", 2, 0);
      },
      kFp32);
}

// What a storage that is not there answers to code that doesn't go through an operator.
TEST(Gathered, OutsideOfItAShardedParameterHasNoPointer) {
  if constexpr (!kCanDisarm<c10::StorageImpl>) {
    GTEST_SKIP() << "this LibTorch can't take such an error back, so reads are undefined there";
  }
  run_trial(2, {3, Placement::kDevice, DType::kFloat32, false}, [](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {3}}}));
    try {
      (void)session.model().parameter("a.p").const_data_ptr();
      ADD_FAILURE() << "an unmapped storage was read";
    } catch (const std::exception& e) {
      EXPECT_NE(std::string(e.what()).find("gathered"), std::string::npos) << e.what();
    }
    session.window({{{"a.p", trial.shared(1)}}});
    session.expect_value("a.p", -.05);
  });
}

// Those below the threshold stay in memory, so a read gives their values: before the first step, and behind each.
TEST(Gathered, OutsideOfItAPersistentParameterHasOne) {
  run_trial(2, {3, Placement::kDevice, DType::kFloat32, false}, [](Trial& trial) {
    nlohmann::json small_stay = settings(trial.cell());
    small_stay["zero_optimization"]["stage3_param_persistence_threshold"] = 10;
    Session& session = trial.start(lin({{"a.p", {5}}, {"b.p", {30}}}), small_stay);
    const at::Tensor small = session.model().parameter("a.p");
    EXPECT_EQ(floats(small)[4], 0);
    session.window({{{"a.p", trial.shared(1)}}});
    EXPECT_NEAR(floats(small)[4], -.05, 1e-6);
    if constexpr (kCanDisarm<c10::StorageImpl>) {
      EXPECT_THROW((void)session.model().parameter("b.p").const_data_ptr(), c10::Error);
    }
  });
}

TEST(Gathered, AWriteOutsideOfItIsAnErrorAtStage3) {
  run_trial(2, {3, Placement::kDevice, DType::kFloat32, false}, [](Trial& trial) {
    Board unused(2);
    Session session(lin({{"a.p", {5}}, {"b.p", {3}}}), settings(trial.cell()), trial.world(), unused);
    {
      const torch::NoGradGuard no_grad;
      session.model().parameter("a.p").fill_(1);
    }
    session.backward({{"a.p", trial.shared(1)}});
    try {
      session.engine().step();
      ADD_FAILURE() << "a write that would be lost was accepted";
    } catch (const UseError& e) {
      EXPECT_NE(std::string(e.what()).find("a.p"), std::string::npos) << e.what();
    }
    trial.start(lin(1));
  });
}

}  // namespace
}  // namespace ballast::testing
