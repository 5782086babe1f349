// A run that was saved and taken up in another process goes on bit for bit: N steps are k steps, a save, a load and N-k
// steps, in every stage, placement and dtype and for both kinds of windows; and from whatever engine a checkpoint
// comes, the logical state is the same.

#include <gtest/gtest.h>

#include <algorithm>

#include "ballast/comm/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/run_state.h"
#include "tests/engine/support/save_folder.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

constexpr int kSteps = 5, kSavedAfter = 2;

nlohmann::json run_settings(const Cell& cell, const nlohmann::json& zero = nlohmann::json::object()) {
  nlohmann::json changes = Zoo::leaf_settings();
  changes["gradient_clipping"] = 0.5;
  changes["scheduler"] = {{"type", "WarmupLR"},
                          {"params", {{"warmup_num_steps", 4}, {"warmup_max_lr", 0.1}, {"warmup_type", "linear"}}}};
  changes["zero_optimization"].merge_patch(zero);
  if (cell.dtype == DType::kFloat16) changes["fp16"] = {{"loss_scale_window", 2}};
  return settings(cell, 2, changes);
}

/// A model with its engine; another seed for every life, so that nothing is right by chance.
struct Life {
  Life(const World& world, const Cell& cell, std::int64_t seed, const nlohmann::json& json)
      : managed(cell.managed), model(std::make_shared<Zoo>(seed)), engine(model, Config::from_json(json), world) {}
  Life(const World& world, const Cell& cell, std::int64_t seed) : Life(world, cell, seed, run_settings(cell)) {}

  std::string window(int step) {
    StepReport report;
    for (int k = 0; k < 2; ++k) {
      const Sample s = sample(step, k, engine.world().rank(), engine.world().device());
      if (managed)
        engine.backward(model->loss(s));
      else
        engine.backward(model->loss(s), {.weight = 3.0 + k + engine.world().rank()});
      if (managed || k == 1) report = engine.step();
    }
    return text_of(report);
  }

  bool managed;
  std::shared_ptr<Zoo> model;
  Engine engine;
};

class Resume : public ::testing::TestWithParam<Cell> {};

TEST_P(Resume, GoesOnBitForBit) {
  const Cell cell = GetParam();
  const SaveFolder folder;
  run_ranks(
      2,
      [&](const World& world) {
        std::vector<std::string> reports;
        RunState at_save, want;
        {
          Life life(world, cell, 1);
          for (int step = 0; step < kSteps; ++step) {
            if (step == kSavedAfter) {
              life.engine.save_checkpoint(folder, "", {.client_state = R"({"epoch":7})"});
              at_save = state_of(life.engine, *life.model);
            }
            reports.push_back(life.window(step));
          }
          want = state_of(life.engine, *life.model);
        }
        Life life(world, cell, 2);
        const LoadReport loaded = life.engine.load_checkpoint(folder);
        EXPECT_EQ(loaded.tag, "global_step2");
        EXPECT_EQ(loaded.client_state, R"({"epoch":7})");
        EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty() && loaded.misshaped.empty());
        expect_same_state(state_of(life.engine, *life.model), at_save, "behind the load");
        for (int step = kSavedAfter; step < kSteps; ++step)
          EXPECT_EQ(life.window(step), reports[static_cast<std::size_t>(step)]) << "step " << step;
        expect_same_state(state_of(life.engine, *life.model), want, "at the end");
      },
      thread_options());
}

std::string cell_name(const ::testing::TestParamInfo<Cell>& info) { return name_of(info.param); }

INSTANTIATE_TEST_SUITE_P(Cells, Resume, ::testing::ValuesIn(cells(kEveryStage, kEveryDType, kBothWindows)), cell_name);

/// An engine that saves or loads: what must not matter to the logical state.
struct Form {
  int world;
  int stage;
  Placement placement;
  bool leaf;  // the model's blocks in one unit
};

nlohmann::json form_settings(const Form& form, DType dtype) {
  nlohmann::json zero = nlohmann::json::object();
  if (form.leaf) zero["leaf_module"] = {{"names", {"up", "down", "experts"}}};
  return run_settings({form.stage, form.placement, dtype, true}, zero);
}

std::string text_of(const Form& form) {
  return std::to_string(form.world) + " ranks, stage " + std::to_string(form.stage) + ", " + name_of(form.placement) +
         (form.leaf ? ", other units" : "");
}

const std::vector<Form> kForms{
    {1, 0, Placement::kDevice, false}, {2, 0, Placement::kHost, true},     {4, 1, Placement::kNvme, false},
    {2, 2, Placement::kHost, false},   {4, 3, Placement::kDevice, true},   {3, 3, Placement::kNvme, false},
    {1, 3, Placement::kHost, true},    {2, 3, Placement::kAllNvme, false},
};

class Reshard : public ::testing::TestWithParam<DType> {};

TEST_P(Reshard, EveryFormGivesTheSameLogicalState) {
  std::vector<Form> forms;
  std::copy_if(kForms.begin(), kForms.end(), std::back_inserter(forms),
               [](const Form& form) { return runs_in_one_world(form.world); });
  for (const Form& from : forms) {
    const SaveFolder folder;
    RunState saved;
    run_ranks(
        from.world,
        [&](const World& world) {
          Life life(world, {.managed = true}, 1, form_settings(from, GetParam()));
          for (int step = 0; step < 2; ++step) life.window(step);
          life.engine.save_checkpoint(folder, "tag");
          RunState state = state_of(life.engine, *life.model);
          if (world.rank() == 0) saved = std::move(state);
        },
        thread_options());
    for (const Form& to : forms)
      run_ranks(
          to.world,
          [&](const World& world) {
            Life life(world, {.managed = true}, 2, form_settings(to, GetParam()));
            life.engine.load_checkpoint(folder);
            expect_same_state(state_of(life.engine, *life.model), saved, text_of(from) + " to " + text_of(to));
            life.window(2);
          },
          thread_options());
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, Reshard, ::testing::ValuesIn(kEveryDType),
                         [](const ::testing::TestParamInfo<DType>& info) { return name_of(info.param); });

// Half precision is a matter of what forward sees; the masters move between dtypes.
TEST(Reshard, MastersMoveBetweenDTypes) {
  for (const DType from : kEveryDType)
    for (const DType to : kEveryDType) {
      const SaveFolder folder;
      run_ranks(
          2,
          [&](const World& world) {
            RunState saved;
            {
              Life life(world, {2, Placement::kHost, from, true}, 1);
              for (int step = 0; step < 2; ++step) life.window(step);
              life.engine.save_checkpoint(folder, "tag");
              saved = state_of(life.engine, *life.model, false);
            }
            Life life(world, {3, Placement::kDevice, to, true}, 2);
            life.engine.load_checkpoint(folder);
            RunState got = state_of(life.engine, *life.model, false);
            for (RunState* state : {&saved, &got}) {
              state->erase("loss scale");
              for (const char* frozen : {"full frozen.weight", "full frozen.bias"}) state->erase(frozen);
            }
            expect_same_state(got, saved, std::string(name_of(from)) + " to " + name_of(to));
          },
          thread_options());
    }
}

}  // namespace
}  // namespace ballast::testing
