// What a rank's ledger shows, what plan_memory says before anything is allocated, the closed forms of docs/memory.md
// and that page's example: four descriptions of the same bytes.

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "ballast/base/bytes.h"
#include "ballast/comm/testing.h"
#include "ballast/engine/engine.h"
#include "ballast/engine/memory_plan.h"
#include "ballast/engine/module_walk.h"
#include "ballast/models/gpt.h"
#include "ballast/models/skeleton.h"
#include "tests/engine/support/homes.h"
#include "tests/engine/support/swap_folder.h"

namespace ballast::testing {
namespace {

constexpr double kTolerance = 0.02;

models::GptOptions small_gpt() {
  models::GptOptions options;
  options.context = 16;
  options.layers = 5;
  options.width = 64;
  options.heads = 4;
  return options;
}

Layout layout_of(const torch::nn::Module& module, const Config& config, int world) {
  return make_layout(walk(module, config).parameters, world);
}

std::string name_of(MemoryKind kind, Tier tier) {
  return std::string(kMemoryKindNames[static_cast<std::size_t>(kind)]) + " on " +
         kTierNames[static_cast<std::size_t>(tier)];
}

void expect_close(std::int64_t got, std::int64_t want, const std::string& what) {
  EXPECT_NEAR(static_cast<double>(got), static_cast<double>(want), kTolerance * static_cast<double>(want))
      << what << " (" << format_bytes(got) << ", want " << format_bytes(want) << ")";
}

void expect_same_peaks(const Ledger& got, const Ledger& want, const std::string& what) {
  for (std::size_t kind = 0; kind < kMemoryKindNames.size(); ++kind)
    for (Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      const auto k = static_cast<MemoryKind>(kind);
      expect_close(got.cell(k, tier).peak, want.cell(k, tier).peak, what + ": " + name_of(k, tier));
    }
  for (Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme})
    expect_close(got.total(tier).peak, want.total(tier).peak,
                 what + ": all on " + kTierNames[static_cast<std::size_t>(tier)]);
}

/// A configuration, and how it is used.
struct Usage {
  Cell cell;
  int backwards = 1;
  nlohmann::json changes = nlohmann::json::object();
  bool no_sync = false;
};

std::string name_of(const Usage& usage, int world) {
  return name_of(usage.cell) + ", world " + std::to_string(world) + ", backwards " + std::to_string(usage.backwards) +
         ", " + usage.changes.dump();
}

Config config_of(const Usage& usage) { return Config::from_json(settings(usage.cell, usage.backwards, usage.changes)); }

/// Three windows of a small GPT.
void train(Engine& engine, models::Gpt& model, const Usage& usage) {
  const at::Tensor tokens = at::zeros({2, 8}, at::TensorOptions(at::kLong).device(engine.world().device()));
  for (int window = 0; window < 3; ++window) {
    {
      std::optional<ScopeGuard> guard;
      if (usage.no_sync) guard.emplace(engine.no_sync());
      for (int b = 0; b < usage.backwards; ++b) engine.backward(model->loss(tokens, tokens));
    }
    engine.step();
  }
}

void expect_ledger_as_planned(const Usage& usage, const World& world, const models::GptOptions& options) {
  models::Gpt model(options);
  const Config config = config_of(usage);
  const Layout layout = layout_of(*model, config, world.size());
  const auto plan = plan_memory(layout, config,
                                {.world = world.size(),
                                 .device = world.device().type(),
                                 .collectives_on_host = world.device().is_cpu() || test_options().backend == "gloo",
                                 .backwards = usage.backwards});
  Engine engine(model.ptr(), config, world);
  train(engine, model, usage);
  expect_same_peaks(engine.memory(), *plan, name_of(usage, world.size()));
}

/// homes: what is placed where. chunk: elements of a chunk off the device, at most.
std::vector<Usage> usages(const std::vector<Home>& homes, std::int64_t chunk) {
  std::vector<Usage> all;
  for (const Home& home : homes)
    for (const Cell& cell : cells({0, 1, 2, 3}, {DType::kFloat32, DType::kBFloat16}, {false}, {home.placement}))
      for (int backwards : {1, 3}) {
        nlohmann::json changes = home.changes();
        changes["zero_optimization"]["sub_group_size"] = chunk;
        all.push_back({cell, backwards, changes});
      }
  return all;
}

class Memory : public ::testing::TestWithParam<int> {};

TEST_P(Memory, LedgerPeaksAreThePlans) {
  run_ranks(
      GetParam(),
      [](const World& world) {
        for (Usage& usage : usages(homes(), 6'400)) {
          expect_ledger_as_planned(usage, world, small_gpt());
          if (usage.cell.stage != 3) continue;
          const nlohmann::json on_disk = {{"device", "nvme"}, {"nvme_path", swap_folder().string()}};
          std::vector<nlohmann::json> places{{{"device", "cpu"}}, on_disk, on_disk};
          places[1]["max_in_cpu"] = 0;
          places[2]["max_in_cpu"] = 20'000;
          for (const nlohmann::json& place : places) {
            usage.changes["zero_optimization"]["offload_param"] = place;
            expect_ledger_as_planned(usage, world, small_gpt());
          }
        }
      },
      thread_options());
  expect_nothing_swapped();
}

// The bounds on what is live, ahead and in flight, at sizes at which they bite. The output layer is one of its own, so
// that each parameter is used once a forward, as the plan assumes; and there are enough blocks that it doesn't matter
// which one is the last in memory (the plan doesn't know that an embedding's backward reads no weights).
TEST_P(Memory, LedgerPeaksAreThePlansUnderTightLimits) {
  models::GptOptions options = small_gpt();
  options.layers = 10;
  options.tied_head = false;
  const std::int64_t block = 12 * options.width * options.width + 13 * options.width;
  const auto zero = [](nlohmann::json keys) { return nlohmann::json{{"zero_optimization", std::move(keys)}}; };
  const std::vector<nlohmann::json> limits = {
      zero({{"overlap_comm", false}}),
      zero({{"reduce_bucket_size", 2 * block + 1000}}),
      zero({{"reduce_bucket_size", 1}}),
      zero({{"stage3_max_live_parameters", 3 * block}}),
      zero({{"stage3_max_live_parameters", 3 * block}, {"stage3_prefetch_bucket_size", block + 1000}}),
      zero({{"stage3_max_live_parameters", 1}}),
      zero({{"stage3_param_persistence_threshold", 20'000}, {"stage3_max_live_parameters", 2 * block + 1000}}),
  };
  run_ranks(
      GetParam(),
      [&](const World& world) {
        for (int stage : {1, 2, 3})
          for (const nlohmann::json& changes : limits)
            expect_ledger_as_planned({{stage, Placement::kDevice, DType::kBFloat16, false}, 2, changes}, world,
                                     options);
      },
      thread_options());
}

/// The closed forms of docs/memory.md next to a CPU, for limits that hold the whole model, parameters that are all
/// trained, and states in one place. staging_host: the ring of chunks between host memory and NVMe; copies_host: what
/// comes on top of it next to a GPU.
struct Forms {
  double params, optimizer, gathered, staging, staging_host, copies_host, grads_device, grads_host, device, host, nvme;
};

Forms forms(const Layout& layout, const Usage& usage) {
  double all = 0, largest = 0;  // elements: P, L
  for (const Unit& unit : layout.units) {
    all += static_cast<double>(unit.padded);
    largest = std::max(largest, static_cast<double>(unit.padded));
  }
  const double first = static_cast<double>(layout.units.front().padded);  // F
  const double ranks = layout.world;                                      // W
  const bool alone = layout.world == 1, several = usage.backwards > 1;
  const int stage = usage.cell.stage;
  const double c = usage.cell.dtype == DType::kFloat32 ? 4 : 2, a = 4;
  const Placement placement = usage.cell.placement;
  const bool off = usage.cell.off_device();
  const double states = 2 * 4 + (c == 4 && !off ? 0 : 4);  // s: Adam's moments, and the master weight
  const double kept = stage == 0 ? all : all / ranks;      // K

  Forms f{};
  f.params = c * (stage == 3 ? all / ranks : all);
  f.gathered = stage == 3 && !alone ? c * all : 0;
  f.optimizer = states * kept;
  const double sums = a * kept;
  double backward, reduction, landed;  // gradients and staging on the device at these moments, without sums on the host
  const double sums_here = off ? 0 : sums;
  if (stage < 2) {
    const double travels = several ? a : c;
    const double widening = several ? c * (a != c) * first : 0;
    const double local = travels * all + widening;
    f.staging = alone ? 0 : 2 * travels * all;
    f.grads_device = std::max(local, sums_here);
    backward = local;
    reduction = f.staging;
    landed = sums_here + (alone ? 0 : 2 * travels * first);
  } else {
    const double before = several ? sums_here : 0;
    f.staging = alone ? 0 : 2 * c * all;
    f.grads_device = std::max(before + c * largest, sums_here);
    backward = before + c * largest;
    reduction = before + f.staging;
    landed = sums_here + (alone ? 0 : 2 * c * first);
  }
  f.grads_host = off ? sums : 0;
  const double steady = f.params + f.gathered + (off ? 0 : f.optimizer);
  f.device = steady + std::max({backward, reduction, landed});
  const ZeroConfig zero = config_of(usage).zero;
  const double largest_kept = stage == 0 ? largest : largest / ranks;
  const double most = placement == Placement::kNvme ? 4. * 1024 * 1024 : static_cast<double>(zero.sub_group_size);
  const double longest = std::min(most, largest_kept);                                       // C
  f.copies_host = off ? 4 * c * longest + 8 * std::min(8. * 1024 * 1024, largest_kept) : 0;  // 4cC + 8G
  f.staging_host = placement == Placement::kNvme ? zero.offload_optimizer.buffer_count * states * longest : 0;
  f.host = f.grads_host + f.staging_host + (placement == Placement::kHost ? f.optimizer : 0);
  f.nvme = placement == Placement::kNvme ? f.optimizer : 0;
  return f;
}

models::GptOptions gpt_350m() {
  models::GptOptions options;
  options.vocabulary = 50'304;
  options.layers = 24;
  options.width = 1024;
  options.heads = 16;
  return options;
}

TEST(MemoryForms, AreThePlans) {
  const std::vector<Home> plain(homes().begin(), homes().begin() + 3);
  for (int world : {1, 2, 4, 8})
    for (const Usage& usage : usages(plain, kMaxSubGroupSize)) {
      SCOPED_TRACE(name_of(usage, world));
      const Config config = config_of(usage);
      const Layout layout = layout_of(*models::skeleton(gpt_350m()), config, world);
      const auto plan = plan_memory(layout, config, {.world = world, .backwards = usage.backwards});
      const Forms want = forms(layout, usage);
      const auto expect = [](const Ledger::Cell& cell, double bytes, const char* what) {
        expect_close(cell.peak, static_cast<std::int64_t>(bytes), what);
      };
      const Placement placement = usage.cell.placement;
      const Tier states = placement == Placement::kDevice ? Tier::kDevice
                          : placement == Placement::kHost ? Tier::kHost
                                                          : Tier::kNvme;
      expect(plan->cell(MemoryKind::kParams, Tier::kDevice), want.params, "params");
      expect(plan->cell(MemoryKind::kOptimizer, states), want.optimizer, "optimizer");
      expect(plan->cell(MemoryKind::kGathered, Tier::kDevice), want.gathered, "gathered");
      expect(plan->cell(MemoryKind::kStaging, Tier::kDevice), want.staging, "staging on device");
      expect(plan->cell(MemoryKind::kStaging, Tier::kHost), want.staging_host, "staging on host");
      const auto on_gpu =
          plan_memory(layout, config, {.world = world, .device = c10::DeviceType::CUDA, .backwards = usage.backwards});
      expect(on_gpu->cell(MemoryKind::kStaging, Tier::kHost), want.staging_host + want.copies_host,
             "staging on the host of a GPU");
      expect(plan->cell(MemoryKind::kGrads, Tier::kDevice), want.grads_device, "grads on device");
      expect(plan->cell(MemoryKind::kGrads, Tier::kHost), want.grads_host, "grads on host");
      expect(plan->total(Tier::kDevice), want.device, "all on device");
      expect(plan->total(Tier::kHost), want.host, "all on host");
      expect(plan->total(Tier::kNvme), want.nvme, "all on NVMe");
    }
}

// Inside no_sync() stages 2 and 3 keep and send what stages 0 and 1 always do.
TEST_P(Memory, NoSyncKeepsContributionsWhole) {
  run_ranks(
      GetParam(),
      [](const World& world) {
        for (DType dtype : {DType::kFloat32, DType::kBFloat16})
          for (int stage : {2, 3})
            for (int backwards : {1, 3}) {
              const Usage usage{{stage, Placement::kDevice, dtype, false}, backwards, nlohmann::json::object(), true};
              const Usage stage1{{1, Placement::kDevice, dtype, false}, backwards};
              models::Gpt model(small_gpt());
              const Layout layout = layout_of(*model, config_of(usage), world.size());
              const auto plan = plan_memory(layout, config_of(stage1), {.world = world.size(), .backwards = backwards});
              Engine engine(model.ptr(), config_of(usage), world);
              train(engine, model, usage);
              for (MemoryKind kind : {MemoryKind::kGrads, MemoryKind::kStaging})
                expect_close(engine.memory().cell(kind, Tier::kDevice).peak, plan->cell(kind, Tier::kDevice).peak,
                             name_of(usage, world.size()) + ", in no_sync: " + name_of(kind, Tier::kDevice));
            }
      },
      thread_options());
}

INSTANTIATE_TEST_SUITE_P(Ranks, Memory, ::testing::Values(1, 2, 4),
                         [](const auto& info) { return std::to_string(info.param); });

/// A row of the example's table: the peaks of one stage and placement.
std::string row(const Usage& usage, const std::string& name, int world) {
  const Config config = config_of(usage);
  const Layout layout = layout_of(*models::skeleton(gpt_350m()), config, world);
  const auto plan =
      plan_memory(layout, config, {.world = world, .device = c10::DeviceType::CUDA, .backwards = usage.backwards});
  const auto sum = [&](MemoryKind kind) {
    return format_bytes(plan->cell(kind, Tier::kDevice).peak + plan->cell(kind, Tier::kHost).peak +
                        plan->cell(kind, Tier::kNvme).peak);
  };
  std::ostringstream out;
  out << "| " << name;
  for (MemoryKind kind :
       {MemoryKind::kParams, MemoryKind::kOptimizer, MemoryKind::kGrads, MemoryKind::kStaging, MemoryKind::kGathered})
    out << " | " << sum(kind);
  for (Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) out << " | " << format_bytes(plan->total(tier).peak);
  out << " |";
  return out.str();
}

TEST(Documentation, MemoryExampleIsThePlans) {
  std::ifstream file(BALLAST_SOURCE_DIR "/docs/memory.md");
  ASSERT_TRUE(file) << "docs/memory.md";
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);

  constexpr int kWorld = 8, kBackwards = 4;
  const nlohmann::json small = {{"zero_optimization",
                                 {{"stage3_max_live_parameters", 100'000'000},
                                  {"stage3_prefetch_bucket_size", 20'000'000},
                                  {"reduce_bucket_size", 20'000'000}}}};
  const nlohmann::json defaults = {
      {"zero_optimization", {{"sub_group_size", nullptr}, {"offload_optimizer", {{"buffer_count", nullptr}}}}}};
  const std::map<Placement, std::string> suffix{
      {Placement::kDevice, ""}, {Placement::kHost, ", states on the host"}, {Placement::kNvme, ", states on NVMe"}};
  for (const auto& [placement, where] : suffix)
    for (int stage : {0, 1, 2, 3}) {
      const std::string name = "stage " + std::to_string(stage) + where;
      const Cell cell{stage, placement, DType::kBFloat16, false};
      std::vector<std::string> wanted = {
          row({cell, kBackwards, placement == Placement::kNvme ? defaults : nlohmann::json::object()}, name, kWorld)};
      if (stage >= 2 && placement != Placement::kNvme)
        wanted.push_back(row({cell, kBackwards, small}, name + ", small limits", kWorld));
      for (const std::string& want : wanted)
        EXPECT_NE(std::find(lines.begin(), lines.end(), want), lines.end()) << "docs/memory.md lacks the line\n"
                                                                            << want;
    }
}

}  // namespace
}  // namespace ballast::testing
