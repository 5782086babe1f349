// Calls of save_checkpoint() and load_checkpoint(): options, windows, and what is refused without a change.

#include <gtest/gtest.h>

#include <fstream>
#include <mutex>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/log_lines.h"
#include "tests/engine/support/run_state.h"

namespace ballast::testing {
namespace {

namespace fs = std::filesystem;

/// Texts by label, which must be equal on all ranks.
class Errors {
 public:
  /// Runs a call that must throw an E whose text has these parts.
  template <class E, class Fn>
  void expect(const std::string& label, const std::vector<std::string>& parts, Fn&& call) {
    std::string text;
    try {
      call();
    } catch (const E& e) {
      text = e.what();
    } catch (const std::exception& e) {
      ADD_FAILURE() << label << ": an error of another class: " << e.what();
    }
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << label << ": " << text;
    const std::lock_guard lock(mutex_);
    const auto [entry, first] = texts_.emplace(label, text);
    EXPECT_EQ(entry->second, text) << label << ": ranks got other errors";
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> texts_;
};

/// Every stage and placement, fp32, managed windows of `accumulation_steps`.
void everywhere(const std::function<void(Trial&)>& body, int ranks = 2) {
  for (const Cell& cell : cells(kEveryStage, kFp32, kManaged)) run_trial(ranks, cell, body);
}

TEST(Window, GoesOnBehindALoadWhereItIsKept) {
  everywhere([](Trial& trial) {
    const std::vector<Named> two{{"a.p", {70}}, {"b.p", {5}}};
    // b has a gradient in the first half of the window alone.
    const Pull first{{"a.p", trial.shared(1)}, {"b.p", trial.shared(4)}}, second{{"a.p", trial.shared(6)}};
    Session& session = trial.start(lin(two), 4);
    for (int i = 0; i < 2; ++i) session.micro_batch(first);
    session.engine().save_checkpoint(trial.folder(), "", {.include_window = true});
    for (int i = 0; i < 2; ++i) session.micro_batch(second);  // the save took nothing
    const auto want = session.masters();
    Session& loaded = trial.start(lin(two), 4);
    EXPECT_TRUE(loaded.engine().load_checkpoint(trial.folder()).window);
    loaded.expect_grad("b.p", 2, 0);
    EXPECT_FALSE(loaded.micro_batch(second).applied);
    const StepReport report = loaded.micro_batch(second);
    EXPECT_TRUE(report.applied);
    EXPECT_EQ(report.micro_batches, 4);
    for (const auto& [name, value] : want) EXPECT_TRUE(bit_equal(loaded.masters().at(name), value)) << name;
    loaded.expect_value("a.p", -.1 * 3.5 / 4.5);
    loaded.expect_value("b.p", -.1 * 2 / 3);
    EXPECT_EQ(loaded.engine().counters().micro_steps, session.engine().counters().micro_steps);
  });
}

TEST(Window, OfAnotherWorldKeepsItsMean) {
  for (const bool weighted : {false, true}) {
    const SaveFolder folder;
    const auto backward = [&](Engine& engine, Lin& model, double c) {
      BackwardOptions options;
      if (weighted) options.weight = 2;
      engine.backward(loss_of(model, pull(c)), options);
    };
    const auto engine_of = [](const World& world, const std::shared_ptr<Lin>& model, int stage) {
      return std::make_unique<Engine>(
          model, Config::from_json(settings({stage, Placement::kHost, DType::kFloat32, false})), world);
    };
    run_ranks(
        4,
        [&](const World& world) {
          auto model = lin(300);
          const auto engine = engine_of(world, model, 2);
          backward(*engine, *model, 1 + world.rank());  // 1, 2, 3, 4
          engine->save_checkpoint(folder, "tag", {.include_window = true});
        },
        thread_options());
    run_ranks(
        2,
        [&](const World& world) {
          auto model = lin(300);
          const auto engine = engine_of(world, model, 3);
          engine->load_checkpoint(folder);
          backward(*engine, *model, 7);
          const StepReport report = engine->step();
          // Mean over ranks of the sums 2.5 and 7; weighted: (2 * 10 + 4 * 7) / 12.
          const double want = weighted ? 4 : 9.5;
          EXPECT_EQ(report.weight, weighted ? 12 : 0);
          EXPECT_NEAR(report.grad_norm, want * std::sqrt(300.0), 1e-4);
          expect_all(engine->full_parameter("p"), -.1 * want / (want + 1), 1e-6, "p");
        },
        thread_options());
  }
}

// Sums are kept as they are, scaled; the engine that goes on may scale by something else, or not at all.
TEST(Window, GoesOnWithAnotherLossScale) {
  everywhere([](Trial& trial) {
    const auto with_scale = [&](int scale) {  // 0: fp32
      nlohmann::json changed = settings(trial.cell(), 4);
      if (scale > 0) changed["fp16"] = {{"enabled", true}, {"loss_scale", scale}};
      return changed;
    };
    for (const auto& [from, to] : std::vector<std::pair<int, int>>{{256, 0}, {0, 256}, {256, 64}, {64, 1024}}) {
      const SaveFolder& folder = trial.folder();
      const std::string tag = std::to_string(from) + "-" + std::to_string(to);
      Session& session = trial.start(lin({{"p", {70}}}), with_scale(from));
      session.micro_batch(pull(trial.shared(4)));
      session.engine().save_checkpoint(folder, tag, {.include_window = true});
      Session& loaded = trial.start(lin({{"p", {70}}}), with_scale(to));
      EXPECT_TRUE(loaded.engine().load_checkpoint(folder, tag).window);
      loaded.expect_grad("p", 1, 0);
      StepReport report;
      for (int i = 0; i < 3; ++i) report = loaded.micro_batch(pull(0));
      EXPECT_TRUE(report.applied);
      EXPECT_NEAR(report.grad_norm, std::sqrt(70.0), 1e-5) << tag;
    }
  });
}

TEST(Load, ListsWhatDoesNotFit) {
  everywhere([](Trial& trial) {
    const std::vector<Named> saved{{"same.p", {70}, 1}, {"other_shape.p", {6}, 2}, {"only_there.p", {3}, 3}};
    const std::vector<Named> here{{"same.p", {70}, 4}, {"other_shape.p", {2, 3}, 5}, {"only_here.p", {3}, 6}};
    Session& session = trial.start(lin(saved));
    session.window({{{"same.p", trial.shared(1)}}});
    session.engine().save_checkpoint(trial.folder());
    Session& loaded = trial.start(lin(here));
    std::string error;
    try {
      loaded.engine().load_checkpoint(trial.folder());
    } catch (const UseError& e) {
      error = e.what();
    }
    for (const char* part : {"lacks only_here.p", "no only_there.p", "other shapes are other_shape.p", "strict"})
      EXPECT_NE(error.find(part), std::string::npos) << error;
    loaded.expect_value("same.p", 4, 0);
    const LoadReport report = loaded.engine().load_checkpoint(trial.folder(), "", {.strict = false});
    EXPECT_EQ(report.missing, std::vector<std::string>{"only_here.p"});
    EXPECT_EQ(report.unexpected, std::vector<std::string>{"only_there.p"});
    EXPECT_EQ(report.misshaped, std::vector<std::string>{"other_shape.p"});
    loaded.expect_value("same.p", .95);
    loaded.expect_state("same.p", "exp_avg", .1);
    loaded.expect_value("other_shape.p", 5, 0);
    loaded.expect_value("only_here.p", 6, 0);
    loaded.window({{{"same.p", trial.shared(1)}, {"only_here.p", trial.shared(1)}}});
    loaded.expect_value("same.p", .90);
    loaded.expect_value("only_here.p", 5.95);
  });
}

TEST(Load, TakesWhatTheOptionsSay) {
  everywhere([](Trial& trial) {
    const nlohmann::json schedule = {
        {"scheduler",
         {{"type", "WarmupLR"},
          {"params",
           {{"warmup_min_lr", .01}, {"warmup_max_lr", .11}, {"warmup_num_steps", 10}, {"warmup_type", "linear"}}}}}};
    Session& session = trial.start(lin(4), 1, schedule);
    for (int i = 0; i < 4; ++i) session.window({pull(trial.shared(1))});
    session.engine().save_checkpoint(trial.folder());
    const double value = session.engine().full_parameter("p")[0].item<double>(), m = 1 - .9 * .9 * .9 * .9;
    const std::vector<double> late = session.engine().lr();
    struct Want {
      LoadOptions options;
      std::int64_t steps;
      double m;
      bool late;
    };
    LoadOptions weights, no_optimizer, no_scheduler;
    weights.weights_only = true;
    no_optimizer.load_optimizer = false;
    no_scheduler.load_scheduler = false;
    for (const Want& want : {Want{{}, 4, m, true}, Want{weights, 0, 0, false}, Want{no_optimizer, 4, 0, true},
                             Want{no_scheduler, 4, m, false}}) {
      Session& loaded = trial.start(lin(4, 7), 1, schedule);
      const std::vector<double> first = loaded.engine().lr();
      loaded.engine().load_checkpoint(trial.folder(), "", want.options);
      loaded.expect_value("p", value, 0);
      loaded.expect_state("p", "exp_avg", want.m);
      loaded.expect_state("p", "step", want.m == 0 ? 0 : 4, 0);
      EXPECT_EQ(loaded.engine().counters().applied_steps, want.steps);
      EXPECT_EQ(loaded.engine().lr(), want.late ? late : first);
      loaded.window({pull(trial.shared(1))});
      EXPECT_EQ(loaded.engine().lr() == first, !want.late);  // the schedule's first two rates are equal
    }
  });
}

TEST(Load, SaysThatTheScheduleIsAnother) {
  const auto schedule = [](double most) {
    return nlohmann::json{
        {"scheduler",
         {{"type", "WarmupLR"},
          {"params", {{"warmup_max_lr", most}, {"warmup_num_steps", 10}, {"warmup_type", "linear"}}}}}};
  };
  for (const double most : {.1, .2}) {
    const LogLines lines;
    run_trial(2, {2, Placement::kHost, DType::kFloat32, true}, [&](Trial& trial) {
      Session& session = trial.start(lin(4), 1, schedule(.1));
      for (int i = 0; i < 4; ++i) session.window({pull(trial.shared(1))});
      session.engine().save_checkpoint(trial.folder());
      trial.start(lin(4), 1, schedule(most)).engine().load_checkpoint(trial.folder());
    });
    const bool said = lines.text().find("another schedule; this one goes on at its step 4") != std::string::npos;
    EXPECT_EQ(said, most == .2) << lines.text();
  }
}

TEST(Load, RefusesAnotherOptimizerUnlessToldNotTo) {
  everywhere([](Trial& trial) {
    const nlohmann::json sgd = {
        {"optimizer",
         {{"type", "SGD"}, {"params", {{"lr", 1.0}, {"momentum", .5}, {"betas", nullptr}, {"eps", nullptr}}}}}};
    Session& session = trial.start(lin(4, 1), 1, sgd);
    session.window({pull(trial.shared(1))});
    session.engine().save_checkpoint(trial.folder());
    Session& same = trial.start(lin(4, 3), 1, sgd);
    same.engine().load_checkpoint(trial.folder());
    same.window({pull(trial.shared(1))});
    same.expect_value("p", -1.5);  // 0 - (.5 * 1 + 1): the buffer came back
    Session& adam = trial.start(lin(4, 3));
    std::string error;
    try {
      adam.engine().load_checkpoint(trial.folder());
    } catch (const UseError& e) {
      error = e.what();
    }
    for (const char* part : {"SGD", "momentum_buffer", "exp_avg_sq", "load_optimizer"})
      EXPECT_NE(error.find(part), std::string::npos) << error;
    adam.expect_value("p", 3, 0);
    adam.engine().load_checkpoint(trial.folder(), "", {.load_optimizer = false});
    adam.expect_value("p", 0, 0);
    // Where that doesn't count, a step count doesn't come without the moments that belong to it.
    adam.window({pull(trial.shared(3))});
    adam.engine().load_checkpoint(trial.folder(), "", {.strict = false});
    adam.expect_value("p", 0, 0);
    for (const char* key : {"exp_avg", "exp_avg_sq", "step"}) adam.expect_state("p", key, 0, 0);
  });
}

TEST(Load, ThawsWhatWasFrozenAndFreezesWhatWasNot) {
  everywhere([](Trial& trial) {
    const auto model = [](double start, bool first) {
      return lin({{"a.p", {70}, start, first}, {"b.p", {5}, start, !first}});
    };
    Session& session = trial.start(model(1, true));
    session.window({{{"a.p", trial.shared(1)}}});
    session.engine().save_checkpoint(trial.folder());
    Session& other = trial.start(model(2, false));
    other.engine().load_checkpoint(trial.folder());
    other.expect_value("a.p", .95);
    other.expect_value("b.p", 1);
    other.window({{{"b.p", trial.shared(1)}}});
    other.expect_value("b.p", .95);
    other.expect_value("a.p", .95);
    // An engine that has trained it: none of that is left beside a step count of 0.
    for (int step = 0; step < 3; ++step) other.window({{{"b.p", trial.shared(5)}}});
    other.engine().load_checkpoint(trial.folder());
    for (const char* key : {"exp_avg", "exp_avg_sq", "step"}) other.expect_state("b.p", key, 0, 0);
    other.window({{{"b.p", trial.shared(1)}}});
    other.expect_value("b.p", .95);
    other.expect_state("b.p", "exp_avg", .1);
  });
}

/// A module with buffers, and a parameter that is as good as one.
struct Buffered : torch::nn::Module {
  explicit Buffered(double value) {
    p = register_parameter("p", at::full({70}, value));
    mean = register_buffer("mean", at::full({3}, value));
    count = register_buffer("deep_count", at::full({}, static_cast<std::int64_t>(value), at::kLong));
    order = register_parameter("order", at::full({4}, static_cast<std::int64_t>(value), at::kInt), false);
  }
  at::Tensor p, mean, count, order;
};

TEST(Buffers, ComeBackOnEveryRank) {
  for (const DType dtype : kEveryDType)
    run_trial(3, {3, Placement::kHost, dtype, true}, [](Trial& trial) {
      const Config config = Config::from_json(settings(trial.cell()));
      {
        auto model = std::make_shared<Buffered>(2 + trial.rank());  // rank 0's count
        Engine engine(model, config, trial.world());
        model->mean.mul_(3);
        engine.save_checkpoint(trial.folder(), "tag");
      }
      auto model = std::make_shared<Buffered>(5);
      Engine engine(model, config, trial.world());
      engine.load_checkpoint(trial.folder());
      expect_all(model->mean, 6, 0, "mean");
      EXPECT_EQ(model->count.item<std::int64_t>(), 2);
      expect_all(model->order, 2, 0, "a parameter that can't be trained");
      EXPECT_EQ(model->mean.scalar_type(), scalar_of(trial.cell().dtype));
      trial.start(lin(3));
    });
}

TEST(Buffers, ThatFilesCannotHoldAreNamed) {
  Errors errors;
  everywhere([&](Trial& trial) {
    auto model = lin(4);
    model->register_buffer("phases", at::zeros({2}, at::kComplexFloat));
    Session& session = trial.start(model);
    errors.expect<UseError>("complex", {"buffer/phases", "ComplexFloat", "view_as_real"},
                            [&] { session.engine().save_checkpoint(trial.folder()); });
    EXPECT_TRUE(trial.folder().names().empty());
    session.window({pull(trial.shared(1))});
    session.expect_value("p", -.05);
  });
}

TEST(Save, RefusesWhatCannotBeMeant) {
  Errors errors;
  everywhere([&](Trial& trial) {
    Session& session = trial.start(lin(4, 1));
    Engine& engine = session.engine();
    const SaveFolder& folder = trial.folder();
    for (const std::string tag : {"latest", "../up", "a/b", ".hidden", "best ", " "})
      errors.expect<UseError>("tag " + tag, {"not a tag", tag}, [&] { engine.save_checkpoint(folder, tag); });
    errors.expect<UseError>("folder", {"the folder has no name"}, [&] { engine.save_checkpoint("", "tag"); });
    errors.expect<UseError>("keep_last", {"keep_last", "-1"},
                            [&] { engine.save_checkpoint(folder, "", {.keep_last = -1}); });
    errors.expect<UseError>("state", {"client_state"},
                            [&] { engine.save_checkpoint(folder, "", {.client_state = "{"}); });
    errors.expect<UseError>("tags", {"same tag"},
                            [&] { engine.save_checkpoint(folder, "tag" + std::to_string(trial.rank())); });
    errors.expect<UseError>("options", {"same tag and options"},
                            [&] { engine.save_checkpoint(folder, "tag", {.keep_last = trial.rank()}); });
    engine.offload_states();
    errors.expect<UseError>("away", {"reload_states"}, [&] { engine.save_checkpoint(folder); });
    errors.expect<UseError>("away", {"reload_states"}, [&] { engine.load_checkpoint(folder); });
    engine.reload_states();
    EXPECT_TRUE(folder.names().empty());
    session.window({pull(trial.shared(1))});
    session.expect_value("p", .95);
    if (trial.rank() == 0) std::filesystem::create_directories(folder / "mine");
    errors.expect<IoError>("in the way in " + folder.path().string(), {"no checkpoint, and stays", "mine"},
                           [&] { engine.save_checkpoint(folder, "mine"); });
    EXPECT_EQ(folder.names(), std::vector<std::string>{"mine"});
  });
}

TEST(Save, NamesItsStepAndKeepsTheLast) {
  everywhere([](Trial& trial) {
    Session& session = trial.start(lin(4));
    for (int step = 0; step < 4; ++step) {
      session.engine().save_checkpoint(trial.folder(), "", {.keep_last = 2});
      if (step == 1) session.engine().save_checkpoint(trial.folder(), "mine", {.keep_last = 2});
      session.window({pull(trial.shared(1))});
    }
    EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"global_step2", "global_step3", "latest", "mine"}));
    Session& loaded = trial.start(lin(4, 7));
    EXPECT_EQ(loaded.engine().load_checkpoint(trial.folder()).tag, "global_step3");
    loaded.expect_value("p", -.15);
    loaded.engine().load_checkpoint(trial.folder(), "mine");
    loaded.expect_value("p", -.05);
    EXPECT_EQ(loaded.engine().counters().applied_steps, 1);
  });
}

TEST(Save, RemovesWhatItsRunSavedAndNoOthers) {
  everywhere([](Trial& trial) {
    Session& session = trial.start(lin(4));
    session.engine().save_checkpoint(trial.folder(), "global_step1");
    Session& other = trial.start(lin(4, 7));
    other.engine().save_checkpoint(trial.folder(), "global_step2", {.keep_last = 1});
    EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"global_step1", "global_step2", "latest"}));
    Session& third = trial.start(lin(4, 9));  // goes on with the first
    third.engine().load_checkpoint(trial.folder(), "global_step1");
    third.engine().save_checkpoint(trial.folder(), "global_step3", {.keep_last = 1});
    EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"global_step2", "global_step3", "latest"}));
  });
}

// One byte, one file, one rank: every rank says the same, and nothing has changed.
TEST(Load, FailsAlikeAndChangesNothing) {
  everywhere([](Trial& trial) {
    Session& session = trial.start(lin({{"a.p", {700}, 1}, {"b.p", {5}, 2}}));
    session.window({{{"a.p", trial.shared(1)}, {"b.p", trial.shared(2)}}});
    session.engine().save_checkpoint(trial.folder(), "tag");
    const fs::path folder = trial.folder() / "tag";
    auto model = lin({{"a.p", {700}, 3}, {"b.p", {5}, 4}});
    Session& other = trial.start(model);
    other.window({{{"a.p", trial.shared(3)}, {"b.p", trial.shared(-1)}}});
    other.backward({{"a.p", trial.shared(1)}});
    const RunState before = state_of(other.engine(), *model);
    const auto fails = [&](const std::string& name, const std::string& part,
                           const std::function<void(std::string&)>& change) {
      std::string content(fs::file_size(folder / name), '\0');
      std::ifstream(folder / name, std::ios::binary).read(content.data(), static_cast<std::streamsize>(content.size()));
      other.meet_others();
      if (trial.rank() == 0) {
        std::string other_content = content;
        change(other_content);
        std::ofstream(folder / name, std::ios::binary) << other_content;
      }
      other.meet_others();
      std::string error;
      try {
        other.engine().load_checkpoint(trial.folder());
      } catch (const IoError& e) {
        error = e.what();
      }
      EXPECT_NE(error.find(part), std::string::npos) << error;
      other.board().post(trial.rank(), name + part + ": " + error, at::zeros({1}));
      expect_same_state(state_of(other.engine(), *model), before, name + " " + part);
      if (trial.rank() == 0) std::ofstream(folder / name, std::ios::binary) << content;
      other.meet_others();
    };
    const std::string last = "rank-00001-of-00002.safetensors";
    fails(last, "not what was written", [](std::string& text) { text[text.size() - 6000] ^= 1; });
    fails(last, "was cut", [](std::string& text) { text.resize(text.size() - 1); });
    fails("manifest.json", "newer", [](std::string& text) {
      const std::string key = "\"version\": 1";
      text.replace(text.find(key), key.size(), "\"version\": 9");
    });
    fails("manifest.json", "not what was written", [](std::string& text) {
      const std::string key = "\"applied_steps\": 1";
      text.replace(text.find(key), key.size(), "\"applied_steps\": 2");
    });
    EXPECT_TRUE(other.step().applied);  // the window is still there
    other.engine().load_checkpoint(trial.folder());
    other.expect_value("a.p", .95);
  });
}

TEST(Save, SeesWhatWasWrittenAroundTheEngine) {
  Errors errors;
  everywhere([&](Trial& trial) {
    if (trial.cell().stage < 3) {
      trial.start(lin(4));
      return;
    }
    auto model = lin(4, 1);
    Session& session = trial.start(model);
    const torch::NoGradGuard no_grad;
    model->parameter("p").mul_(2);
    errors.expect<UseError>("write", {"p", "gathered"}, [&] { session.engine().save_checkpoint(trial.folder()); });
    EXPECT_TRUE(trial.folder().names().empty());
    trial.forget_sessions();
    trial.start(lin(4));
  });
}

}  // namespace
}  // namespace ballast::testing
