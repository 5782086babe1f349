// What calls report and refuse, and how an engine begins and ends.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

void in_every_stage(const std::function<void(Trial&)>& body, bool managed = false) {
  for (const Cell& cell : cells(kEveryStage, kFp32, {managed})) run_trial(2, cell, body);
}

TEST(Construction, AConfigFilledInCodeObeysTheRangesOfTheSchema) {
  Config config;
  config.zero.stage = 9;
  auto module = std::make_shared<torch::nn::Linear>(2, 2)->ptr();
  try {
    Engine engine(module, config, World::single(thread_options()));
    ADD_FAILURE() << "stage 9 was accepted";
  } catch (const ConfigError& e) {
    EXPECT_NE(std::string(e.what()).find("zero_optimization.stage = 9"), std::string::npos) << e.what();
  }
}

// As at::empty(..., meta): the module is a description, and its values come unit by unit.
TEST(Construction, TakesParametersOffTheMetaDevice) {
  for (const Cell& cell : cells(kEveryStage, kEveryDType, {false}))
    run_ranks(
        2,
        [cell](const World& world) {
          const auto described = [] {
            auto model = lin({{"a.p", {4, 3}}, {"a.q", {2}}, {"b.p", {5}, 7}});
            for (const char* name : {"a.p", "a.q"}) {
              at::Tensor& parameter = model->parameter(name);
              parameter =
                  torch::empty(parameter.sizes(), at::TensorOptions(at::kFloat).device(at::kMeta)).requires_grad_();
            }
            return model;
          };
          auto model = described();
          std::vector<std::vector<std::string>> asked;
          const auto values = [&](const std::vector<std::string>& names) {
            asked.push_back(names);
            return std::vector<at::Tensor>{at::full({4, 3}, 3.), at::full({2}, 5.)};
          };
          {
            Engine engine(model, Config::from_json(settings(cell)), world, {.materialize = values});
            EXPECT_EQ(asked.size(), world.rank() == 0 ? 1u : 0u);
            for (const auto& names : asked) EXPECT_EQ(names, (std::vector<std::string>{"a.p", "a.q"}));
            engine.backward(loss_of(*model, {{"a.p", 1}, {"b.p", 1}}));
            EXPECT_TRUE(engine.step().applied);
            expect_all(engine.full_parameter("a.p"), 2.95, 1e-6, "a.p");
            expect_all(engine.full_parameter("a.q"), 5, 0, "a.q");
            expect_all(engine.full_parameter("b.p"), 6.95, 1e-6, "b.p");
          }
          EXPECT_THROW(Engine(described(), Config::from_json(settings(cell)), world), UseError);
        },
        thread_options());
}

TEST(Report, HoldsWhatTheStepDid) {
  const nlohmann::json groups = {
      {"optimizer",
       {{"type", "Adam"}, {"params", {{"lr", .1}, {"eps", 1.0}, {"groups", {{{"patterns", {"b"}}, {"lr", .01}}}}}}}},
      {"gradient_clipping", 1.0},
      {"train_micro_batch_size_per_gpu", 3}};
  in_every_stage(
      [&](Trial& trial) {
        Session& session = trial.start(lin({{"a", {4}}, {"b", {5}}}), 2, groups);
        const Pull both{{"a", trial.shared(1)}, {"b", trial.shared(2)}};
        const StepReport middle = session.micro_batch(both, {.weight = 3});
        EXPECT_FALSE(middle.applied);
        EXPECT_EQ(middle.reason, StepReason::kMidWindow);
        EXPECT_EQ(middle.micro_batches, 1);
        const StepReport end = session.micro_batch(both, {.weight = 3});
        EXPECT_TRUE(end.applied);
        EXPECT_EQ(end.micro_batches, 2);
        EXPECT_EQ(end.weight, 12);
        EXPECT_NEAR(end.grad_norm, std::sqrt(24.), 1e-6);
        EXPECT_NEAR(end.clip_factor, 1 / std::sqrt(24.), 1e-6);
        EXPECT_EQ(end.loss_scale, 1);
        EXPECT_EQ(end.lr, (std::vector<double>{.1, .01}));
        EXPECT_EQ(session.engine().group_of("a"), 0);
        EXPECT_EQ(session.engine().group_of("b"), 1);
        EXPECT_THROW(session.engine().group_of("c"), UseError);
        const Counters counters = session.engine().counters();
        EXPECT_EQ(counters.global_steps, 1);
        EXPECT_EQ(counters.applied_steps, 1);
        EXPECT_EQ(counters.skipped_steps, 0);
        EXPECT_EQ(counters.micro_steps, 2);
        EXPECT_EQ(counters.global_samples, 12);
      },
      true);
}

TEST(LearningRate, TheCallersWordHoldsUntilTheScheduleMovesOn) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin(4));
    EXPECT_EQ(session.engine().lr(), std::vector<double>{.1});
    session.engine().set_lr({.2});
    EXPECT_EQ(session.window({pull(trial.shared(1))}).lr, std::vector<double>{.2});
    session.expect_value("p", -.10);
    EXPECT_EQ(session.engine().lr(), std::vector<double>{.2}) << "for good without a schedule";
    EXPECT_THROW(session.engine().set_lr({.1, .1}), UseError);
    EXPECT_THROW(session.engine().set_lr({}), UseError);

    const nlohmann::json schedule = {
        {"type", "WarmupLR"},
        {"params", {{"warmup_min_lr", 0.}, {"warmup_max_lr", .4}, {"warmup_num_steps", 4}, {"warmup_type", "linear"}}}};
    Session& scheduled = trial.start(lin(4), 1, {{"scheduler", schedule}});
    const double planned = [&] {
      scheduled.window({pull(1)});
      scheduled.window({pull(1)});
      return scheduled.engine().lr().at(0);
    }();
    scheduled.engine().set_lr({planned * 7});
    EXPECT_EQ(scheduled.window({pull(1)}).lr.at(0), planned * 7);
    EXPECT_GT(scheduled.engine().lr().at(0), planned);
    EXPECT_LE(scheduled.engine().lr().at(0), .4) << "the schedule's own rate again";
  });
}

TEST(Backward, RefusesWhatIsNoLossAndKeepsTheWindow) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin({{"p", {4}}}));
    Engine& engine = session.engine();
    session.backward(pull(trial.shared(1)));
    const double kNan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_THROW(engine.backward(at::Tensor()), UseError);
    EXPECT_THROW(engine.backward(session.model().parameter("p") * 2), UseError);     // four numbers
    EXPECT_THROW(engine.backward(session.loss(pull(1)).detach()), UseError);         // no graph
    EXPECT_THROW(engine.backward(session.loss(pull(1)), {.weight = -1}), UseError);  // and also a second way
    EXPECT_THROW(engine.backward(session.loss(pull(1)), {.weight = kNan}), UseError);
    EXPECT_THROW(engine.backward(session.loss(pull(1)), {.weight = 1}), UseError);  // a second way to normalise
    EXPECT_THROW(engine.backward(session.loss(pull(1)), {.scale_wrt_gas = false}), UseError);
    session.expect_grad("p", 1, 0);
    const StepReport report = session.step();
    EXPECT_EQ(report.micro_batches, 1);
    session.expect_value("p", -.05);
    session.backward(pull(1), {.weight = 2});  // the next window may choose anew
    EXPECT_EQ(session.step().weight, 4);
  });
}

// torch.optim would take it: here it would be left where it is, without a word.
TEST(Step, RefusesAGradientThatWasAssignedByHandUntilZeroGradDropsIt) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin({{"p", {4}}}));
    at::Tensor parameter = session.model().parameter("p");
    parameter.mutable_grad() = at::ones({4});
    EXPECT_THROW(session.engine().step(), UseError);
    EXPECT_EQ(session.engine().counters().global_steps, 0);
    session.engine().zero_grad();
    EXPECT_FALSE(parameter.grad().defined());
    session.backward(pull(trial.shared(1)));
    EXPECT_TRUE(session.step().applied);
    session.expect_value("p", -.05);
  });
}

// torch.optim's in-place update makes the backward of an older graph an error; so does step() in every stage.
TEST(Backward, ThroughAGraphFromBeforeTheStepIsAnError) {
  for (const Cell& cell : cells(kEveryStage, kFp32, kCallerOwned))
    for (const int ranks : {1, 2})
      run_trial(ranks, cell, [](Trial& trial) {
        Session& session = trial.start(lin({{"p", {4}, 1}, {"other.p", {3}}}));
        const auto square = [&] { return session.model().parameter("p").square().sum(); };
        const at::Tensor old = square();
        session.window({{{"other.p", trial.shared(1)}}});  // doesn't update p
        session.engine().backward(old);
        session.expect_grad("p", 2);
        const at::Tensor stale = square();
        session.step();
        EXPECT_THROW(session.engine().backward(stale), c10::Error);
        session.engine().zero_grad();
        session.engine().backward(square());
        session.step();
      });
}

/// Passes its input on; its backward throws.
struct Broken : torch::autograd::Function<Broken> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("broken on purpose");
  }
};

TEST(Backward, AnExceptionInItLeavesTheWindowAsItWasOrAsksForZeroGrad) {
  in_every_stage([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {4}}, {"b.p", {3}}}));
    session.backward({{"a.p", trial.shared(1)}});
    EXPECT_THROW(session.engine().backward(Broken::apply(session.loss({{"a.p", 5}}))), std::exception);
    session.expect_grad("a.p", 1, 0);  // no gradient had arrived
    EXPECT_EQ(session.step().micro_batches, 1);
    session.expect_value("a.p", -.05);

    // b's gradient arrives before a's part breaks: what the forward ran last goes first.
    const at::Tensor breaks = Broken::apply(session.loss({{"a.p", 5}}));
    const at::Tensor arrives = session.loss({{"b.p", 5}});
    EXPECT_THROW(session.engine().backward(breaks + arrives), std::exception);
    EXPECT_THROW(session.step(), UseError);
    EXPECT_THROW(session.backward({{"a.p", 1}}), UseError);
    session.engine().zero_grad();
    EXPECT_EQ(session.step().reason, StepReason::kEmptyWindow);
    session.window({{{"a.p", trial.shared(1)}}});
    session.expect_value("a.p", -.10);
    session.expect_value("b.p", 0, 0);
  });
}

TEST(Ranks, ThatNormaliseOneWindowDifferentlyAllGetTheError) {
  in_every_stage([](Trial& trial) {
    Board unused(2);
    Session session(lin(4), settings(trial.cell()), trial.world(), unused);
    BackwardOptions options;
    if (trial.rank() == 1) options.weight = 2;
    session.backward(pull(1), options);
    EXPECT_THROW(session.step(), Error);
    trial.start(lin(1));
  });
}

// One backward on rank 0, three on rank 1: what all ranks call next finds them level.
TEST(Ranks, MayReadWriteAndDropAfterUnequalBackwards) {
  for (const Cell& cell : cells({0, 1, 2}, kFp32, kCallerOwned))
    run_trial(2, cell, [](Trial& trial) {
      Session& session = trial.start(lin({{"a.p", {4}}, {"b.p", {3}}}));
      const auto unequal = [&] {
        for (int k = 0; k < 1 + 2 * trial.rank(); ++k) session.backward({{"a.p", 1}, {"b.p", k}});
      };
      unequal();
      session.expect_grad("a.p", 2);    // (1 + 3) / 2
      session.expect_grad("b.p", 1.5);  // (0 + 0 + 1 + 2) / 2
      {
        const torch::NoGradGuard no_grad;
        const auto guard = session.engine().gathered({session.model().parameter("b.p")}, 1);
        session.model().parameter("b.p").fill_(trial.rank());
      }
      session.expect_value("b.p", 1, 0);
      unequal();
      session.engine().zero_grad();
      EXPECT_FALSE(session.engine().full_grad("a.p").defined());
      unequal();
      session.engine().set_full_parameter("a.p", at::full({4}, 5., at::kFloat));
      session.engine().set_full_grad("b.p", at::ones({3}, at::kFloat));
      EXPECT_TRUE(session.step().applied);
      session.expect_value("a.p", 5 - .0666667);
      session.expect_value("b.p", .95);
    });
}

TEST(Ranks, InDifferentCallsAllGetTheError) {
  for (const Cell& cell : cells({2, 3}, kFp32, kCallerOwned))
    run_trial(2, cell, [](Trial& trial) {
      Board unused(2);
      Session session(lin(4), settings(trial.cell()), trial.world(), unused);
      session.backward(pull(1));
      try {
        trial.rank() == 0 ? (void)session.engine().step() : session.engine().zero_grad();
        ADD_FAILURE() << "step() met zero_grad()";
      } catch (const CommError& e) {
        EXPECT_NE(std::string(e.what()).find("rank 0: step()"), std::string::npos) << e.what();
        EXPECT_NE(std::string(e.what()).find("rank 1: zero_grad()"), std::string::npos) << e.what();
      }
      trial.start(lin(1));
    });
}

TEST(Ranks, StartFromRankZerosValues) {
  in_every_stage([](Trial& trial) {
    auto model = lin({{"a", {5}, 1. + trial.rank()}, {"frozen", {3}, 7. + trial.rank(), false}});
    at::Tensor buffer = at::full({2}, 3. + trial.rank(), at::kFloat),
               index = at::full({2}, 5 + trial.rank(), at::kLong);
    model->register_buffer("buffer", buffer);
    model->register_buffer("index", index);
    Session& session = trial.start(model);
    session.expect_value("a", 1, 0);
    session.expect_value("frozen", 7, 0);
    expect_all(model->named_buffers()["buffer"], 3, 0, "buffer");
    expect_all(model->named_buffers()["index"], 5, 0, "index");
  });
}

TEST(Module, ParametersThatAreViewsKeepTheirValues) {
  in_every_stage([](Trial& trial) {
    struct Transposed : torch::nn::Module {
      at::Tensor p = register_parameter("p", at::arange(6, at::kFloat).reshape({2, 3}).t());
    };
    auto model = std::make_shared<Transposed>();
    Session& session = trial.start(model);
    const at::Tensor want = at::arange(6, at::kFloat).reshape({2, 3}).t().contiguous();
    EXPECT_TRUE(bit_equal(session.engine().full_parameter("p").cpu().contiguous(), want));
    EXPECT_TRUE(bit_equal(model->p.detach().clone().cpu().contiguous(), want));
    session.engine().backward((model->p * trial.shared(1)).sum());
    session.step();
    EXPECT_TRUE(at::allclose(session.engine().full_parameter("p").cpu(), want - .05, 0, 1e-6));
  });
}

TEST(Module, SparseGradientsCountAsDenseOnes) {
  in_every_stage([](Trial& trial) {
    const auto train = [&](bool sparse) -> Session& {
      auto table = std::make_shared<torch::nn::EmbeddingImpl>(torch::nn::EmbeddingOptions(7, 3).sparse(sparse));
      const torch::NoGradGuard no_grad;
      table->weight.fill_(.5);
      Session& session = trial.start(table);
      const torch::AutoGradMode grad(true);
      const at::Tensor tokens =
          at::arange(4, at::TensorOptions(at::kLong).device(trial.world().device())) + trial.rank();
      for (int step = 0; step < 2; ++step) {
        session.engine().backward(table->forward(tokens).square().sum());
        session.engine().backward(table->forward(tokens + 1).square().sum());
        session.step();
      }
      return session;
    };
    EXPECT_TRUE(
        bit_equal(train(true).engine().full_parameter("weight"), train(false).engine().full_parameter("weight")));
  });
}

TEST(Module, EvaluatesUnderInferenceMode) {
  in_every_stage([](Trial& trial) {
    auto model = std::make_shared<Zoo>();
    Session& session = trial.start(model, 1, Zoo::leaf_settings());
    const Sample input = sample(0, 0, trial.rank(), trial.world().device());
    const double trained = model->loss(input).item<double>();
    {
      const c10::InferenceMode inference;
      EXPECT_EQ(model->loss(input).item<double>(), trained);
    }
    session.engine().backward(model->loss(input));
    EXPECT_TRUE(session.step().applied);
    EXPECT_LT(model->loss(input).item<double>(), trained);
  });
}

TEST(Shutdown, GivesTheModuleItsParametersBack) {
  in_every_stage([](Trial& trial) {
    auto model = std::make_shared<Zoo>();
    Session& session = trial.start(model, 1, Zoo::leaf_settings());
    const Sample input = sample(0, 0, trial.rank(), trial.world().device());
    session.engine().backward(model->loss(input));
    session.step();
    const auto masters = session.masters();
    session.engine().backward(model->loss(input));  // a window in progress is dropped
    session.engine().shutdown();
    session.engine().shutdown();
    for (const auto& [name, value] : masters) {
      const at::Tensor parameter = model->named_parameters()[name];
      EXPECT_TRUE(bit_equal(parameter.detach(), value)) << name;
      EXPECT_NE(parameter.numel() > 0 ? parameter.const_data_ptr() : model.get(), nullptr) << name;
    }
    model->loss(input).backward();  // an ordinary module again
    EXPECT_TRUE(model->named_parameters()["gain"].grad().defined());
    EXPECT_THROW(session.engine().step(), UseError);
    EXPECT_THROW(session.engine().backward(model->loss(input)), UseError);
    EXPECT_THROW(session.engine().counters(), UseError);
    trial.forget_sessions();
    trial.start(lin(1));
  });
}

}  // namespace
}  // namespace ballast::testing
