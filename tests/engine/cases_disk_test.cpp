// Faults reported by users of engines of this kind, by number: those that are about swap files themselves. The others
// run in every placement from the one table (cases_test.cpp).
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fstream>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/swap_folder.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

namespace fs = std::filesystem;

const std::vector<int> kStages{0, 1, 2, 3};

Cell all_on_disk(int stage, DType dtype = DType::kFloat32) { return {stage, Placement::kAllNvme, dtype, false}; }

struct Sizes : torch::nn::Module {
  explicit Sizes(const std::vector<std::int64_t>& sizes) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1);  // of its own: ranks are threads
    for (const std::int64_t size : sizes) {
      auto child = std::make_shared<torch::nn::Module>();
      child->register_parameter("p", at::randn({size}, generator));
      register_module("n" + std::to_string(size), child);
    }
  }
};

// DeepSpeed#1070, #2006, #7712: sizes that are no multiple of a block broke swapping, and so did tiny parameters.
TEST(Case23, EverySizeComesBackFromDiskBitForBit) {
  const std::vector<std::int64_t> sizes{1, 127, 129, 1025, 262'145, 12'500'000};
  for (const int stage : kStages)
    run_trial(2, all_on_disk(stage), [&](Trial& trial) {
      Board unused(trial.world().size());
      const auto model = std::make_shared<Sizes>(sizes);
      std::map<std::string, at::Tensor> want;
      for (const auto& item : model->named_parameters()) want[item.key()] = item.value().detach().clone();
      Session session(model, settings(trial.cell(), 1, {{"zero_optimization", {{"sub_group_size", 1'000'000}}}}),
                      trial.world(), unused);
      Engine& engine = session.engine();
      for (const auto& [name, value] : want) {
        EXPECT_TRUE(bit_equal(engine.full_parameter(name).cpu(), value)) << name;
        const at::Tensor moment = (value * 3).to(trial.world().device());
        engine.set_full_optimizer_state(name, "exp_avg_sq", moment);
        EXPECT_TRUE(bit_equal(engine.full_optimizer_state(name, "exp_avg_sq"), moment)) << name;
        engine.set_full_grad(name, moment);
        EXPECT_TRUE(at::allclose(engine.full_grad(name), moment)) << name;
        EXPECT_TRUE(bit_equal(engine.full_parameter(name).cpu(), value)) << name << " after the others' writes";
      }
      trial.start(lin(1));  // something for the ranks to compare
    });
}

// DeepSpeed#7613's kind: a model all of whose parameters are tiny.
TEST(Case23, TinyParametersTrain) {
  for (const int stage : kStages)
    run_trial(2, all_on_disk(stage), [](Trial& trial) {
      Session& session = trial.start(lin({{"a.p", {1}}, {"b.p", {}}, {"c.p", {2}}}));
      session.window({{{"a.p", trial.shared(1)}, {"b.p", trial.shared(1)}, {"c.p", trial.shared(1)}}});
      for (const char* name : {"a.p", "b.p", "c.p"}) session.expect_value(name, -.05);
    });
}

/// The error that ends each of two ranks whose rank 0's file was spoilt between two steps; the steps after that.
struct Spoilt {
  std::string error;
  int applied_after = 0;
};

std::vector<Spoilt> train_and_spoil(int stage, const std::string& file,
                                    const std::function<void(const fs::path&)>& spoil) {
  std::vector<Spoilt> results(2);
  run_ranks(
      2,
      [&](const World& world) {
        Board unused(world.size());
        const auto model = std::make_shared<Zoo>();
        nlohmann::json changes = Zoo::leaf_settings();
        changes["comm_timeout_seconds"] = 5;
        Session session(model, settings(all_on_disk(stage), 1, changes), world, unused);
        Spoilt& result = results[static_cast<std::size_t>(world.rank())];
        const auto train = [&](int step) {
          session.engine().backward(model->loss(sample(step, 0, world.rank(), world.device())));
          return session.engine().step().applied;
        };
        try {
          for (int step = 0; step < 3; ++step) EXPECT_TRUE(train(step));
          session.engine().synchronize();
          if (world.rank() == 0)
            for (const auto& entry : fs::directory_iterator(swap_folder()))
              if (entry.path().string().find("-r0-") != std::string::npos && fs::exists(entry.path() / file))
                spoil(entry.path() / file);
          for (int step = 3; step < 8; ++step) result.applied_after += train(step) ? 1 : 0;
          session.engine().synchronize();
        } catch (const std::exception& e) {
          result.error = e.what();
          try {
            session.step();
            ADD_FAILURE() << "a step after the error";
          } catch (const Error& cause) {
            if (world.rank() == 0) result.error = cause.what();
          }
        }
      },
      thread_options());
  return results;
}

void expect_told(const std::vector<Spoilt>& ranks, const std::vector<std::string>& parts, int stage) {
  for (const Spoilt& rank : ranks) {
    EXPECT_NE(rank.error, "") << "stage " << stage;
    EXPECT_LE(rank.applied_after, 1) << "the step under way had been agreed on, no later one may be";
  }
  for (const std::string& part : parts)
    EXPECT_NE(ranks[0].error.find(part), std::string::npos) << part << " in: " << ranks[0].error;
}

std::vector<std::string> files_of(int stage) {
  return stage == 3 ? std::vector<std::string>{"optimizer.swap", "parameters.swap"}
                    : std::vector<std::string>{"optimizer.swap"};
}

// DeepSpeed#1627.
TEST(Case35, ATruncatedFileEndsEveryRankWithItsName) {
  for (const int stage : kStages)
    for (const std::string& file : files_of(stage))
      expect_told(train_and_spoil(stage, file, [](const fs::path& path) { ASSERT_EQ(::truncate(path.c_str(), 0), 0); }),
                  {file, "rank 0", "ends too early"}, stage);
}

TEST(Case45, AFileOverwrittenWithZerosIsFoundOutBeforeItCounts) {
  for (const int stage : kStages)
    for (const std::string& file : files_of(stage))
      expect_told(train_and_spoil(stage, file,
                                  [](const fs::path& path) {
                                    std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
                                    out << std::string(fs::file_size(path), '\0');
                                    ASSERT_TRUE(out.good());
                                  }),
                  {file, "chunk ", "checksum"}, stage);
}

std::string start_error(const nlohmann::json& zero) {
  try {
    const Cell cell{3, Placement::kAllNvme, DType::kFloat32, false};
    Engine engine(lin({{"a.p", {100'000}}, {"b.p", {5}}}),
                  Config::from_json(settings(cell, 1, {{"zero_optimization", zero}})), World::single(test_options()));
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// DeepSpeed#3506, #3062.
TEST(Case36, ABufferThatIsTooSmallAndAPathThatIsNoneAreErrorsAtTheStart) {
  const std::string small = start_error({{"offload_param", {{"max_in_cpu", 0}, {"buffer_size", 99'999}}}});
  EXPECT_NE(small.find("unit a: 100032 elements"), std::string::npos) << small;
  EXPECT_NE(small.find("buffer_size = 99999"), std::string::npos) << small;
  // Chunks of states and sums are cut to their buffers, however large the parameter is.
  EXPECT_EQ(start_error({{"offload_param", {{"max_in_cpu", 0}, {"buffer_size", 100'032}}}}), "");

  const fs::path folder = swap_folder() / "a folder with spaces", file = folder / "file";
  fs::create_directories(folder);
  std::ofstream(file) << "text";
  for (const char* section : {"offload_optimizer", "offload_gradients", "offload_param"}) {
    const auto at_path = [&](const nlohmann::json& path) -> nlohmann::json {
      nlohmann::json zero = {{section, {{"nvme_path", path}}}};
      if (section == std::string("offload_param")) zero[section]["max_in_cpu"] = 0;
      return zero;
    };
    const std::string absent = start_error(at_path(nullptr));
    EXPECT_NE(absent.find(std::string(section) + ".nvme_path"), std::string::npos) << absent;
    for (const fs::path& wrong : {folder / "missing", file}) {
      const std::string error = start_error(at_path(wrong.string()));
      EXPECT_NE(error.find("nvme_path"), std::string::npos) << error;
      EXPECT_NE(error.find(wrong.string()), std::string::npos) << error;
    }
    EXPECT_EQ(start_error(at_path(folder.string())), "");
  }
  fs::remove(file);
  fs::remove(folder);
  expect_nothing_swapped();
}

// A placement on disk turned fp32 parameters into halves.
TEST(Case42, AThirdStaysExactInFp32OnDisk) {
  for (const Placement placement : kEveryPlacement)
    for (const int stage : kStages) {
      if (placement == Placement::kAllHost && stage != 3) continue;
      run_trial(2, {stage, placement, DType::kFloat32, false}, [](Trial& trial) {
        Session& session = trial.start(lin({{"a.p", {77}, 1. / 3}, {"b.p", {5}, 1. / 3}}));
        session.window({{{"b.p", trial.shared(0)}}});  // an update by nothing, and none
        for (const char* name : {"a.p", "b.p"}) {
          const at::Tensor value = session.model().parameter(name) * 1;
          EXPECT_EQ(value.scalar_type(), at::kFloat);
          expect_all(value, 1.f / 3, 0, name);
          expect_all(session.engine().full_parameter(name), 1.f / 3, 0, name);
        }
      });
    }
}

}  // namespace
}  // namespace ballast::testing
