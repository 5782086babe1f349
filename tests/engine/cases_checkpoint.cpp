// What was saved and taken up again: faults in which something of a run stayed behind, or something else came back.

#include <cerrno>
#include <filesystem>
#include <optional>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/checkpoint/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/log_lines.h"
#include "tests/engine/support/run_state.h"

namespace ballast::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Ends the process as far as training can see: engine and model are gone, the next model starts from other values.
Session& reborn(Trial& trial, std::shared_ptr<Lin> model, int accumulation_steps = 1,
                const nlohmann::json& changes = nlohmann::json::object(), const LoadOptions& options = {}) {
  trial.forget_sessions();
  Session& session = trial.start(std::move(model), accumulation_steps, changes);
  session.engine().load_checkpoint(trial.folder(), "", options);
  return session;
}

// transformers#22143, gpt-neox#308: a window that was pending at the save was applied half after the load, or its
// samples were counted twice.
void load_with_another_window(Trial& trial) {
  Session& session = trial.start(lin(4), 2);
  const Pull two = pull(trial.shared(2));
  for (int i = 0; i < 3; ++i) session.micro_batch(two);
  session.expect_value("p", -.0666667);
  {
    std::optional<LogLines> log;  // the sink is the process's
    if (trial.rank() == 0) log.emplace();
    session.engine().save_checkpoint(trial.folder());
    if (log) {
      EXPECT_NE(log->text().find("will miss 1 micro-batch "), std::string::npos) << log->text();
    }
  }
  const Counters saved = session.engine().counters();
  EXPECT_TRUE(session.micro_batch(two).applied);  // the save left the running window alone
  session.expect_value("p", -.1333333);

  Session& loaded = reborn(trial, lin(4, 7), 4);
  loaded.expect_value("p", -.0666667);
  EXPECT_EQ(loaded.engine().counters().global_samples, saved.global_samples);
  EXPECT_EQ(loaded.engine().counters().global_samples, 2 * trial.world().size());
  EXPECT_EQ(loaded.engine().counters().micro_steps, saved.micro_steps - 1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(loaded.micro_batch(two).reason, StepReason::kMidWindow);
  EXPECT_TRUE(loaded.micro_batch(two).applied);
  loaded.expect_value("p", -.1333333);
}

// DeepSpeed#4344, Lightning#11188: the schedule came back at another step than the optimizer.
void schedule_behind_skipped_steps(Trial& trial) {
  const nlohmann::json schedule = {{"type", "WarmupLR"},  // .01 t
                                   {"params",
                                    {{"warmup_min_lr", .01},
                                     {"warmup_max_lr", .11},
                                     {"warmup_num_steps", 10},
                                     {"warmup_type", "linear"},
                                     {"last_batch_iteration", 0}}}};
  const Pull one = pull(trial.shared(1));
  Session* session = &trial.start(lin(4), 1, {{"scheduler", schedule}});
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(session->window({pull(kInf)}).applied);
  for (const double value : {-.005, -.015, -.03}) {
    session->window({one});
    session->expect_value("p", value);
  }
  session->engine().save_checkpoint(trial.folder());
  session = &reborn(trial, lin(4, 7), 1, {{"scheduler", schedule}});
  EXPECT_EQ(session->engine().counters().skipped_steps, 2);
  for (const double value : {-.05, -.075}) {
    session->window({one});
    session->expect_value("p", value);
  }
  // By hand: what set_lr() gave comes back, too.
  session = &trial.start(lin(4));
  session->engine().set_lr({.04});
  session->engine().save_checkpoint(trial.folder());
  EXPECT_EQ(reborn(trial, lin(4)).engine().lr(), std::vector<double>{.04});
}

// DeepSpeed#8280, #8297, pytorch#144045: empty and zero-dimensional parameters broke the files or came back flat.
void every_shape(Trial& trial) {
  for (const char* unit : {"", ".p"}) {
    EveryShape shapes(trial, unit);
    Session* session = &trial.start(lin(shapes.parameters));
    session->window({shapes.all});
    session->engine().save_checkpoint(trial.folder(), std::string("shapes") + unit);
    for (Named& named : shapes.parameters) named.start = 3;
    auto model = lin(shapes.parameters);
    session = &reborn(trial, model);
    for (const double value : {-.05, -.10}) {
      for (const Named& named : shapes.parameters) {
        EXPECT_EQ(model->parameter(named.name).sizes(), at::IntArrayRef(named.shape));
        session->expect_value(named.name, value);
        session->expect_state(named.name, "step", std::round(value / -.05));
      }
      EXPECT_NEAR(session->window({shapes.all}).grad_norm, EveryShape::kNorm, 1e-6);
    }
  }
}

// DeepSpeed#7050, #7906: groups got each other's state behind a trip to the host, or to a file.
void interleaved_groups_travel(Trial& trial) {
  const nlohmann::json optimizer = {{"type", "AdamW"},
                                    {"params",
                                     {{"lr", .1},
                                      {"eps", 1.0},
                                      {"weight_decay", 0.0},
                                      {"groups", {{{"patterns", {"b", "d"}}, {"lr", .01}, {"weight_decay", .5}}}}}}};
  const auto model = [](double start) {
    return lin({{"a", {3}, start}, {"b", {5}, start}, {"c", {7}, start}, {"d", {2}, start}});
  };
  Session* session = &trial.start(model(1), 1, {{"optimizer", optimizer}});
  const auto check = [&](double plain, double decayed) {
    Pull all;
    for (const char* name : {"a", "b", "c", "d"}) all.emplace_back(name, trial.shared(1));
    session->window({all});
    for (const char* name : {"a", "c"}) session->expect_value(name, plain);
    for (const char* name : {"b", "d"}) session->expect_value(name, decayed);
  };
  check(.95, .99);
  session->engine().offload_states();
  session->engine().reload_states();
  session->engine().save_checkpoint(trial.folder());
  session = &reborn(trial, model(2), 1, {{"optimizer", optimizer}});
  session->engine().offload_states();
  session->engine().reload_states();
  check(.90, .98005);
}

// DeepSpeed#7786, #5263; with states on NVMe #7613, #6963: moments or step count started anew behind a load.
void moments_come_back(Trial& trial) {
  Session* session = &trial.start(lin(4));
  ScalarAdam adam;
  for (const double c : {1, 2, 4}) {
    session->window({pull(trial.shared(c))});
    session->expect_value("p", adam.step(c));
  }
  // torch's fused kernel for CUDA rounds beta2 to fp32 before it takes 1 - beta2: 1.3e-5 of the moment.
  const bool rounds = trial.world().device().is_cuda() && !trial.cell().off_device();
  const double beta2 = rounds ? double{.999f} : .999;
  const double m = .1 * (.81 * 1 + .9 * 2 + 4), v = (1 - beta2) * (beta2 * beta2 * 1 + beta2 * 4 + 16);
  const auto check = [&] {
    session->expect_state("p", "exp_avg", m);
    session->expect_state("p", "exp_avg_sq", v, 1e-7);
    session->expect_state("p", "step", 3, 0);
  };
  check();
  session->engine().save_checkpoint(trial.folder());
  session = &reborn(trial, lin(4, 7));
  check();
  session->window({pull(trial.shared(-8))});
  session->expect_value("p", adam.step(-8));
  session->expect_value("p", -.1653874);
}

// DeepSpeed#762, #1322, #4141: weights that were loaded alone were overwritten by the old masters in the next step.
void weights_alone(Trial& trial) {
  trial.start(lin(4, 5)).engine().save_checkpoint(trial.folder());
  for (const bool weights_only : {false, true}) {
    LoadOptions options;
    options.weights_only = weights_only;
    options.load_optimizer = false;
    Session& session = reborn(trial, lin(4, .9), 1, nlohmann::json::object(), options);
    session.expect_value("p", 5);
    session.window({pull(trial.shared(1))});
    session.expect_value("p", 4.95);
    EXPECT_NEAR(session.model().parameter("p").detach().to(at::kFloat).max().item<double>(), 4.95, .02);
  }
}

// DeepSpeed#3090, #2413, #3407: frozen weights came back rounded, flat, or not at all, tied names apart.
void frozen_and_tied(Trial& trial) {
  const auto model = [](double shift) {
    std::vector<Named> parameters;
    for (int i = 0; i < 6; ++i)
      parameters.push_back(
          {"unit" + std::to_string(i / 2) + ".p" + std::to_string(i), {2 * i + 1, 3}, 1.0 / 3 + shift * i, i % 2 == 0});
    auto made = lin(parameters);
    made->tie("unit0.p0", "last.tied");
    return made;
  };
  auto first = model(.1);
  Session* session = &trial.start(first);
  session->window({{{"unit0.p0", trial.shared(1)}, {"last.tied", trial.shared(1)}, {"unit1.p2", trial.shared(2)}}});
  const RunState saved = state_of(session->engine(), *first);
  session->engine().save_checkpoint(trial.folder());
  auto second = model(9);
  session = &reborn(trial, second);
  expect_same_state(state_of(session->engine(), *second), saved, "behind the load");
  EXPECT_TRUE(bit_equal(session->engine().full_parameter("last.tied"), session->engine().full_parameter("unit0.p0")));
  for (int i = 0; i < 6; ++i) {
    const at::Tensor& parameter = second->parameter("unit" + std::to_string(i / 2) + ".p" + std::to_string(i));
    EXPECT_EQ(parameter.sizes(), at::IntArrayRef({2 * i + 1, 3}));
    EXPECT_EQ(parameter.requires_grad(), i % 2 == 0);
  }
  session->window({{{"last.tied", trial.shared(1)}, {"unit1.p2", trial.shared(2)}}});
}

// DeepSpeed#7613, #6963: a checkpoint held names of swap files instead of what was in them.
void swap_folder_is_wiped(Trial& trial) {
  const auto run = [&](Session& session, std::initializer_list<double> pulls) {
    for (const double c : pulls) session.window({pull(trial.shared(c))});
  };
  auto uninterrupted = lin(1000);
  Session* session = &trial.start(uninterrupted);
  run(*session, {1, 3});
  session->engine().save_checkpoint(trial.folder());
  run(*session, {-2, 5});
  const RunState want = state_of(session->engine(), *uninterrupted);
  auto model = lin(1000, 7);
  session = &reborn(trial, model);  // the first engine has taken its swap files with it
  run(*session, {-2, 5});
  expect_same_state(state_of(session->engine(), *model), want, "at the end");
}

// torchtitan#1311, DeepSpeed#801: what couldn't be loaded was passed over in silence, or one rank waited for the
// others.
void errors_are_everybodys(Trial& trial) {
  Session& session = trial.start(lin(4, 1));
  Board& board = session.board();
  const auto expect_error = [&](const char* label, const std::vector<std::string>& parts, auto&& call) {
    std::string error;
    try {
      call();
    } catch (const Error& e) {
      error = e.what();
    }
    for (const std::string& part : parts) EXPECT_NE(error.find(part), std::string::npos) << label << ": " << error;
    board.post(trial.rank(), std::string(label) + ": " + error, at::zeros({1}));  // equal on all ranks
    session.expect_value("p", 1, 0);
  };
  const std::filesystem::path folder = trial.folder();
  Engine& engine = session.engine();
  expect_error("no latest", {"latest", folder.string()}, [&] { engine.load_checkpoint(folder); });
  expect_error("no folder", {"nowhere"}, [&] { engine.load_checkpoint(folder / "nowhere"); });
  engine.save_checkpoint(folder, "one");
  expect_error("unknown tag", {"two", "there are: one"}, [&] { engine.load_checkpoint(folder, "two"); });
  {
    // The tests run as root, whom no permission stops.
    const std::string last = std::to_string(trial.world().size() - 1);
    const FileFaults faults([&](FileOp op, const std::filesystem::path& path) -> FileFault {
      const bool its = path.filename().string().find("rank-0000" + last) != std::string::npos;
      return op == FileOp::kOpen && its ? FileFault{EACCES} : FileFault{};
    });
    session.meet_others();
    expect_error("unwritable", {"Permission denied", "rank " + last, "writable"},
                 [&] { engine.save_checkpoint(folder, "two"); });
    session.meet_others();
  }
  EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"latest", "one"}));
  session.meet_others();
  std::filesystem::remove(folder / "one" / "rank-00000-of-00002.safetensors");
  expect_error("deleted shard", {"rank-00000-of-00002.safetensors", "No such file"},
               [&] { engine.load_checkpoint(folder); });
  session.window({pull(trial.shared(1))});
  session.expect_value("p", .95);
}

}  // namespace

std::vector<Case> checkpoint_cases() {
  return {
      {10, "LoadWithAnotherWindow", load_with_another_window, kManaged, kEveryDType},
      {19, "ScheduleBehindSkippedSteps", schedule_behind_skipped_steps, kManaged, kFp16},
      {21, "EveryShapeSavedByOneRank", every_shape, kManaged, kEveryDType, kEveryStage, 1},
      {21, "EveryShapeSavedByFourRanks", every_shape, kManaged, kEveryDType, kEveryStage, 4},
      {24, "InterleavedGroupsTravel", interleaved_groups_travel, kManaged, kEveryDType},
      {26, "MomentsComeBack", moments_come_back, kBothWindows, kEveryDType},
      {27, "WeightsAlone", weights_alone, kManaged, kEveryDType},
      {28, "FrozenAndTiedComeBack", frozen_and_tied, kManaged, kEveryDType, kEveryStage, 3},
      {29, "SwapFolderIsWiped", swap_folder_is_wiped, kBothWindows, kEveryDType},
      {38, "ErrorsAreEverybodys", errors_are_everybodys, kManaged},
      {47, "MomentsComeBackFromNvme", moments_come_back, kCallerOwned},
  };
}

}  // namespace ballast::testing
